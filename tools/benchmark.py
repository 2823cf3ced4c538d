#!/usr/bin/env python
"""Measure parts of this project beside the usual way, in one run, and print the ratios.

    tools/benchmark.py pipeline                  # two views of a JPEG, one core, process time
    tools/benchmark.py pipeline --images FOLDER  # the same with JPEGs of your own
    tools/benchmark.py ema                       # key encoder's update, ResNet-50
    tools/benchmark.py shuffle                   # images exchanged between two processes
    tools/benchmark.py step                      # a MoCo step over its encoders alone, K = 65536
    tools/benchmark.py monitors                  # a step that the monitors look at, beside one not
    tools/benchmark.py index                     # 1.28 million files: memory, second start
    tools/benchmark.py pipeline ema --json out.json

Ratios are medians over repeats in which the ways take turns.
"""

import argparse
import json
import os
import sys

# Set before torch loads: loader and reference run on one core, and threads that wait do not spin.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from moco_d2.benchmark.run import BENCHMARKS, run_benchmarks
from moco_d2.errors import UserError


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="+", choices=list(BENCHMARKS), help="what to measure")
    parser.add_argument("--json", metavar="FILE", help="write the ratios there")
    parser.add_argument("--repeats", type=int, help="of each way (default: by benchmark)")
    parser.add_argument("--images", help="pipeline: folder of JPEGs (default: scikit-image's)")
    parser.add_argument("--count", type=int, default=48, help="pipeline: at most so many images")
    parser.add_argument("--processes", type=int, default=2, help="shuffle: how many")
    parser.add_argument(
        "--batch", type=int, default=32, help="step, monitors, shuffle: images per process"
    )
    parser.add_argument(
        "--size", type=int, default=224, help="step, monitors, shuffle: side of the images"
    )
    parser.add_argument(
        "--device", default="cpu", choices=["cpu", "cuda"], help="step, monitors: where"
    )
    parser.add_argument("--files", type=int, default=1_280_000, help="index: how many")
    args = parser.parse_args(argv)
    try:
        ratios = run_benchmarks(args)
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.json:
        with open(args.json, "w") as file:
            json.dump(ratios, file, indent=2)
    return 0


if __name__ == "__main__":
    sys.exit(main())
