"""Render the built-in data set.

Examples:
    python -m moco_d2.data.synthetic datasets/moco_demo --layout coco
    python -m moco_d2.data.synthetic datasets/moco_demo --layout voc --scenes-train 1000
    python -m moco_d2.data.synthetic datasets/moco_demo --layout cityscapes --objects-train 0
    python -m moco_d2.data.synthetic output/small --objects-train 2000 --figures-train 0
"""

import argparse
from collections.abc import Sequence

from detectron2.utils.logger import setup_logger

from moco_d2.data.synthetic.layouts import LAYOUTS
from moco_d2.data.synthetic.sets import SETS
from moco_d2.data.synthetic.writer import render_demo_data


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m moco_d2.data.synthetic",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "root",
        metavar="OUT",
        help="folder to write to; detectron2 finds the sets in "
        "$DETECTRON2_DATASETS/moco_demo (default: datasets/moco_demo)",
    )
    parser.add_argument("--layout", choices=list(LAYOUTS), default="coco")
    parser.add_argument("--seed", type=int, default=0, help="another seed, other pictures")
    parser.add_argument("--workers", type=int, help="processes (default: one per core)")
    sizes = parser.add_argument_group("number of images; 0 leaves a set as it is")
    for name, demo_set in SETS.items():
        default = demo_set.default_size
        flag = "--" + name.replace("_", "-")
        sizes.add_argument(flag, type=int, metavar="N", default=default, help=f"default: {default}")
    options = vars(parser.parse_args(arguments))

    setup_logger(name="moco_d2")
    try:
        render_demo_data(
            options["root"],
            layout=options["layout"],
            sizes={name: options[name] for name in SETS},
            seed=options["seed"],
            workers=options["workers"],
        )
    except (ValueError, OSError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
