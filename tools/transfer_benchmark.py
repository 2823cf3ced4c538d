#!/usr/bin/env python
"""Fine-tune and evaluate on several tasks from several initialisations, and report with spreads.

    tools/transfer_benchmark.py --tasks voc_0712_R50_C4_24k coco_R50_FPN_1x --num-gpus 8 \\
        --init random --init supervised=torchvision_r50.pkl --init moco_v2_200ep=moco_r50.pkl \\
        --trials 5 --output output/benchmark

    ... --dry-run            check everything, print the plan and stop
    ... --few-labels 0.1     train on a tenth of the images, the same for all initialisations
    ... --jobs 4             four runs at a time, each on --num-gpus GPUs of its own
    ... SOLVER.MAX_ITER 100  trailing KEY VALUE pairs go to every run
    tools/transfer_benchmark.py --report output/benchmark    rebuild the report from what is there

A task is a file of configs/transfer, by name, or any config by its path. Weights are files that
detectron2 loads; tools/convert_weights.py makes them. Names that begin with "supervised" make the
supervised row; names of moco_d2/transfer/published.yaml are held against the published numbers.

The same command goes on after a stop or a kill, in the middle of a run too. Exit code: 0 all cells
are done, 1 some failed (the others went on), 2 something cannot work and nothing was started.
"""

import argparse
import os
import shlex
import sys

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in tools/train_net.py

from moco_d2.errors import UserError
from moco_d2.transfer.benchmark import rebuild_report, run_benchmark
from moco_d2.transfer.plan import make_plan


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", default=[], help="names or paths of configs")
    parser.add_argument("--init", action="append", default=[], help="NAME=FILE, or random")
    parser.add_argument("--trials", type=int, default=5, help="runs of each, with seeds 1, 2, ...")
    parser.add_argument("--output", help="folder for everything written")
    parser.add_argument("--num-gpus", type=int, default=1, help="of a run; processes on a CPU")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument("--few-labels", type=float, default=0.0, help="a share, or so many images")
    parser.add_argument("--dry-run", action="store_true", help="check, print the plan and stop")
    parser.add_argument("--report", metavar="DIR", help="only rebuild the report of this folder")
    parser.add_argument("options", nargs=argparse.REMAINDER, metavar="KEY VALUE")
    args = parser.parse_args(argv)
    if not args.report and not (args.tasks and args.init and args.output):
        parser.error("--tasks, --init and --output are needed (or --report)")
    try:
        if args.report:
            print(rebuild_report(args.report))
            return 0
        plan = make_plan(
            args.output,
            args.tasks,
            args.init,
            args.trials,
            args.num_gpus,
            args.options,
            args.few_labels,
        )
        words = [os.path.basename(__file__), *(sys.argv[1:] if argv is None else argv)]
        return int(run_benchmark(plan, args.jobs, shlex.join(words), args.dry_run) > 0)
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
