"""The arguments of a command line that say how weight files are read, in place of what is told
from the files themselves."""

import argparse
from typing import Any

# Argument -> the key of the input convention that it states.
_STATED = ("format", "pixel_mean", "pixel_std", "stride_in_1x1")


def add_reading_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that :func:`reading_options` reads."""
    group = parser.add_argument_group("reading weights")
    add = group.add_argument
    add("--from", dest="source_format", metavar="FORMAT", help="do not detect the file's format")
    add(
        "--encoder",
        choices=("query", "key"),
        help="which of several encoders (default: the one that the format's project publishes, "
        "which is the query encoder, but DINO's teacher)",
    )
    add("--num-heads", type=int, metavar="N", help="of a ViT whose tensors do not tell it")
    add(
        "--unsafe-pickle",
        action="store_true",
        help="read a file that holds more than tensors and plain Python; it can run any code",
    )
    group = parser.add_argument_group(
        "input convention, in place of the format's or the file's own"
    )
    group.add_argument("--format", choices=("RGB", "BGR"), help="order of the channels")
    for name in ("mean", "std"):
        group.add_argument(
            f"--pixel-{name}",
            nargs=3,
            type=float,
            metavar="X",
            help="on the 0-255 scale, in the order of the channels",
        )
    group.add_argument(
        "--stride-in-1x1",
        choices=("yes", "no"),
        action=_YesNo,
        help="whether a bottleneck's stride is in its first 1x1 convolution",
    )


def reading_options(args: argparse.Namespace) -> dict[str, Any]:
    """What was given, as options of :func:`moco_d2.checkpoint.read_backbone`."""
    return {
        "source_format": args.source_format,
        "encoder": args.encoder,
        "num_heads": args.num_heads,
        "unsafe_pickle": args.unsafe_pickle,
        "convention": {
            key: getattr(args, key) for key in _STATED if getattr(args, key) is not None
        },
    }


class _YesNo(argparse.Action):
    def __call__(self, parser, namespace, value, option=None):
        setattr(namespace, self.dest, value == "yes")
