"""Backbones that a command line names: weight files of any known format, and random weights."""

import argparse
import re
from collections.abc import Callable

import torch
from detectron2.config import get_cfg

from moco_d2.checkpoint.arguments import add_reading_arguments, reading_options
from moco_d2.config import add_moco_config
from moco_d2.engine.configs import merge_config_file_
from moco_d2.engine.values import check_device
from moco_d2.errors import UserError
from moco_d2.evaluation.frozen_features import (
    FrozenFeatures,
    features_from_file,
    random_features,
)

RANDOM = "random"


def add_init_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that :func:`networks_of` reads; KEY VALUE pairs come last."""
    add = parser.add_argument
    add("--init", action="append", required=True, help="NAME=FILE, or random; several times")
    add("--config", metavar="FILE.yaml", help="of the random weights")
    add("--seed", type=int, default=0, help="of whatever is drawn at random (default: 0)")
    add_reading_arguments(parser)
    add("options", nargs=argparse.REMAINDER, metavar="KEY VALUE", help="for the config")


def at_least(least: int) -> Callable[[str], int]:
    """The type of an argument that is a whole number, `least` or more."""

    def whole_number(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"{text} is not at least {least}")
        return int(text)

    return whole_number


def device_of(args: argparse.Namespace) -> str:
    """--device, or cuda where there is one.

    Raises:
        UserError: the device is not known, or not there.
    """
    has_cuda = torch.cuda.is_available()
    device = args.device or ("cuda" if has_cuda else "cpu")
    check_device(device, "--device")
    if device.startswith("cuda") and not has_cuda:
        raise UserError(f"--device is {device}, and there is no CUDA on this machine; give cpu")
    return device


def networks_of(args: argparse.Namespace) -> dict[str, FrozenFeatures]:
    """The backbone of each --init, by name.

    Raises:
        UserError, WeightsError: an argument or a file cannot be used.
    """
    if (args.config or args.options) and RANDOM not in args.init:
        given = " ".join([args.config or "", *args.options]).strip()
        raise UserError(f"{given!r} is for the config of --init random, which is not there")
    options = reading_options(args)
    networks: dict[str, FrozenFeatures] = {}
    for text in args.init:
        name, _, path = text.partition("=")
        if not re.fullmatch(r"[\w.+-]+", name) or (name == RANDOM) == bool(path):
            raise UserError(
                f"--init {text!r}: give NAME=FILE with a name of letters, digits and ._+-, or "
                f"{RANDOM!r} alone"
            )
        if name in networks:
            raise UserError(f"--init {text!r}: {name!r} is there twice; give another name")
        networks[name] = features_from_file(path, **options) if path else _random(args)
    return networks


def _random(args: argparse.Namespace) -> FrozenFeatures:
    if not args.config:
        raise UserError("--init random needs --config, which says of which architecture")
    cfg = get_cfg()
    add_moco_config(cfg)
    merge_config_file_(cfg, args.config)
    cfg.merge_from_list(args.options)
    return random_features(cfg, args.seed)
