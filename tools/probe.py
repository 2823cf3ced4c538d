#!/usr/bin/env python
"""Are these features any good? kNN and linear classification of frozen features, in minutes.

examples:
  # a finished pretraining beside another project's weights, on your folders of classes
  tools/probe.py --train mine/train --val mine/val --output output/probe \\
      --init moco=output/moco_pretrain/model_final.pth --init supervised=resnet50-0676ba61.pth

  # beside random weights of the config's architecture, on ImageNet, with 8 GPUs
  tools/probe.py --train imagenet_train --val imagenet_val --num-gpus 8 --workers 12 \\
      --init moco=moco_r50.pkl --init random --config configs/moco_pretrain.yaml \\
      --output output/probe

  # with 1 % of the labels, or 10 images of each class; the features are those of the last call
  tools/probe.py ... --few-labels 0.01
  tools/probe.py ... --few-labels 10

  # the built-in data set, as rendered by `make demo`
  DETECTRON2_DATASETS=output/demo/datasets tools/probe.py \\
      --train moco_demo_objects_train --val moco_demo_objects_val --size 48 \\
      --init moco=output/demo/pretrain/model_final.pth --init random \\
      --config configs/demo/moco_pretrain.yaml --output output/demo/probe

Files are those that tools/convert_weights.py reads; sets are named as in DATASETS.TRAIN, and each
image needs a class. Features of the centre crops are computed once and kept under OUTPUT/features:
the same command goes on after a stop or a kill. Written are results.json and a picture of the
confusions of each. Trailing KEY VALUE pairs change the config of the random weights.
"""

import argparse
import os
import sys

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in tools/train_net.py

from detectron2.utils.logger import setup_logger

from moco_d2.engine.environment import find_job
from moco_d2.engine.setup import exit_code, sentence
from moco_d2.errors import UserError
from moco_d2.evaluation.inits import add_init_arguments, at_least, device_of, networks_of
from moco_d2.evaluation.probe import Settings, describe, load_sets, run_probe


def main(argv: list[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    setup_logger(name="moco_d2")
    try:
        job = find_job(args.num_gpus)
        if job.local_rank is not None:
            raise UserError("start tools/probe.py by itself: --num-gpus says how many processes")
        settings = settings_of(args)
        sets = load_sets(args.train, args.val, settings.few_labels, settings.seed)
        networks = networks_of(args)
    except (ValueError, KeyError, AssertionError, OSError) as error:
        print(f"error: {sentence(error)}", file=sys.stderr)
        return 2
    try:
        return exit_code(
            lambda: print(describe(run_probe(networks, sets, args.output, settings, job)))
        )
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--train", nargs="+", required=True, metavar="NAME", help="who votes and is trained on")
    add("--val", nargs="+", required=True, metavar="NAME", help="who is classified")
    add("--output", required=True, metavar="DIR", help="for features, results and pictures")
    add("--size", type=int, default=Settings.size, help="of the centre crops (default: 224)")
    add("--deep-range", type=int, nargs=2, metavar="VALUE", help="INPUT.DEEP_RANGE, for 16 bits")
    add("--few-labels", type=float, default=0.0, help="a share of each class, or so many images")
    add("--learning-rates", type=float, nargs="+", metavar="LR", help="a head for each")
    add("--epochs", type=at_least(1), default=Settings.epochs, help="of the heads (default: 100)")
    add("--standardise", action="store_true", help="channels of mean 0 and std 1 for the heads")
    add("--num-gpus", type=at_least(1), default=1, help="processes for the features")
    add(
        "--workers",
        type=at_least(0),
        help="that load images, of each process (default: 4, 0 on a CPU)",
    )
    add("--device", help="cuda or cpu (default: cuda where there is one)")
    add_init_arguments(parser)
    return parser


def settings_of(args: argparse.Namespace) -> Settings:
    device = device_of(args)
    rates = tuple(args.learning_rates or Settings.learning_rates)
    if len({f"{rate:g}" for rate in rates}) < len(rates) or min(rates) <= 0:
        raise UserError(f"--learning-rates are {rates}: give different numbers above 0")
    return Settings(
        size=args.size,
        deep_range=tuple(args.deep_range or Settings.deep_range),
        few_labels=args.few_labels,
        learning_rates=rates,
        epochs=args.epochs,
        standardised=args.standardise,
        seed=args.seed,
        num_workers=(0 if device == "cpu" else 4) if args.workers is None else args.workers,
        device=device,
    )


if __name__ == "__main__":
    sys.exit(main())
