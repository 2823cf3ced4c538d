#!/usr/bin/env python
"""Measure a data set before pretraining on it, and print the config lines to paste.

    tools/dataset_stats.py path/to/images
    tools/dataset_stats.py coco_2017_train coco_2017_unlabeled --sample 20000 --workers 8
    tools/dataset_stats.py path/to/scans --channels 1

Names are those of DATASETS.TRAIN: registered data sets, folders, lists, tar shards. Reported are
mean and std of the pixels, the range of 16-bit values, sizes, unreadable files and copies.
"""

import argparse
import sys
from collections import deque

from tqdm import tqdm

from moco_d2.data.datasets import load_image_index
from moco_d2.data.statistics import describe, measure_statistics
from moco_d2.errors import UserError


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="+", metavar="NAME", help="as in DATASETS.TRAIN")
    parser.add_argument("--channels", type=int, default=3, help="that images are read as")
    parser.add_argument("--sample", type=int, default=0, help="evenly spaced images; 0: all")
    parser.add_argument("--max-pixels", type=int, default=200_000_000, help="INPUT.MAX_PIXELS")
    parser.add_argument("--workers", type=int, default=0, help="processes that read")
    args = parser.parse_args(argv)
    try:
        found = measure_statistics(
            load_image_index(args.names),
            channels=args.channels,
            sample=args.sample,
            max_pixels=args.max_pixels,
            num_workers=args.workers,
        )
        (statistics,) = deque(tqdm(found, unit=" x 16 images", disable=None), maxlen=1)
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(describe(statistics))
    return 0


if __name__ == "__main__":
    sys.exit(main())
