"""Vision transformers as MoCo v3 (arXiv 2104.02057) pretrains them, on detectron2's own ViT."""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.layers import ShapeSpec
from detectron2.modeling import BACKBONE_REGISTRY
from detectron2.modeling.backbone import Backbone
from detectron2.modeling.backbone.utils import get_abs_pos
from detectron2.modeling.backbone.vit import ViT
from torch import Tensor, nn

from moco_d2.errors import UserError
from moco_d2.modeling.vit_layers import without_timm

# Of timm's, MoCo v3's and detectron2's ViTs; torch's default is another.
LAYER_NORM_EPS = 1e-6
TEMPERATURE = 10000.0
PRETRAINED = "build_vit_backbone"


def sincos_positions(side: int, channels: int) -> Tensor:
    """MoCo v3's fixed positions in two dimensions (Sec. 5; `build_2d_sincos_position_embedding` of
    vits.py in facebookresearch/moco-v3).

    A quarter of the channels each is sin(row w), cos(row w), sin(column w), cos(column w), with
    the frequencies w_i = 10000^(-i / (channels / 4)).

    Args:
        side: of the square grid of patches.
        channels: a multiple of 4.

    Returns:
        float64 (side * side, channels), row by row.
    """
    quarter = channels // 4
    frequencies = TEMPERATURE ** -(torch.arange(quarter, dtype=torch.float64) / quarter)
    angles = torch.arange(side, dtype=torch.float64)[:, None] * frequencies  # (side, quarter)
    rows, columns = angles.repeat_interleave(side, 0), angles.repeat(side, 1)
    return torch.cat([rows.sin(), rows.cos(), columns.sin(), columns.cos()], 1)


class ClassTokenViT(ViT):
    """detectron2's ViT with the class token and the norm after the last block that it left out.

    Its parameters beside detectron2's, `cls_token`, `norm.weight` and `norm.bias`, are named as
    timm's and MoCo v3's.
    """

    def __init__(self, **options: Any):
        """
        Args:
            options: of `ViT`; no windows and no relative positions, which a token that is in no
                place cannot have.
        """
        super().__init__(pretrain_use_cls_token=True, **options)
        channels = self._out_feature_channels[self._out_features[0]]
        self.cls_token = nn.Parameter(torch.zeros(1, 1, channels))
        self.norm = nn.LayerNorm(channels, eps=LAYER_NORM_EPS)
        self._out_features.append("class_token")
        self._out_feature_channels["class_token"] = channels
        # One value for the whole image.
        self._out_feature_strides["class_token"] = None

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """
        Args:
            x: (N, in_chans, H, W), multiples of the patch size.

        Returns:
            `last_feat` (N, C, H / patch, W / patch), as from `ViT`, and `class_token`
            (N, C, 1, 1), normalised: MoCo v3's features.
        """
        patches = self.patch_embed(x)  # (N, h, w, C)
        n, h, w, _ = patches.shape
        patches = patches + get_abs_pos(self.pos_embed, True, (h, w))
        token = (self.cls_token + self.pos_embed[:, :1]).expand(n, -1, -1)
        # detectron2's blocks take a grid; without windows any shape of it will do.
        tokens = torch.cat([token, patches.flatten(1, 2)], 1)[:, None]  # (N, 1, 1 + h w, C)
        for block in self.blocks:
            tokens = block(tokens)
        tokens = tokens[:, 0]
        last = tokens[:, 1:].transpose(1, 2).unflatten(2, (h, w))
        return {
            self._out_features[0]: last,
            "class_token": self.norm(tokens[:, 0])[:, :, None, None],
        }


def build_vit(architecture: Mapping[str, Any], kind: type[ViT] = ViT, **options: Any) -> ViT:
    """Build a ViT, initialised as detectron2 does.

    Args:
        architecture: see :func:`vit_architecture_of`. Its `class_position` makes room in the
            table of positions for that of a class token, also in a ViT that has none.
        kind: `ViT` or `ClassTokenViT`.
        options: further arguments of `ViT`.
    """
    arguments = {
        key: architecture[key]
        for key in ("patch_size", "embed_dim", "depth", "num_heads", "mlp_ratio", "qkv_bias")
    }
    arguments["pretrain_img_size"] = architecture["img_size"]
    arguments["norm_layer"] = partial(nn.LayerNorm, eps=LAYER_NORM_EPS)
    if kind is ViT:
        arguments["pretrain_use_cls_token"] = architecture["class_position"]
    with without_timm():
        return kind(**{"img_size": architecture["img_size"], **arguments, **options})


