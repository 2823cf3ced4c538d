"""The input convention: what a backbone expects of its images, and how weights carry it along.

A convention is a plain dict: `format` ("RGB" or "BGR"), `pixel_mean` and `pixel_std` (floats on
the 0-255 scale, in the channel order of `format`) and `stride_in_1x1` (whether a bottleneck's
stride is in its first 1x1 convolution, as in MSRA's ResNets, or in its 3x3, as in torchvision's).
"""

from collections.abc import Mapping
from typing import Any

from detectron2.config import CfgNode

from moco_d2.checkpoint.files import WeightFile, WeightsError, read_weight_file

# torchvision's models and MoCo's: its 0-1 constants times 255.
IMAGENET_RGB = {
    "format": "RGB",
    "pixel_mean": [123.675, 116.28, 103.53],
    "pixel_std": [58.395, 57.12, 57.375],
    "stride_in_1x1": False,
}

# Key of a convention -> the config key that it decides.
CONFIG_KEYS = {
    "format": "INPUT.FORMAT",
    "pixel_mean": "MODEL.PIXEL_MEAN",
    "pixel_std": "MODEL.PIXEL_STD",
    "stride_in_1x1": "MODEL.RESNETS.STRIDE_IN_1X1",
}


def stated_convention(file: WeightFile) -> dict[str, Any] | None:
    """The convention that a file states, or None: exported files and detectors of this project
    hold it as `input`, pretraining checkpoints inside their `recipe`.

    Raises:
        WeightsError: the file states one that makes no sense.
    """
    convention = file.meta.get("input")
    if convention is None:
        convention = file.section("recipe").get("input")
    return None if convention is None else checked_convention(convention, file.name)


def read_input_convention(path: str) -> dict[str, Any] | None:
    """The convention stated by the weight file at `path`, or None when it states none.

    Raises:
        WeightsError: the file cannot be read, or states a convention that makes no sense.
    """
    return stated_convention(read_weight_file(path))


def convention_of(cfg: CfgNode) -> dict[str, Any]:
    """The convention that a config gives its model."""
    values = {key: _node(cfg, path)[leaf] for key, (path, leaf) in _SPLIT_KEYS.items()}
    values["pixel_mean"] = [float(v) for v in values["pixel_mean"]]
    values["pixel_std"] = [float(v) for v in values["pixel_std"]]
    return values


def apply_input_convention(cfg: CfgNode, convention: Mapping[str, Any]) -> list[str]:
    """Set what a convention decides in a config, in place.

    Args:
        cfg: not frozen.
        convention: see the head of this file.

    Returns:
        One line for each key that changed, with its old and its new value.

    Raises:
        WeightsError: the convention makes no sense.
    """
    convention = checked_convention(convention, "the given input convention")
    before = convention_of(cfg)
    changes = []
    for key, (path, leaf) in _SPLIT_KEYS.items():
        if before[key] != convention[key]:
            _node(cfg, path)[leaf] = convention[key]
            changes.append(f"{CONFIG_KEYS[key]}: {before[key]} -> {convention[key]}")
    return changes


class SavedConvention:
    """Puts a model's convention into its checkpoints, as `input`, through detectron2's
    `Checkpointer.add_checkpointable`, and refuses to resume under another."""

    def __init__(self, convention: Mapping[str, Any]):
        self._convention = dict(convention)

    def state_dict(self) -> dict[str, Any]:
        return dict(self._convention)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """
        Raises:
            WeightsError: the checkpoint was trained under another convention.
        """
        for key, config_key in CONFIG_KEYS.items():
            if state[key] != self._convention[key]:
                raise WeightsError(
                    f"the run to resume was trained with {config_key} {state[key]}, the config "
                    f"says {self._convention[key]}; resume with the config it was started with"
                )


_SPLIT_KEYS = {key: path.rsplit(".", 1) for key, path in CONFIG_KEYS.items()}


def _node(cfg: CfgNode, path: str) -> CfgNode:
    for name in path.split("."):
        cfg = cfg[name]
    return cfg


def checked_convention(convention: Any, owner: str) -> dict[str, Any]:
    """A convention with exactly the four keys, as plain Python of the right types."""
    if not isinstance(convention, Mapping) or set(convention) != set(CONFIG_KEYS):
        raise WeightsError(
            f"{owner}: an input convention has the keys {', '.join(CONFIG_KEYS)}, "
            f"not {convention!r}"
        )
    mean, std = ([float(v) for v in convention[k]] for k in ("pixel_mean", "pixel_std"))
    if convention["format"] not in ("RGB", "BGR"):
        raise WeightsError(f"{owner}: unknown image format {convention['format']!r}, RGB or BGR")
    if not mean or len(mean) != len(std) or min(std) <= 0:
        raise WeightsError(
            f"{owner}: pixel_mean {mean} and pixel_std {std} must each be a number per channel, "
            "and no standard deviation 0 or less"
        )
    return {
        "format": convention["format"],
        "pixel_mean": mean,
        "pixel_std": std,
        "stride_in_1x1": bool(convention["stride_in_1x1"]),
    }
