"""FPN on a ResNet that ends before res5."""

from detectron2.config import CfgNode
from detectron2.layers import ShapeSpec
from detectron2.modeling import BACKBONE_REGISTRY
from detectron2.modeling.backbone import FPN, build_resnet_backbone


@BACKBONE_REGISTRY.register()
def build_plain_resnet_fpn_backbone(cfg: CfgNode, input_shape: ShapeSpec) -> FPN:
    """detectron2's ResNet and FPN, with one level for each of `MODEL.FPN.IN_FEATURES`.

    `build_resnet_fpn_backbone` pools a further level from p5, which only a ResNet with res5 has.
    """
    return FPN(
        bottom_up=build_resnet_backbone(cfg, input_shape),
        in_features=cfg.MODEL.FPN.IN_FEATURES,
        out_channels=cfg.MODEL.FPN.OUT_CHANNELS,
        norm=cfg.MODEL.FPN.NORM,
        fuse_type=cfg.MODEL.FPN.FUSE_TYPE,
    )
