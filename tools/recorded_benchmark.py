#!/usr/bin/env python
"""Repeat the recorded benchmark of docs/results: methods and trends on the built-in data.

    tools/recorded_benchmark.py                what `make benchmark` runs, into output/benchmark
    tools/recorded_benchmark.py --quick        `make benchmark-quick`: one seed, fewer cells
    tools/recorded_benchmark.py --val --output output/choices
                                               detection on the validation split: to choose
    tools/recorded_benchmark.py --copy         results.json, report.md and plots to docs/results
    tools/recorded_benchmark.py --rerun methods/moco_v2/trial_1
                                               run this cell anew; do its numbers come out again?

The data are rendered into the folder. The same command goes on after a stop or a kill. Exit code: 0
all cells are done (--rerun: every number is the same, bit for bit), 1 some failed (some differ), 2
something cannot work.
"""

import argparse
import os
import sys

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in tools/train_net.py

from detectron2.utils.logger import setup_logger

from moco_d2.errors import UserError
from moco_d2.transfer.machine import cores
from moco_d2.transfer.recorded import PLANS, copy_results, rerun_cell, run_recorded, use_data_of


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", help="folder for everything written")
    parser.add_argument("--jobs", type=int, default=cores(), help="cells at the same time")
    parser.add_argument("--quick", action="store_true", help="one seed, fewer cells")
    parser.add_argument("--val", action="store_true", help="detect on _val in place of _test sets")
    parser.add_argument("--copy", nargs="?", const="docs/results", metavar="DIR")
    parser.add_argument("--rerun", metavar="GRID/VARIANT/trial_K")
    parser.add_argument("--against", metavar="DIR", help="of --rerun (default: --output)")
    args = parser.parse_args(argv)
    plan = "quick" if args.quick else "full"
    output = args.output or ("output/benchmark-quick" if args.quick else "output/benchmark")
    setup_logger(name="moco_d2")
    try:
        if args.copy:
            for folder in copy_results(output, args.copy):
                print(folder)
            return 0
        use_data_of(output)
        if args.rerun:
            against = args.against or output
            return int(not rerun_cell(PLANS[plan], output, args.rerun, against, args.val))
        return int(run_recorded(PLANS[plan], output, args.jobs, args.val) > 0)
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
