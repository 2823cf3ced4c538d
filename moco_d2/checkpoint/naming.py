"""How libraries name a network's tensors: the names of each, from and to detectron2's."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from moco_d2.checkpoint.networks import Detectron2Features, TimmFeatures, TorchvisionFeatures
from moco_d2.checkpoint.vit import Detectron2ViTFeatures, TimmViTFeatures, TorchvisionViTFeatures

# (pattern, replacement) pairs, applied in order.
Renames = tuple[tuple[str, str | Callable[[re.Match], str]], ...]
# (architecture, input convention) -> network.
Network = Callable[[Mapping, Mapping], nn.Module]


def rename(name: str, renames: Renames) -> str:
    """Apply all of the renames to a name."""
    for pattern, replacement in renames:
        name = re.sub(pattern, replacement, name)
    return name


@dataclass(frozen=True)
class Naming:
    """One library's names and its network.

    Attributes:
        title: what a user would call it.
        to_detectron2: turns this library's names into detectron2's (`stem.conv1.weight`,
            `res2.0.conv1.norm.weight`, ...).
        from_detectron2: the way back.
        network: (architecture, input convention) -> a module whose `body` has this library's
            names, and which maps uint8 images (N, 3, H, W), RGB, to features by stage.
        state_key: where the library's own readers look for the tensors in a file.
        suffixes: of files that the library reads.
        marks: what else a file must hold for them.
        keeps_extras: the library uses the tensors that `WeightFormat.extras` matches.
    """

    title: str
    to_detectron2: Renames
    from_detectron2: Renames
    network: Network
    state_key: str
    suffixes: tuple[str, ...]
    marks: Mapping[str, Any] = field(default_factory=dict)
    keeps_extras: bool = False


def _network(resnet: Network, vit: Network) -> Network:
    """What builds either, by the architecture."""

    def build(architecture: Mapping, convention: Mapping) -> nn.Module:
        return (vit if "num_heads" in architecture else resnet)(architecture, convention)

    return build


_RESNET_TO_DETECTRON2: Renames = (
    (r"^(?=(conv|bn)1\.)", "stem."),
    (r"^layer(\d)\.", lambda m: f"res{int(m[1]) + 1}."),
    (r"\.bn(\d)\.", r".conv\1.norm."),
    (r"\.downsample\.0\.", ".shortcut."),
    (r"\.downsample\.1\.", ".shortcut.norm."),
)
_RESNET_FROM_DETECTRON2: Renames = (
    (r"\.shortcut\.norm\.", ".downsample.1."),
    (r"\.shortcut\.", ".downsample.0."),
    (r"\.conv(\d)\.norm\.", r".bn\1."),
    (r"^res(\d)\.", lambda m: f"layer{int(m[1]) - 1}."),
    (r"^stem\.", ""),
)
# Queries, keys and values are one matrix in the same order everywhere.
_VIT_TO_DETECTRON2: Renames = (
    (r"^class_token$", "cls_token"),
    (r"^conv_proj\.", "patch_embed.proj."),
    (r"^encoder\.pos_embedding$", "pos_embed"),
    (r"^encoder\.ln\.", "norm."),
    (r"^encoder\.layers\.encoder_layer_(\d+)\.", r"blocks.\1."),
    (r"\.ln_([12])\.", r".norm\1."),
    (r"\.self_attention\.in_proj_", ".attn.qkv."),
    (r"\.self_attention\.out_proj\.", ".attn.proj."),
    (r"\.mlp\.(0|linear_1)\.", ".mlp.fc1."),
    (r"\.mlp\.(3|linear_2)\.", ".mlp.fc2."),
)
_VIT_FROM_DETECTRON2: Renames = (
    (r"\.mlp\.fc1\.", ".mlp.0."),
    (r"\.mlp\.fc2\.", ".mlp.3."),
    (r"\.attn\.proj\.", ".self_attention.out_proj."),
    (r"\.attn\.qkv\.", ".self_attention.in_proj_"),
    (r"\.norm([12])\.(?=weight|bias)", r".ln_\1."),
    (r"^blocks\.(\d+)\.", r"encoder.layers.encoder_layer_\1."),
    (r"^norm\.", "encoder.ln."),
    (r"^pos_embed$", "encoder.pos_embedding"),
    (r"^patch_embed\.proj\.", "conv_proj."),
    (r"^cls_token$", "class_token"),
)
_FILES: dict[str, Any] = {
    "state_key": "state_dict",
    "suffixes": (".pth", ".pth.tar", ".safetensors"),
}

# Name of a target of conversion -> how it names tensors.
NAMINGS: dict[str, Naming] = {
    "detectron2": Naming(
        title="detectron2",
        to_detectron2=(),
        from_detectron2=(),
        network=_network(Detectron2Features, Detectron2ViTFeatures),
        state_key="model",
        suffixes=(".pkl", ".pth", ".safetensors"),
        marks={"__author__": "moco_d2", "matching_heuristics": True},
    ),
    "torchvision": Naming(
        title="torchvision",
        to_detectron2=_RESNET_TO_DETECTRON2 + _VIT_TO_DETECTRON2,
        from_detectron2=_RESNET_FROM_DETECTRON2 + _VIT_FROM_DETECTRON2,
        network=_network(TorchvisionFeatures, TorchvisionViTFeatures),
        keeps_extras=True,
        **_FILES,
    ),
    # A ViT's tensors have the same names in timm and in detectron2.
    "timm": Naming(
        title="timm",
        to_detectron2=_RESNET_TO_DETECTRON2,
        from_detectron2=_RESNET_FROM_DETECTRON2,
        network=_network(TimmFeatures, TimmViTFeatures),
        keeps_extras=True,
        **_FILES,
    ),
}


def targets() -> dict[str, tuple[str, ...]]:
    """What can be written -> the ends of its files' names."""
    return {name: naming.suffixes for name, naming in NAMINGS.items()}
