"""The two checks that weights pass: every tensor has its place, and the features are the same."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from detectron2.config import get_cfg
from detectron2.layers import ShapeSpec
from detectron2.modeling.backbone import ResNet, build_resnet_backbone
from torch import Tensor, nn

from moco_d2.checkpoint.files import WeightsError

STAGES = ("res2", "res3", "res4", "res5")
# Counts steps for a running mean without momentum, which no model here uses. A frozen BN has
# none, and neither have files from before torch 0.4.1.
COUNTER = "num_batches_tracked"
# Names that an error lists of each kind before it only counts the rest.
NAMES_SHOWN = 5

# Key of an architecture (plain Python, in recipes and exported files) -> its key in
# MODEL.RESNETS, and the value when an architecture does not state it.
ARCHITECTURE_KEYS = {
    "depth": ("DEPTH", None),
    "num_groups": ("NUM_GROUPS", 1),
    "width_per_group": ("WIDTH_PER_GROUP", 64),
    "res2_out_channels": ("RES2_OUT_CHANNELS", None),
    "stem_out_channels": ("STEM_OUT_CHANNELS", 64),
    "norm": ("NORM", "BN"),
}
# Blocks in each stage -> depth of the network with bottlenecks and, in places, without.
BOTTLENECK_DEPTHS = {(3, 4, 6, 3): 50, (3, 4, 23, 3): 101, (3, 8, 36, 3): 152}
BASIC_DEPTHS = {(2, 2, 2, 2): 18, (3, 4, 6, 3): 34}


@dataclass(frozen=True)
class Mismatch:
    """How tensors at hand differ from the tensors that a model needs; empty lists if they do not.

    Attributes:
        missing: names that are needed and not there.
        unused: names that are there and not needed.
        misshaped: names with both shapes, in words.
    """

    missing: list[str]
    unused: list[str]
    misshaped: list[str]

    def __bool__(self) -> bool:
        return bool(self.missing or self.unused or self.misshaped)

    def __str__(self) -> str:
        kinds = {"missing": self.missing, "not used": self.unused, "wrong shape": self.misshaped}
        return "; ".join(f"{kind}: {shown(names)}" for kind, names in kinds.items() if names)


def shown(names: Collection[str]) -> str:
    """The first names of a collection, and how many more there are."""
    listed = ", ".join(list(names)[:NAMES_SHOWN])
    more = len(names) - NAMES_SHOWN
    return listed if more <= 0 else f"{listed} and {more} more"


def compare_tensors(needed: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> Mismatch:
    """Compare names and shapes. Step counters of BN may be on either side alone."""
    return Mismatch(
        missing=[n for n in needed if n not in given and not is_counter(n)],
        unused=[n for n in given if n not in needed and not is_counter(n)],
        misshaped=[
            f"{n} is {_shape(given[n])} where {_shape(needed[n])} is needed"
            for n in needed
            if n in given and given[n].shape != needed[n].shape
        ],
    )


def is_counter(name: str) -> bool:
    return name.rpartition(".")[2] == COUNTER


def _shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "a scalar"


def architecture_from(tensors: Mapping[str, Tensor]) -> dict:
    """Tell a ResNet's architecture from its tensors under detectron2's names.

    Returns:
        the keys of `ARCHITECTURE_KEYS`, `name` and `out_features` (the deepest stage).

    Raises:
        WeightsError: these are not the tensors of a ResNet that detectron2 can build.
    """
    blocks = {stage: _count_blocks(stage, tensors) for stage in STAGES}
    depth_of = BOTTLENECK_DEPTHS if "res2.0.conv3.weight" in tensors else BASIC_DEPTHS
    counts = tuple(n for n in blocks.values() if n)
    depths = [depth for known, depth in depth_of.items() if known[: len(counts)] == counts]
    if not depths:
        raise WeightsError(
            f"blocks per stage {list(blocks.values())} are those of no ResNet that is known; "
            f"known depths: {sorted({*BASIC_DEPTHS.values(), *BOTTLENECK_DEPTHS.values()})}"
        )
    channels = {}
    last = "res2.0.conv3.weight" if depth_of is BOTTLENECK_DEPTHS else "res2.0.conv2.weight"
    for name in ("stem.conv1.weight", "res2.0.conv1.weight", "res2.0.conv2.weight", last):
        if name not in tensors or tensors[name].dim() != 4:
            raise WeightsError(f"no ResNet without a convolution {name}")
        channels[name] = tensors[name].shape[:2]
    width = channels["res2.0.conv1.weight"][0]
    groups = width // channels["res2.0.conv2.weight"][1]
    if depth_of is BASIC_DEPTHS and (groups, width) != (1, 64):
        raise WeightsError(
            f"blocks of two convolutions with {groups} groups and {width} channels in res2 are "
            "those of no ResNet that is known; known: 1 group, 64 channels"
        )
    return {
        "name": "build_resnet_backbone",
        "depth": depths[0],
        "num_groups": groups,
        "width_per_group": width // groups,
        "res2_out_channels": channels[last][0],
        "stem_out_channels": channels["stem.conv1.weight"][0],
        "norm": "BN",
        "out_features": [STAGES[len(counts) - 1]],
    }


def architecture_title(architecture: Mapping) -> str:
    """What a user would call an architecture."""
    if "num_heads" in architecture:
        width, depth, heads = (architecture[k] for k in ("embed_dim", "depth", "num_heads"))
        return f"ViT of {depth} blocks, {width} channels and {heads} heads"
    return f"ResNet-{architecture['depth']} to {architecture['out_features'][-1]}"


def _count_blocks(stage: str, names: Collection[str]) -> int:
    indices = {int(n.split(".")[1]) for n in names if n.startswith(f"{stage}.")}
    return max(indices, default=-1) + 1


def import_timm() -> Any | None:
    """The optional package timm, or None."""
    try:
        import timm
    except ImportError:
        return None
    return timm


def unfilled(build: Callable[[], nn.Module]) -> nn.Module:
    """Build a network whose tensors hold anything, which saves the time to initialise them."""
    with torch.device("meta"):
        network = build()
    network.to_empty(device="cpu")
    for name, buffer in network.named_buffers():
        if is_counter(name):  # a file need not have these
            buffer.zero_()
    return network


def build_resnet(architecture: Mapping, stride_in_1x1: bool, channels: int = 3) -> ResNet:
    """Build detectron2's ResNet, with all of its stages as features, down to the deepest one.

    Args:
        architecture: as :func:`architecture_from` returns it, or as a checkpoint's recipe has it.
        stride_in_1x1: where a bottleneck's stride is.
        channels: of the images.

    Raises:
        WeightsError: it is no ResNet of detectron2's, or states too little.
    """
    if architecture.get("name") != "build_resnet_backbone":
        raise WeightsError(
            f"only backbones that build_resnet_backbone makes can be exported, "
            f"not {architecture.get('name')!r}"
        )
    cfg = get_cfg()
    for key, (config_key, default) in ARCHITECTURE_KEYS.items():
        value = architecture.get(key, default)
        if value is None:
            raise WeightsError(f"the architecture {dict(architecture)} does not state {key!r}")
        cfg.MODEL.RESNETS[config_key] = value
    features = architecture.get("out_features")
    if not features or not set(features) <= set(STAGES):
        raise WeightsError(f"out_features {features} are no stages of a ResNet: {list(STAGES)}")
    cfg.MODEL.RESNETS.OUT_FEATURES = list(STAGES[: STAGES.index(max(features)) + 1])
    cfg.MODEL.RESNETS.STRIDE_IN_1X1 = stride_in_1x1
    cfg.MODEL.BACKBONE.FREEZE_AT = 0
    try:
        return unfilled(lambda: build_resnet_backbone(cfg, ShapeSpec(channels=channels)))
    except (AssertionError, KeyError) as error:
        raise WeightsError(
            f"detectron2 cannot build the ResNet {dict(architecture)}: {error}"
        ) from error


@torch.no_grad()
def largest_difference(source: nn.Module, target: nn.Module, seed: int = 0) -> float:
    """Compare two networks in eval mode, in float64, on random images.

    float64 takes rounding out of the comparison: what is left is a difference of the networks,
    however large the features of an untrained one are.

    Args:
        source: maps uint8 images (N, C, H, W), RGB where C = 3, to features by stage;
            `image_size` says which H and W to use.
        target: the same, for `channels` channels where it states them.
        seed: of the images.

    Returns:
        the largest absolute difference over all stages; NaN if a feature is NaN.
    """
    generator = torch.Generator().manual_seed(seed)
    channels = getattr(target, "channels", 3)
    size = (2, channels, source.image_size, source.image_size)
    images = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
    ours, theirs = (network.double().eval()(images) for network in (target, source))
    return float(torch.stack([(ours[s] - theirs[s]).abs().max() for s in ours]).max())
