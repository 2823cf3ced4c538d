#!/usr/bin/env python
"""Turn weights of any known format into a backbone for detectron2, torchvision or timm, checked.

examples:
  # the query encoder of a MoCo run, as a detectron2 backbone
  tools/convert_weights.py output/pretrain/model_final.pth output/moco_r50.pkl

  # the key encoder instead, over an existing file
  tools/convert_weights.py output/pretrain/model_final.pth output/moco_r50.pkl --encoder key --force

  # the official MoCo v2, and a torchvision ResNet, the supervised baseline
  tools/convert_weights.py moco_v2_800ep_pretrain.pth.tar output/moco_v2_r50.pkl
  tools/convert_weights.py resnet50-0676ba61.pth output/supervised_r50.pkl

  # back to torchvision's names, with a record of what became of each tensor
  tools/convert_weights.py output/moco_r50.pkl moco_r50.pth --to torchvision --report moco_r50.json

  # which formats there are
  tools/convert_weights.py --list-formats

The written file carries its input convention (channel order, mean, std, stride), architecture and
origin. Exit status: 0 when every check passed, 1 when one failed, 2 when a file or an argument
cannot be used; nothing is written unless it is 0.
"""

import argparse
import sys
from collections.abc import Sequence

from moco_d2.checkpoint import CheckError, WeightsError, convert, format_rows, targets
from moco_d2.checkpoint.arguments import add_reading_arguments, reading_options


def main(argv: Sequence[str] | None = None) -> int:
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.list_formats:
        for name, title, encoders, convention in format_rows():
            print(f"{name:19} {title}\n{'':19} encoders: {encoders}; input: {convention}")
        return 0
    if args.output is None:
        parser.error("the following arguments are required: CHECKPOINT, OUT")
    try:
        report = convert(
            args.checkpoint,
            args.output,
            target=args.target,
            report=args.report,
            force=args.force,
            **reading_options(args),
        )
    except WeightsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1 if isinstance(error, CheckError) else 2
    print(report)
    return 0


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("checkpoint", metavar="CHECKPOINT", nargs="?", help="the weight file to read")
    suffixes = "; ".join(f"{name}: {', '.join(ends)}" for name, ends in targets().items())
    add("output", metavar="OUT", nargs="?", help=f"the file to write ({suffixes})")
    add(
        "--to",
        dest="target",
        choices=tuple(targets()),
        default="detectron2",
        help="whose names OUT has (default: detectron2)",
    )
    add("--list-formats", action="store_true", help="print the formats that are read, and exit")
    add("--report", metavar="FILE.json", help="record what became of each tensor")
    add("--force", action="store_true", help="replace OUT and FILE.json if they exist")
    add_reading_arguments(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
