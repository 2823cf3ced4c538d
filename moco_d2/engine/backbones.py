"""What a config says of its backbone: for checkpoints, for the recipe's table, for its checks."""

from typing import Any

from detectron2.config import CfgNode

from moco_d2.modeling.vit import PRETRAINED, check_vit, vit_architecture_of
from moco_d2.modeling.vit_pyramid import check_vit_pyramid

# Name of a ViT's builder -> what refuses a config that it cannot build.
VITS = {PRETRAINED: check_vit, "build_vit_sfp_backbone": check_vit_pyramid}


def is_vit(cfg: CfgNode) -> bool:
    return cfg.MODEL.BACKBONE.NAME in VITS


def check_backbone(cfg: CfgNode) -> None:
    """Refuse a ViT that cannot be built.

    Raises:
        UserError: one sentence with the value and what to set instead.
    """
    if is_vit(cfg):
        VITS[cfg.MODEL.BACKBONE.NAME](cfg)


def has_batch_norm(cfg: CfgNode) -> bool:
    """Whether the images of a batch share statistics, in the backbone or in the heads."""
    in_backbone = not is_vit(cfg) and "BN" in cfg.MODEL.RESNETS.NORM
    in_heads = cfg.MODEL.META_ARCHITECTURE == "MoCoV3" or cfg.MODEL.MOCO.HEAD == "mlp_bn"
    return in_backbone or in_heads


def backbone_architecture(cfg: CfgNode) -> dict[str, Any]:
    """What a checkpoint states, so that its backbone can be built without the config."""
    if is_vit(cfg):
        return vit_architecture_of(cfg)
    resnets = cfg.MODEL.RESNETS
    return {
        "name": cfg.MODEL.BACKBONE.NAME,
        "depth": resnets.DEPTH,
        "num_groups": resnets.NUM_GROUPS,
        "width_per_group": resnets.WIDTH_PER_GROUP,
        "res2_out_channels": resnets.RES2_OUT_CHANNELS,
        "stem_out_channels": resnets.STEM_OUT_CHANNELS,
        "norm": resnets.NORM,
        "out_features": list(resnets.OUT_FEATURES),
    }


def backbone_title(cfg: CfgNode) -> str:
    """The backbone in the table of the recipe."""
    name, resnets, vit = cfg.MODEL.BACKBONE.NAME, cfg.MODEL.RESNETS, cfg.MODEL.VIT
    if not is_vit(cfg):
        return f"{name}, depth {resnets.DEPTH}, {resnets.NORM}"
    windows = f", windows of {vit.WINDOW_SIZE}" if vit.WINDOW_SIZE else ""
    features = "class token" if vit.CLASS_TOKEN else "average pooling"
    return (
        f"{name}, {vit.DEPTH} blocks, {vit.EMBED_DIM} channels, {vit.NUM_HEADS} heads, "
        f"{vit.PATCH_SIZE} px patches" + (f", {features}" if name == PRETRAINED else windows)
    )
