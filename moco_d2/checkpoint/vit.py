"""Vision transformers: their architecture by their tensors, and the networks they are checked in.

detectron2's ViT has no class token and no norm behind its last block. Its features are compared
with those of the source's blocks on the same tokens, without a class token, too.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moco_d2.checkpoint.files import WeightsError
from moco_d2.checkpoint.verify import import_timm
from moco_d2.modeling.vit import LAYER_NORM_EPS, PRETRAINED, build_vit, sincos_positions

PATCHES = "patch_embed.proj.weight"
POSITIONS = "pos_embed"
HEAD_DIM = 64
HeadsRule = Callable[[int], int | None]


def is_vit(tensors: Mapping[str, Tensor]) -> bool:
    return any(name.startswith("blocks.0.attn.") for name in tensors)


def heads_of_width(embed_dim: int) -> int:
    """timm's rule: a head has 64 channels."""
    return embed_dim // HEAD_DIM


def heads_if_all_agree(embed_dim: int) -> int | None:
    """The number of heads where timm's rule and MoCo v3's, which differ in ViT-S, are the same."""
    return heads_of_width(embed_dim) if embed_dim in (768, 1024) else None


def twelve_heads(embed_dim: int) -> int:
    """MoCo v3's rule, for ViT-S and ViT-B."""
    return 12


def heads_of_torchvision(embed_dim: int) -> int | None:
    """Of its ViT-B, L and H; it has no ViT-S."""
    return {768: 12, 1024: 16, 1280: 16}.get(embed_dim)


def vit_architecture(
    tensors: Mapping[str, Tensor], num_heads: int | None, rule: HeadsRule
) -> dict[str, Any]:
    """Tell a ViT's architecture from its tensors under detectron2's names.

    Args:
        tensors: of the ViT.
        num_heads: no tensor shows it; None goes by the rule.
        rule: (channels) -> number of heads, or None where it is not known.

    Returns:
        plain Python: `embed_dim`, `depth`, `num_heads`, `patch_size`, `img_size` (of the images
        that the positions are for), `mlp_ratio`, `qkv_bias`, and `class_position` (whether the
        first position is a class token's).

    Raises:
        WeightsError: detectron2 has no such ViT, or the number of heads is not known.
    """
    needed = (PATCHES, POSITIONS, "blocks.0.mlp.fc1.weight")
    if missing := [name for name in needed if name not in tensors]:
        stem = f"{PATCHES.removesuffix('weight')}0.weight" in tensors
        hint = "; detectron2's ViT has no convolutional stem" if stem else ""
        raise WeightsError(f"no ViT without {', '.join(missing)}{hint}")
    embed_dim, _, patch_size, _ = tensors[PATCHES].shape
    positions = tensors[POSITIONS].shape[1]
    grids = {side * side + extra: (side, extra) for side in range(1, 257) for extra in (0, 1)}
    if positions not in grids:
        raise WeightsError(f"{positions} positions are no square, with or without a class token")
    side, class_position = grids[positions]
    if rule is heads_of_width and has_fixed_positions(tensors[POSITIONS]):
        rule = heads_if_all_agree
    num_heads = num_heads or rule(embed_dim)
    if num_heads is None:
        raise WeightsError(
            f"the number of heads of a ViT with {embed_dim} channels cannot be seen in its tensors "
            "(MoCo v3's ViT-S has 12, timm's and DINO's 6); state it with --num-heads"
        )
    if embed_dim % num_heads:
        raise WeightsError(f"{embed_dim} channels cannot be split over {num_heads} heads")
    depth = max(int(name.split(".")[1]) for name in tensors if name.startswith("blocks.")) + 1
    return {
        "name": PRETRAINED,
        "embed_dim": embed_dim,
        "depth": depth,
        "num_heads": num_heads,
        "patch_size": patch_size,
        "img_size": side * patch_size,
        "mlp_ratio": tensors["blocks.0.mlp.fc1.weight"].shape[0] / embed_dim,
        "qkv_bias": "blocks.0.attn.qkv.bias" in tensors,
        "class_position": bool(class_position),
        "out_features": ["last_feat"],
    }


