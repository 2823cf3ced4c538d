#!/usr/bin/env python
"""Pretrain, export and fine-tune on the built-in data set, and compare with random initialisation.

    tools/demo.py                                  # what `make demo` runs: minutes on two CPU cores
    tools/demo.py --output output/longer --trials 3 SOLVER.MAX_ITER 1900 SOLVER.BASE_LR 1.5e-3

Trailing KEY VALUE pairs change the pretraining config, configs/demo/moco_pretrain.yaml. Everything
is written under --output: data, runs, the exported backbone, results.json and three pictures.
"""

import argparse
import sys

from moco_d2.demo import run_demo


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", default="output/demo", help="folder for everything written")
    parser.add_argument("--trials", type=int, default=2, help="fine-tuning runs per initialisation")
    parser.add_argument("options", nargs=argparse.REMAINDER, metavar="KEY VALUE")
    args = parser.parse_args(argv)
    try:
        run_demo(args.output, args.options, args.trials)
    except (RuntimeError, ValueError, KeyError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