@torch.no_grad()
def initialise_as_moco_v3_(vit: ViT) -> None:
    """Give a ViT the random weights and the positions that MoCo v3's code (vits.py) starts from.

    Xavier's uniform for all linear layers, with queries, keys and values as three layers, and for
    the projection of the patches; no bias; positions of :func:`sincos_positions`, not trained.
    """
    for name, module in vit.named_modules():
        if not isinstance(module, (nn.Linear, nn.Conv2d)):
            continue
        fan_out, fan_in = module.weight.flatten(1).shape
        if name.endswith("attn.qkv"):
            fan_out //= 3
        bound = math.sqrt(6 / (fan_in + fan_out))
        nn.init.uniform_(module.weight, -bound, bound)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    if isinstance(vit, ClassTokenViT):
        nn.init.normal_(vit.cls_token, std=1e-6)
    positions = vit.pos_embed.requires_grad_(False)
    positions.zero_()  # a class token's
    count, channels = positions.shape[1:]
    side = math.isqrt(count)
    positions[0, -side * side :] = sincos_positions(side, channels)


@BACKBONE_REGISTRY.register()
def build_vit_backbone(cfg: CfgNode, input_shape: ShapeSpec) -> ViT:
    """The ViT that `MODEL.VIT` describes, for pretraining, initialised as MoCo v3's.

    Its features are `last_feat`, to be pooled right after the last block: the paper found
    this about as good as the class token, and pooling behind the norm that usually follows the last
    block much worse (Sec. 6). With `MODEL.VIT.CLASS_TOKEN` there is
    `class_token` besides, see `ClassTokenViT`.

    Raises:
        UserError: see :func:`check_vit`.
    """
    check_vit(cfg)
    kind = ClassTokenViT if cfg.MODEL.VIT.CLASS_TOKEN else ViT
    vit = build_vit(vit_architecture_of(cfg), kind, in_chans=input_shape.channels)
    initialise_as_moco_v3_(vit)
    return vit


def vit_architecture_of(cfg: CfgNode) -> dict[str, Any]:
    """What `MODEL.VIT` describes, as checkpoints and exported files state it (plain Python)."""
    vit = cfg.MODEL.VIT
    return {
        "name": PRETRAINED,
        "embed_dim": vit.EMBED_DIM,
        "depth": vit.DEPTH,
        "num_heads": vit.NUM_HEADS,
        "patch_size": vit.PATCH_SIZE,
        "img_size": vit.IMG_SIZE,
        "mlp_ratio": vit.MLP_RATIO,
        "qkv_bias": vit.QKV_BIAS,
        "class_position": vit.CLASS_TOKEN,
        "out_features": ["last_feat"],
    }


# What only detectors use -> the value that says that it is not used.
DETECTOR_KEYS = {"DROP_PATH": 0.0, "WINDOW_SIZE": 0, "USE_REL_POS": False, "SQUARE_PAD": 0}


def check_vit(cfg: CfgNode) -> None:
    """Refuse a `MODEL.VIT` that cannot be built or pretrained.

    Raises:
        UserError: one sentence with the value and what to set instead.
    """
    vit, size = cfg.MODEL.VIT, cfg.INPUT.VIEWS.SIZE
    check_vit_sizes(vit)
    if vit.EMBED_DIM % 4:
        raise UserError(
            f"MODEL.VIT.EMBED_DIM is {vit.EMBED_DIM}; sines and cosines of two coordinates need a "
            "multiple of 4"
        )
    if size % vit.PATCH_SIZE:
        raise UserError(
            f"views of {size} pixels (INPUT.VIEWS.SIZE) do not divide into patches of "
            f"{vit.PATCH_SIZE} (MODEL.VIT.PATCH_SIZE); set a multiple of {vit.PATCH_SIZE}"
        )
    for key, unused in DETECTOR_KEYS.items():
        if vit[key] != unused:
            raise UserError(
                f"MODEL.VIT.{key} is {vit[key]}, and is for detectors (build_vit_sfp_backbone); "
                f"set it to {unused} for {PRETRAINED}"
            )


def check_vit_sizes(vit: CfgNode) -> None:
    """
    Args:
        vit: `MODEL.VIT`.

    Raises:
        UserError: sizes that must divide each other do not.
    """
    if vit.EMBED_DIM % vit.NUM_HEADS:
        raise UserError(
            f"MODEL.VIT.EMBED_DIM {vit.EMBED_DIM} cannot be split over MODEL.VIT.NUM_HEADS "
            f"{vit.NUM_HEADS}; set one that divides it"
        )
    if vit.IMG_SIZE < vit.PATCH_SIZE or vit.IMG_SIZE % vit.PATCH_SIZE:
        raise UserError(
            f"MODEL.VIT.IMG_SIZE {vit.IMG_SIZE} is no multiple of MODEL.VIT.PATCH_SIZE "
            f"{vit.PATCH_SIZE}; set the size of the images that the positions are for"
        )


def freeze_patch_projection_(backbone: Backbone) -> None:
    """Keep a ViT's projection of patches at its random weights, in place: MoCo v3's remedy for
    unstable training (Sec. 4.2 of the paper, `stop_grad_conv1` in its code).

    Raises:
        UserError: the backbone has no such projection.
    """
    if not isinstance(backbone, ViT):
        raise UserError(
            f"MODEL.MOCO.FREEZE_PATCH_PROJECTION needs a ViT, and a {type(backbone).__name__} has "
            f"no patch projection; set it to False, or MODEL.BACKBONE.NAME to {PRETRAINED}"
        )
    backbone.patch_embed.requires_grad_(False)
