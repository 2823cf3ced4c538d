#!/usr/bin/env python
"""See what goes into a run, and what its features find similar.

The first images of a pretraining, each beside its two views:

    tools/visualize.py views --config configs/moco_pretrain.yaml
    tools/visualize.py views --config configs/pretrain/moco_v3_ViT_S_300ep.yaml INPUT.VIEWS.SIZE 96

The nearest neighbours of some images, by features of any weights, beside random ones:

    tools/visualize.py neighbours --images path/to/images --init moco=model_final.pth
    tools/visualize.py neighbours --images imagenet_val --queries mine.jpg other.jpg --k 12 \\
        --init moco=moco_r50.pkl --init random --config configs/moco_pretrain.yaml

A map of the images in two dimensions (t-SNE, or principal components), coloured by class:

    tools/visualize.py embedding --images mine/val --init moco=moco_r50.pkl --max-images 2000
    tools/visualize.py embedding --images mine/val --init supervised=resnet50.pth --method pca

Weights are files that tools/convert_weights.py reads. Images are named as in DATASETS.TRAIN.
"""

import argparse
import os
import sys

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in tools/train_net.py

from detectron2.utils.logger import setup_logger

from moco_d2.data.datasets import load_image_index
from moco_d2.engine.setup import sentence, setup
from moco_d2.errors import UserError
from moco_d2.evaluation.inits import add_init_arguments, at_least, device_of, networks_of
from moco_d2.visualization.feature_pictures import Reading, embedding_picture, neighbours_picture
from moco_d2.visualization.views import draw_view_pairs


def main(argv: list[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    setup_logger(name="moco_d2")
    try:
        if not args.output.endswith(".png"):
            raise UserError(f"--output {args.output} does not end in .png: name such a file")
        folder = os.path.dirname(args.output) or "."
        if not os.path.isdir(folder):
            raise UserError(f"--output {args.output}: there is no folder {folder}; make it first")
        args.draw(args)
    except (ValueError, KeyError, AssertionError, OSError) as error:
        print(f"error: {sentence(error)}", file=sys.stderr)
        return 2
    print(args.output)
    return 0


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="views|neighbours|embedding")

    views = commands.add_parser("views", help="images beside their views")
    views.set_defaults(draw=draw_views)
    _add_output(views, "views.png")
    views.add_argument("--config", required=True, metavar="FILE.yaml", help="of a pretraining")
    views.add_argument(
        "--images", type=at_least(1), default=24, help="that are shown (default: 24)"
    )
    views.add_argument("options", nargs=argparse.REMAINDER, metavar="KEY VALUE")

    near = commands.add_parser("neighbours", help="nearest neighbours of some images")
    near.set_defaults(draw=draw_neighbours)
    _add_output(near, "neighbours.png")
    _add_images(near, 5000, "search")
    whose = near.add_mutually_exclusive_group()
    whose.add_argument("--queries", nargs="+", metavar="NAME", help="images, all of them")
    whose.add_argument("--count", type=at_least(1), default=8, help="or so many of --images")
    near.add_argument("--k", type=at_least(1), default=8, help="neighbours (default: 8)")
    add_init_arguments(near)

    embedding = commands.add_parser("embedding", help="a map of images in two dimensions")
    embedding.set_defaults(draw=draw_embedding)
    _add_output(embedding, "embedding.png")
    _add_images(embedding, 1000, "show")
    embedding.add_argument("--method", choices=("tsne", "pca"), default="tsne")
    embedding.add_argument("--perplexity", type=float, default=30.0, help="of t-SNE (default: 30)")
    add_init_arguments(embedding)
    return parser


def draw_views(args: argparse.Namespace) -> None:
    run = argparse.Namespace(
        config_file=args.config, opts=args.options, eval_only=False, resume=False
    )
    cfg, _ = setup(run, world_size=1)
    draw_view_pairs(cfg, args.output, pairs=args.images)


def draw_neighbours(args: argparse.Namespace) -> None:
    figure = neighbours_picture(
        networks_of(args),
        load_image_index(args.images),
        _reading(args),
        queries=load_image_index(args.queries) if args.queries else None,
        count=args.count,
        k=args.k,
        max_images=args.max_images,
        seed=args.seed,
    )
    figure.savefig(args.output, facecolor="white")


def draw_embedding(args: argparse.Namespace) -> None:
    if args.perplexity <= 1:
        raise UserError(f"--perplexity is {args.perplexity:g}: give more than 1, such as 30")
    figure = embedding_picture(
        networks_of(args),
        load_image_index(args.images),
        _reading(args),
        method=args.method,
        max_images=args.max_images,
        perplexity=args.perplexity,
        seed=args.seed,
    )
    figure.savefig(args.output, dpi=140, facecolor="white")


def _add_output(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument(
        "--output", default=default, metavar="FILE.png", help=f"(default: {default})"
    )


def _add_images(parser: argparse.ArgumentParser, most: int, verb: str) -> None:
    add = parser.add_argument
    add("--images", nargs="+", required=True, metavar="NAME", help=f"data sets to {verb}")
    add(
        "--max-images",
        type=at_least(0),
        default=most,
        help=f"{verb} so many; 0: all (default: {most})",
    )
    add("--size", type=at_least(1), default=Reading.size, help="of the centre crops (default: 224)")
    add("--deep-range", type=int, nargs=2, metavar="VALUE", help="INPUT.DEEP_RANGE, for 16 bits")
    add("--workers", type=at_least(0), default=0, help="processes that read images")
    add("--device", help="cuda or cpu (default: cuda where there is one)")


def _reading(args: argparse.Namespace) -> Reading:
    return Reading(
        args.size,
        device_of(args),
        args.workers,
        tuple(args.deep_range or Reading.deep_range),
    )


if __name__ == "__main__":
    sys.exit(main())
