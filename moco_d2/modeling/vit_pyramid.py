"""ViT + SimpleFeaturePyramid (ViTDet, arXiv 2203.16527) as a backbone that a YAML config names."""

import math

from detectron2.config import CfgNode
from detectron2.layers import ShapeSpec
from detectron2.modeling import BACKBONE_REGISTRY
from detectron2.modeling.backbone.fpn import LastLevelMaxPool
from detectron2.modeling.backbone.vit import SimpleFeaturePyramid

from moco_d2.errors import UserError
from moco_d2.modeling.vit import build_vit, check_vit_sizes, vit_architecture_of

# Of the pyramid's levels to the ViT's only one.
SCALES = (4.0, 2.0, 1.0, 0.5)


class PaddedFeaturePyramid(SimpleFeaturePyramid):
    """detectron2's pyramid, which pads images to whole cells of its coarsest level.

    detectron2's own asks for that under a misspelt key, so that images without a square pad lose
    their last rows and columns.
    """

    @property
    def padding_constraints(self) -> dict[str, int]:
        return {"size_divisibility": self._size_divisibility, "square_size": self._square_pad}


@BACKBONE_REGISTRY.register()
def build_vit_sfp_backbone(cfg: CfgNode, input_shape: ShapeSpec) -> SimpleFeaturePyramid:
    """The ViT that `MODEL.VIT` describes, initialised as detectron2 does, under a pyramid with
    `MODEL.FPN.OUT_CHANNELS` and `NORM`.

    A file of a ViT that `build_vit_backbone` pretrained fills it under `net.`; its positions are
    trained on. Patches of 16 pixels give the levels p2 to p5, and p6 on top.

    Raises:
        UserError: see :func:`check_vit_pyramid`.
    """
    check_vit_pyramid(cfg)
    vit = cfg.MODEL.VIT
    net = build_vit(
        vit_architecture_of(cfg),
        in_chans=input_shape.channels,
        # Tables of relative positions are made for this size, and stretched for others.
        img_size=vit.SQUARE_PAD or vit.IMG_SIZE,
        drop_path_rate=vit.DROP_PATH,
        window_size=vit.WINDOW_SIZE,
        window_block_indexes=vit.WINDOW_BLOCKS,
        use_rel_pos=vit.USE_REL_POS,
    )
    top_block = LastLevelMaxPool()
    top_block.in_feature = f"p{int(math.log2(vit.PATCH_SIZE / SCALES[-1]))}"
    return PaddedFeaturePyramid(
        net,
        in_feature="last_feat",
        out_channels=cfg.MODEL.FPN.OUT_CHANNELS,
        scale_factors=SCALES,
        top_block=top_block,
        norm=cfg.MODEL.FPN.NORM,
        square_pad=vit.SQUARE_PAD,
    )


def check_vit_pyramid(cfg: CfgNode) -> None:
    """Refuse a `MODEL.VIT` that cannot be built as a detector's, or would cut images.

    Raises:
        UserError: one sentence with the value and what to set instead.
    """
    vit, inputs = cfg.MODEL.VIT, cfg.INPUT
    check_vit_sizes(vit)
    if vit.PATCH_SIZE < 4 or vit.PATCH_SIZE & (vit.PATCH_SIZE - 1):
        raise UserError(
            f"MODEL.VIT.PATCH_SIZE is {vit.PATCH_SIZE}; the strides of a feature pyramid are "
            "powers of 2, so pretrain a ViT with patches of 8 or 16 for detection"
        )
    if not cfg.MODEL.FPN.NORM:
        raise UserError(
            "MODEL.FPN.NORM is empty, and detectron2's SimpleFeaturePyramid cannot do without a "
            "norm; set it to LN, as in ViTDet"
        )
    if not 0.0 <= vit.DROP_PATH < 1.0:
        raise UserError(f"MODEL.VIT.DROP_PATH is {vit.DROP_PATH}; it must lie in [0, 1)")
    if vit.WINDOW_SIZE and not set(vit.WINDOW_BLOCKS) <= set(range(vit.DEPTH)):
        raise UserError(
            f"MODEL.VIT.WINDOW_BLOCKS {tuple(vit.WINDOW_BLOCKS)} names a block that is not there; "
            f"a ViT of MODEL.VIT.DEPTH {vit.DEPTH} has 0 to {vit.DEPTH - 1}"
        )
    longest = max(inputs.SCALE_JITTER or inputs.MAX_SIZE_TRAIN, inputs.MAX_SIZE_TEST)
    if 0 < vit.SQUARE_PAD < longest:
        raise UserError(
            f"MODEL.VIT.SQUARE_PAD {vit.SQUARE_PAD} would cut images of up to {longest} pixels "
            "(INPUT.MAX_SIZE_TRAIN or SCALE_JITTER, MAX_SIZE_TEST); set them to "
            f"{vit.SQUARE_PAD} or less"
        )
