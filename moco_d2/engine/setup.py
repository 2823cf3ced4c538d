"""From a command line to a running job: arguments, effective config, processes, trainer."""

import argparse
import logging
import os
import sys

from detectron2.config import CfgNode, get_cfg
from detectron2.engine import default_argument_parser, default_setup
from detectron2.utils import comm
from detectron2.utils.logger import setup_logger
from torch.multiprocessing import ProcessExitedException

from moco_d2.config import add_moco_config
from moco_d2.engine.distributed import launch
from moco_d2.engine.trainer import BaseTrainer, PretrainTrainer
from moco_d2.engine.transfer import TransferTrainer
from moco_d2.errors import UserError

# Meta-architectures that this project trains its own way; all others are detectron2's models.
TRAINERS = {"MoCo": PretrainTrainer}


def run(argv: list[str] | None, epilog: str) -> int:
    """The whole of `tools/train_net.py`: returns the exit code.

    Everything that a config or a data set can get wrong is checked before any process starts or
    any folder is written; such an error is one line and exit code 2.

    Args:
        argv: command line; None takes the program's.
        epilog: examples shown under --help.
    """
    parser = default_argument_parser(epilog)
    args = parser.parse_args(argv)
    try:
        cfg, notes = setup(args)
    except (ValueError, KeyError, AssertionError, OSError, ImportError) as error:
        print(f"error: {_sentence(error)}", file=sys.stderr)
        return 2
    try:
        launch(
            _main,
            args.num_gpus,
            args.num_machines,
            args.machine_rank,
            args.dist_url if args.num_machines > 1 else "auto",
            cfg.MODEL.DEVICE,
            args=(cfg, notes, args),
        )
    except SystemExit as end:
        return end.code
    except ProcessExitedException as end:
        return end.exit_code
    return 0


def setup(args: argparse.Namespace) -> tuple[CfgNode, list[str]]:
    """The effective, frozen config of a command line, and a note per automatic choice.

    Raises:
        ValueError, KeyError, OSError: for what cannot run.
    """
    cfg = get_cfg()
    add_moco_config(cfg)
    if args.config_file:
        if not os.path.isfile(args.config_file):
            raise FileNotFoundError(f"no config file {args.config_file}")
        cfg.merge_from_file(args.config_file)
    cfg.merge_from_list(args.opts)
    if args.eval_only and not cfg.DATASETS.TEST:
        raise UserError("--eval-only has nothing to evaluate on: name a data set in DATASETS.TEST")
    saved = os.path.join(cfg.OUTPUT_DIR, "config.yaml")
    if args.resume and cfg.SEED < 0 and os.path.isfile(saved):
        # A seed that was drawn at random is part of the run that goes on.
        with open(saved) as f:
            cfg.SEED = CfgNode.load_cfg(f).SEED
    return trainer_of(cfg).effective_config(cfg, args.num_gpus * args.num_machines)


def trainer_of(cfg: CfgNode) -> type[BaseTrainer]:
    """The trainer for a config's meta-architecture."""
    return TRAINERS.get(cfg.MODEL.META_ARCHITECTURE, TransferTrainer)


def _main(cfg: CfgNode, notes: list[str], args: argparse.Namespace) -> None:
    """One process of the job."""
    default_setup(cfg, args)
    setup_logger(cfg.OUTPUT_DIR, distributed_rank=comm.get_rank(), name="moco_d2")
    logger = logging.getLogger(__name__)
    trainer_class = trainer_of(cfg)
    logger.info("\n" + trainer_class.describe(cfg, comm.get_world_size(), notes))
    try:
        if args.eval_only:
            trainer_class.eval_only(cfg, resume=args.resume)
            return
        trainer = trainer_class(cfg)
        trainer.resume_or_load(resume=args.resume)
        trainer.train()
    except (UserError, FileNotFoundError) as error:
        logger.error(_sentence(error))
        sys.exit(2)


def _sentence(error: Exception) -> str:
    """An error's message; a KeyError would show it in quotes."""
    return str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
