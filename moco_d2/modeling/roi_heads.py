"""Res5ROIHeadsExtraNorm: C4 RoI heads whose res5 ends in a norm."""

import logging

from detectron2.config import configurable
from detectron2.layers import get_norm
from detectron2.modeling.roi_heads import ROI_HEADS_REGISTRY, Res5ROIHeads


class Res5ROIHeadsExtraNorm(Res5ROIHeads):
    """`Res5ROIHeads` with a norm after res5, before the predictors.

    The MoCo paper fine-tunes C4 detectors this way (Sec. 4.2): BN statistics are trained, and the
    box head of an R50-C4, res5, is the only deep head without a norm of its own at the end. The
    norm's tensors are `roi_heads.res5.norm.*` and are always new.
    """

    @configurable
    def __init__(self, *, norm: str, **kwargs):
        """
        Args:
            norm: what `detectron2.layers.get_norm` knows; not empty.
            kwargs: of `Res5ROIHeads`; `res5` is extended.

        Raises:
            ValueError: `norm` is empty.
        """
        super().__init__(**kwargs)
        if not norm:
            raise ValueError(
                "Res5ROIHeadsExtraNorm adds a norm after res5, and MODEL.RESNETS.NORM is empty; "
                "set it, or use Res5ROIHeads"
            )
        self.res5.add_module("norm", get_norm(norm, self.res5[-1].out_channels))

    @classmethod
    def from_config(cls, cfg, input_shape):
        return {**super().from_config(cfg, input_shape), "norm": cfg.MODEL.RESNETS.NORM}


if Res5ROIHeadsExtraNorm.__name__ in ROI_HEADS_REGISTRY:
    # Scripts that come with other releases of MoCo register the same head under this name.
    logging.getLogger(__name__).warning(
        "ROI head Res5ROIHeadsExtraNorm is registered by another package; its class is used."
    )
else:
    ROI_HEADS_REGISTRY.register(Res5ROIHeadsExtraNorm)