def has_fixed_positions(positions: Tensor) -> bool:
    """Whether these are MoCo v3's sines and cosines (its vits.py), whoever saved them.

    Args:
        positions: (1, 1 + side * side, C).
    """
    count, width = positions.shape[1] - 1, positions.shape[2]
    side = round(count**0.5)
    if side * side != count or width % 4:
        return False
    expected = sincos_positions(side, width)
    return torch.allclose(positions[0, 1:].double(), expected, atol=1e-5)


class _ViTFeatures(nn.Module):
    def __init__(self, architecture: Mapping, convention: Mapping):
        super().__init__()
        self.body = self._build(architecture)
        self.image_size = architecture["img_size"]
        self._convention = convention

    def _normalised(self, images: Tensor) -> Tensor:
        if self._convention["format"] == "BGR":
            images = images.flip(1)
        mean, std = (
            torch.tensor(self._convention[key], dtype=torch.float64).view(3, 1, 1)
            for key in ("pixel_mean", "pixel_std")
        )
        return ((images - mean) / std).to(next(self.body.parameters()).dtype)


class Detectron2ViTFeatures(_ViTFeatures):
    """detectron2's ViT, with global attention, behind an input convention.

    Args:
        architecture: see :func:`vit_architecture`.
        convention: see `convention.py`.
    """

    def _build(self, architecture: Mapping) -> nn.Module:
        return build_vit(architecture)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """
        Args:
            images: uint8 (N, 3, S, S), RGB, of the size that the positions are for.

        Returns:
            `last_feat` (N, C, S / patch, S / patch).
        """
        return self.body(self._normalised(images))


class TimmViTFeatures(_ViTFeatures):
    """The patch tokens behind the blocks of timm's ViT."""

    def _build(self, architecture: Mapping) -> nn.Module:
        timm = import_timm()
        if timm is None:
            raise WeightsError(
                "such a file's features are checked in timm's own network: pip install timm"
            )
        body = timm.models.vision_transformer.VisionTransformer(
            img_size=architecture["img_size"],
            patch_size=architecture["patch_size"],
            embed_dim=architecture["embed_dim"],
            depth=architecture["depth"],
            num_heads=architecture["num_heads"],
            mlp_ratio=architecture["mlp_ratio"],
            qkv_bias=architecture["qkv_bias"],
            norm_layer=partial(nn.LayerNorm, eps=LAYER_NORM_EPS),
            class_token=architecture["class_position"],
            global_pool="avg",
            fc_norm=False,
            num_classes=0,
        )
        body.cls_token, body.norm = None, nn.Identity()
        return body

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Like :meth:`Detectron2ViTFeatures.forward`."""
        tokens = self.body.patch_embed(self._normalised(images))  # (N, patches, C)
        count = tokens.shape[1]
        tokens = self.body.blocks(tokens + self.body.pos_embed[:, -count:])
        side = round(count**0.5)
        return {"last_feat": tokens.transpose(1, 2).unflatten(2, (side, side))}


class TorchvisionViTFeatures(_ViTFeatures):
    """The patch tokens behind the blocks of torchvision's ViT."""

    def _build(self, architecture: Mapping) -> nn.Module:
        from torchvision.models.vision_transformer import VisionTransformer

        body = VisionTransformer(
            image_size=architecture["img_size"],
            patch_size=architecture["patch_size"],
            num_layers=architecture["depth"],
            num_heads=architecture["num_heads"],
            hidden_dim=architecture["embed_dim"],
            mlp_dim=round(architecture["embed_dim"] * architecture["mlp_ratio"]),
        )
        body.class_token, body.encoder.ln, body.heads = None, nn.Identity(), nn.Identity()
        return body

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Like :meth:`Detectron2ViTFeatures.forward`."""
        features = self.body.conv_proj(self._normalised(images))  # (N, C, side, side)
        tokens = features.flatten(2).transpose(1, 2)
        positions = self.body.encoder.pos_embedding[:, -tokens.shape[1] :]
        tokens = self.body.encoder.layers(tokens + positions)
        return {"last_feat": tokens.transpose(1, 2).unflatten(2, features.shape[2:])}
