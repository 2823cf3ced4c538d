#!/usr/bin/env python
"""Run the paper's studies on the built-in data: grids of pretraining recipes, judged by kNN.

    tools/ablate.py --list
    tools/ablate.py momentum shuffle --seeds 3 --jobs 2 --output output/ablations
    tools/ablate.py methods:random,moco_v2 --seeds 3 --jobs 2 --output output/methods \\
        --detect configs/demo/scenes_faster_rcnn_R18_FPN.yaml --val

GRID:VARIANT,VARIANT runs some variants of a grid.

Trailing KEY VALUE pairs go to every pretraining run. With --detect, each backbone is exported and
fine-tuned with this config, too (it may be given several times), and AP is reported besides;
--detect-option KEY VALUE goes to every fine-tuning. With --val the AP is that of the built-in sets'
validation split: choose on it, so that the test split only reports.

The built-in data set is looked for in $DETECTRON2_DATASETS; what is missing is said with the
command that renders it. Results are in the form of tools/transfer_benchmark.py: results.json,
report.html, report.md. The same command goes on after a stop or a kill. Exit code: 0 all cells are
done, 1 some failed (the others went on), 2 something cannot work and nothing was started.
"""

import argparse
import os
import shlex
import sys
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in tools/train_net.py

from moco_d2.errors import UserError
from moco_d2.transfer.ablation import Ablation, list_grids, run_ablation


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", metavar="GRID ... KEY VALUE", help="see --list")
    parser.add_argument("--list", action="store_true", help="print the grids and stop")
    parser.add_argument("--output", help="folder for everything written")
    parser.add_argument("--seeds", type=int, default=3, help="trials, with seeds 1, 2, ...")
    parser.add_argument("--jobs", type=int, default=1, help="cells at the same time")
    parser.add_argument("--num-gpus", type=int, default=1, help="of a run; processes on a CPU")
    parser.add_argument("--detect", action="append", default=[], metavar="CONFIG")
    parser.add_argument(
        "--detect-option", nargs=2, action="append", default=[], metavar=("KEY", "VALUE")
    )
    parser.add_argument("--val", action="store_true", help="detect on _val in place of _test sets")
    args = parser.parse_intermixed_args(argv)
    if args.list:
        print(list_grids())
        return 0
    # Grids are lower case, config keys are not.
    first_key = next((i for i, word in enumerate(args.words) if word.isupper()), len(args.words))
    grids, options = args.words[:first_key], args.words[first_key:]
    if not grids or not args.output:
        parser.error("name grids, of those of --list, and an --output")
    ablation = Ablation(
        Path(args.output).resolve(),
        grids,
        args.seeds,
        args.num_gpus,
        options,
        args.detect,
        [word for pair in args.detect_option for word in pair],
        args.val,
    )
    words = [os.path.basename(__file__), *(sys.argv[1:] if argv is None else argv)]
    try:
        return int(run_ablation(ablation, args.jobs, shlex.join(words)) > 0)
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
