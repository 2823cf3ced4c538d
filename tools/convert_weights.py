#!/usr/bin/env python
"""Turn a pretraining checkpoint into a backbone that detectron2 loads, checked.

examples:
  # the query encoder of a MoCo run, as a detectron2 backbone
  tools/convert_weights.py output/pretrain/model_final.pth output/moco_r50.pkl

  # the key encoder instead, over an existing file
  tools/convert_weights.py output/pretrain/model_final.pth output/moco_r50.pkl --encoder key --force

  # a torchvision ResNet, the supervised baseline
  tools/convert_weights.py resnet50-0676ba61.pth output/supervised_r50.pkl

The written file carries its input convention (channel order, mean, std, stride), architecture and
origin. Exit status: 0 when every check passed, 1 when one failed, 2 when a file or an argument
cannot be used; nothing is written unless it is 0.
"""

import argparse
import sys
from collections.abc import Sequence

from moco_d2.checkpoint import CheckError, WeightsError, convert


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="the weight file to read")
    parser.add_argument("output", metavar="OUT", help="the file to write: .pkl or .pth")
    parser.add_argument(
        "--encoder",
        choices=("query", "key"),
        default="query",
        help="which encoder of a MoCo checkpoint (default: query)",
    )
    parser.add_argument("--force", action="store_true", help="replace OUT if it exists")
    args = parser.parse_args(argv)
    try:
        report = convert(args.checkpoint, args.output, encoder=args.encoder, force=args.force)
    except WeightsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1 if isinstance(error, CheckError) else 2
    print(report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
