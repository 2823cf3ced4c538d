"""What a config says of its backbone: for checkpoints, for the recipe's table, for its checks."""

from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.modeling import (
    BACKBONE_REGISTRY,
    META_ARCH_REGISTRY,
    ROI_BOX_HEAD_REGISTRY,
    ROI_HEADS_REGISTRY,
    SEM_SEG_HEADS_REGISTRY,
    build_backbone,
)
from fvcore.common.registry import Registry

from moco_d2.engine.norm import check_norms
from moco_d2.errors import UserError
from moco_d2.modeling.vit import PRETRAINED, check_vit, vit_architecture_of
from moco_d2.modeling.vit_pyramid import check_vit_pyramid

# Name of a ViT's builder -> what refuses a config that it cannot build.
VITS = {PRETRAINED: check_vit, "build_vit_sfp_backbone": check_vit_pyramid}

# What detectron2 builds.
RESNET_DEPTHS = (18, 34, 50, 101, 152)
RESNET_STAGES = ("stem", "res2", "res3", "res4", "res5")

# Builders of which it is known that they work without memory for the weights.
RESNET_BUILDERS = (
    "build_resnet_backbone",
    "build_resnet_fpn_backbone",
    "build_retinanet_resnet_fpn_backbone",
    "build_plain_resnet_fpn_backbone",
    "build_resnet_dc5_backbone",
)
# Meta-architecture -> the parts of cfg.MODEL whose IN_FEATURES are maps of the backbone.
FEATURES_OF = {
    "GeneralizedRCNN": ("RPN", "ROI_HEADS"),
    "ProposalNetwork": ("RPN",),
    "RetinaNet": ("RETINANET",),
    "SemanticSegmentor": ("SEM_SEG_HEAD",),
    "PanopticFPN": ("RPN", "ROI_HEADS", "SEM_SEG_HEAD"),
}


def is_vit(cfg: CfgNode) -> bool:
    return cfg.MODEL.BACKBONE.NAME in VITS


def check_architecture(cfg: CfgNode) -> None:
    """Refuse a model of unknown parts, and a ResNet or a ViT that cannot be built.

    Raises:
        UserError: one sentence with the value and what to set instead.
    """
    _check_known("META_ARCHITECTURE", cfg.MODEL.META_ARCHITECTURE, META_ARCH_REGISTRY)
    _check_known("BACKBONE.NAME", cfg.MODEL.BACKBONE.NAME, BACKBONE_REGISTRY)
    check_norms(cfg)
    if is_vit(cfg):
        VITS[cfg.MODEL.BACKBONE.NAME](cfg)
    elif "resnet" in cfg.MODEL.BACKBONE.NAME:
        _check_resnet(cfg.MODEL.RESNETS)


def check_heads(cfg: CfgNode) -> None:
    """The same for the heads of detectors and segmentors.

    Raises:
        UserError: one is not known, or takes maps that the backbone does not make.
    """
    model = cfg.MODEL
    if model.META_ARCHITECTURE in ("GeneralizedRCNN", "PanopticFPN"):
        _check_known("ROI_HEADS.NAME", model.ROI_HEADS.NAME, ROI_HEADS_REGISTRY)
        if model.ROI_BOX_HEAD.NAME:  # C4 heads have none
            _check_known("ROI_BOX_HEAD.NAME", model.ROI_BOX_HEAD.NAME, ROI_BOX_HEAD_REGISTRY)
    if model.META_ARCHITECTURE in ("SemanticSegmentor", "PanopticFPN"):
        _check_known("SEM_SEG_HEAD.NAME", model.SEM_SEG_HEAD.NAME, SEM_SEG_HEADS_REGISTRY)
    parts = FEATURES_OF.get(model.META_ARCHITECTURE, ())
    if model.PROPOSAL_GENERATOR.NAME == "PrecomputedProposals":
        parts = tuple(part for part in parts if part != "RPN")
    if parts and model.BACKBONE.NAME in RESNET_BUILDERS:
        _check_features(cfg, parts)


def _check_features(cfg: CfgNode, parts: tuple[str, ...]) -> None:
    """Heads take maps that the backbone makes, and each of these its anchors."""
    model = cfg.MODEL
    stages = model.RESNETS.OUT_FEATURES
    missing = [name for name in model.FPN.IN_FEATURES if name not in stages]
    if missing and "resnet_fpn" in model.BACKBONE.NAME:
        raise UserError(
            f"MODEL.FPN.IN_FEATURES has {missing[0]!r}, which MODEL.RESNETS.OUT_FEATURES "
            f"{list(stages)} has not"
        )
    with torch.device("meta"):  # shapes alone
        known = list(build_backbone(cfg).output_shape())
    for part in parts:
        names = model[part].IN_FEATURES
        unknown = [name for name in names if name not in known]
        if unknown or not names:
            raise UserError(
                f"MODEL.{part}.IN_FEATURES is {list(names)}; {model.BACKBONE.NAME} makes "
                f"{', '.join(known)}"
            )
        if part in ("RPN", "RETINANET"):
            _check_anchors(model.ANCHOR_GENERATOR, f"MODEL.{part}.IN_FEATURES", len(names))


def _check_anchors(anchors: CfgNode, key: str, maps: int) -> None:
    for name in ("SIZES", "ASPECT_RATIOS"):
        if len(anchors[name]) not in (1, maps):
            raise UserError(
                f"MODEL.ANCHOR_GENERATOR.{name} has {len(anchors[name])} lists, and {key} {maps} "
                "names: give one list for all of them, or one for each"
            )


def _check_known(key: str, name: str, registry: Registry) -> None:
    if name not in registry:
        known = ", ".join(sorted(name for name, _ in registry))
        raise UserError(f"MODEL.{key} is {name!r}; known: {known}")


def _check_resnet(resnets: CfgNode) -> None:
    if resnets.DEPTH not in RESNET_DEPTHS:
        raise UserError(f"MODEL.RESNETS.DEPTH is {resnets.DEPTH}; known: {RESNET_DEPTHS}")
    if resnets.DEPTH < 50 and resnets.RES2_OUT_CHANNELS != 64:
        raise UserError(
            f"MODEL.RESNETS.RES2_OUT_CHANNELS is {resnets.RES2_OUT_CHANNELS}, and detectron2's "
            f"ResNet-{resnets.DEPTH} has 64 channels there; set it to 64"
        )
    unknown = [name for name in resnets.OUT_FEATURES if name not in RESNET_STAGES]
    if unknown or not resnets.OUT_FEATURES:
        raise UserError(
            f"MODEL.RESNETS.OUT_FEATURES is {list(resnets.OUT_FEATURES)}; give at least one of "
            f"{', '.join(RESNET_STAGES)}"
        )


def has_batch_norm(cfg: CfgNode) -> bool:
    """Whether the images of a batch share statistics, in the backbone or in the heads."""
    in_backbone = not is_vit(cfg) and "BN" in cfg.MODEL.RESNETS.NORM
    kind, head = cfg.MODEL.META_ARCHITECTURE, cfg.MODEL.MOCO.HEAD
    in_heads = kind == "MoCoV3" or (kind == "MoCo" and head == "mlp_bn")
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
