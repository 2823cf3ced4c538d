"""The R50-dilated-C5 backbone of the MoCo paper's detectors."""

from detectron2.config import CfgNode
from detectron2.layers import Conv2d, ShapeSpec, get_norm
from detectron2.modeling import BACKBONE_REGISTRY
from detectron2.modeling.backbone import Backbone, build_resnet_backbone
from fvcore.nn import weight_init
from torch import Tensor


class DilatedC5(Backbone):
    """A ResNet and a 3x3 convolution with a norm on top of its last stage (paper, A.1).

    Its one output "dc5", (N, out_channels, H / stride, W / stride), is what RPN and box head see.
    """

    def __init__(self, bottom_up: Backbone, out_channels: int, norm: str):
        """
        Args:
            bottom_up: with one output.
            out_channels: of the convolution; 512 in the paper.
            norm: what `detectron2.layers.get_norm` knows.
        """
        super().__init__()
        self.bottom_up = bottom_up
        ((self._in_feature, shape),) = bottom_up.output_shape().items()
        self.reduction = Conv2d(
            shape.channels,
            out_channels,
            kernel_size=3,
            padding=1,
            bias=not norm,
            norm=get_norm(norm, out_channels),
        )
        weight_init.c2_msra_fill(self.reduction)
        self._shape = ShapeSpec(channels=out_channels, stride=shape.stride)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"dc5": self.reduction(self.bottom_up(x)[self._in_feature])}

    def output_shape(self) -> dict[str, ShapeSpec]:
        return {"dc5": self._shape}

    @property
    def size_divisibility(self) -> int:
        return self.bottom_up.size_divisibility


@BACKBONE_REGISTRY.register()
def build_resnet_dc5_backbone(cfg: CfgNode, input_shape: ShapeSpec) -> DilatedC5:
    """The paper's: MODEL.RESNETS with OUT_FEATURES ["res5"] and RES5_DILATION 2, whose NORM the
    convolution has, too."""
    return DilatedC5(build_resnet_backbone(cfg, input_shape), 512, cfg.MODEL.RESNETS.NORM)
