"""From a command line to a running job: arguments, effective config, processes, trainer."""

import argparse
import contextlib
import json
import logging
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator

from detectron2.config import CfgNode, get_cfg
from detectron2.engine import default_argument_parser, default_setup
from detectron2.evaluation.testing import flatten_results_dict
from detectron2.utils import comm
from detectron2.utils.logger import setup_logger
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

from moco_d2.checkpoint.files import replaced_file
from moco_d2.config import add_moco_config
from moco_d2.engine.base import BaseTrainer
from moco_d2.engine.classification import ClassificationTrainer
from moco_d2.engine.configs import merge_config_file_
from moco_d2.engine.densepose import add_densepose_keys
from moco_d2.engine.distributed import launch
from moco_d2.engine.environment import find_job
from moco_d2.engine.explain import explain
from moco_d2.engine.follow_weights import check_stated_convention
from moco_d2.engine.trainer import PretrainTrainer
from moco_d2.engine.transfer import TransferTrainer
from moco_d2.errors import UserError

# What --eval-only writes into OUTPUT_DIR.
EVALUATION = "evaluation.json"

logger = logging.getLogger(__name__)

# Meta-architectures that this project trains its own way; all others are detectron2's models.
TRAINERS = {
    "ImageClassifier": ClassificationTrainer,
    "MoCo": PretrainTrainer,
    "MoCoV3": PretrainTrainer,
}


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
        dist_url = args.dist_url if args.num_machines > 1 else "auto"
        job = find_job(args.num_gpus, args.num_machines, args.machine_rank, dist_url)
        cfg, notes = setup(args, job.world_size)
        if job.has_main_process:
            _check_writable(cfg.OUTPUT_DIR)
    except (ValueError, KeyError, AssertionError, OSError, ImportError) as error:
        print(f"error: {sentence(error)}", file=sys.stderr)
        return 2
    return exit_code(lambda: launch(_main, job, cfg.MODEL.DEVICE, (cfg, notes, args)))


def exit_code(work: Callable[[], None]) -> int:
    """The exit code of a command that ends with some work on processes; says why the work failed.

    Args:
        work: calls :func:`launch`, whose processes fail as in :func:`ending_in_a_sentence`.
    """
    try:
        work()
    except SystemExit as end:
        return end.code
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except ProcessRaisedException as end:
        print(f"error: {end}", file=sys.stderr)
        return 1
    except ProcessExitedException as end:
        if end.exit_code > 0:  # it has said why
            return end.exit_code
        print(f"error: {end}", file=sys.stderr)
        return 128 - end.exit_code
    return 0


@contextlib.contextmanager
def ending_in_a_sentence(explain: Callable[[Exception], Exception | None]) -> Iterator[None]:
    """End a process of a job with exit code 2 and a sentence in the log when the body fails.

    Args:
        explain: error -> the one to show in its place; None: it needs its stack trace.
    """
    try:
        yield
    except Exception as error:
        known = explain(error)
        if known is None:
            raise
        if comm.is_main_process() or not getattr(known, "on_all_processes", False):
            logger.error(sentence(known))
        raise SystemExit(2) from known


def setup(args: argparse.Namespace, world_size: int) -> tuple[CfgNode, list[str]]:
    """The effective, frozen config of a command line, and a note per automatic choice.

    Args:
        world_size: processes of the job.

    Raises:
        ValueError, KeyError, OSError: for what cannot run.
    """
    cfg = get_cfg()
    add_moco_config(cfg)
    if args.config_file:
        add_densepose_keys(cfg, args.config_file)
        merge_config_file_(cfg, args.config_file)
    cfg.merge_from_list(args.opts)
    if args.eval_only and not cfg.DATASETS.TEST:
        raise UserError("--eval-only has nothing to evaluate on: name a data set in DATASETS.TEST")
    saved = os.path.join(cfg.OUTPUT_DIR, "config.yaml")
    if args.resume and cfg.SEED < 0 and os.path.isfile(saved):
        # A seed that was drawn at random is part of the run that goes on.
        with open(saved) as f:
            cfg.SEED = CfgNode.load_cfg(f).SEED
    trainer = trainer_of(cfg)
    check_stated_convention(cfg, args.config_file, args.opts, trainer.convention_of_weights)
    return trainer.effective_config(cfg, world_size)


def trainer_of(cfg: CfgNode) -> type[BaseTrainer]:
    """The trainer for a config's meta-architecture."""
    return TRAINERS.get(cfg.MODEL.META_ARCHITECTURE, TransferTrainer)


def _main(cfg: CfgNode, notes: list[str], args: argparse.Namespace) -> None:
    """One process of the job."""
    # Commands that each join the job may have drawn a seed each.
    cfg, notes = comm.all_gather((cfg, notes))[0]
    _set_up_process(cfg, args)
    trainer_class = trainer_of(cfg)
    logger.info("\n" + trainer_class.describe(cfg, comm.get_world_size(), notes))
    with ending_in_a_sentence(lambda error: explain(error, cfg)):
        if args.eval_only:
            results = trainer_class.eval_only(cfg, resume=args.resume)
            if comm.is_main_process():
                _write_evaluation(cfg.OUTPUT_DIR, results)
            return
        trainer = trainer_class(cfg)
        trainer.resume_or_load(resume=args.resume)
        trainer.train()


def _write_evaluation(folder: str, results: dict) -> None:
    """Write what --eval-only measured, by the names that it would have in metrics.json."""
    flat = flatten_results_dict(results)
    finite = {k: v if math.isfinite(v) else None for k, v in flat.items()}  # JSON has no NaN
    with replaced_file(os.path.join(folder, EVALUATION)) as aside, open(aside, "w") as f:
        json.dump(finite, f, indent=2)


def _set_up_process(cfg: CfgNode, args: argparse.Namespace) -> None:
    """detectron2's `default_setup`, with one log for all processes.

    That of process 0 goes to OUTPUT_DIR/log.txt; the others' warnings and errors go to stderr.
    """
    # detectron2 logs the stack trace of every error of a run.
    logging.getLogger("detectron2.engine.train_loop").addFilter(
        lambda record: not record.exc_info or explain(record.exc_info[1], cfg) is None
    )
    if comm.is_main_process():
        default_setup(cfg, args)
        setup_logger(cfg.OUTPUT_DIR, name="moco_d2")
        return
    cfg = cfg.clone()
    cfg.defrost()
    cfg.OUTPUT_DIR = None
    default_setup(cfg, args)
    handler = logging.StreamHandler()
    handler.setLevel(logging.WARNING)
    handler.setFormatter(
        logging.Formatter(f"[process {comm.get_rank()}] %(name)s %(levelname)s: %(message)s")
    )
    for name in ("fvcore", "detectron2", "moco_d2"):
        logging.getLogger(name).addHandler(handler)


def _check_writable(folder: str) -> None:
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(
            f"OUTPUT_DIR {folder} cannot be written to: {error.strerror}; give another, or make "
            "it writable"
        ) from error


def sentence(error: Exception) -> str:
    """An error's message; a KeyError would show it in quotes."""
    return str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
