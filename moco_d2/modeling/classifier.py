"""Image classification: supervised pretraining, and the linear probe of a frozen backbone."""

import torch
import torch.nn.functional as F
from detectron2.config import configurable
from detectron2.modeling import META_ARCH_REGISTRY
from torch import Tensor, nn

from moco_d2.engine.scalars import log_scalar
from moco_d2.modeling.encoder import Encoder, build_encoder
from moco_d2.modeling.inputs import ImageModel, collate, full_precision


@META_ARCH_REGISTRY.register()
class ImageClassifier(ImageModel):
    """A backbone, global average pooling and one fully connected layer.

    BN statistics belong to groups of images, as in pretraining. A frozen backbone stays in eval
    mode: its BN uses the statistics that it came with and does not move them.
    """

    @configurable
    def __init__(
        self,
        *,
        encoder: Encoder,
        label_smoothing: float,
        freeze_backbone: bool,
        pixel_mean: list[float],
        pixel_std: list[float],
    ):
        """
        Args:
            encoder: its head maps features to logits, (N, C) -> (N, classes).
            label_smoothing: share of the target that is spread evenly over all classes, [0, 1).
            freeze_backbone: train the head alone.
            pixel_mean, pixel_std: per channel, on the 0-255 scale.
        """
        super().__init__(pixel_mean, pixel_std)
        self.encoder = encoder
        self.label_smoothing = label_smoothing
        self.freeze_backbone = freeze_backbone
        if freeze_backbone:
            encoder.backbone.requires_grad_(False)
        self.train(self.training)

    @classmethod
    def from_config(cls, cfg):
        classifier = cfg.MODEL.CLASSIFIER
        return {
            "encoder": build_encoder(
                cfg, build_head=lambda width: linear(width, classifier.NUM_CLASSES)
            ),
            "label_smoothing": classifier.LABEL_SMOOTHING,
            "freeze_backbone": classifier.FREEZE_BACKBONE,
            "pixel_mean": cfg.MODEL.PIXEL_MEAN,
            "pixel_std": cfg.MODEL.PIXEL_STD,
        }

    def train(self, mode: bool = True) -> "ImageClassifier":
        super().train(mode)
        if self.freeze_backbone:
            self.encoder.eval()
        return self

    def forward(self, batch: dict | list[dict]) -> dict[str, Tensor] | Tensor:
        """Loss in training; L2-normalised backbone features in evaluation, as MoCo's.

        Args:
            batch: in training `{"views": [uint8 (N, C, H, W)], "label": int64 (N,)}`, of which the
                first view is used, in evaluation `{"image": uint8 (N, C, H, W)}`; also as
                detectron2's list of one dict per image.

        Returns:
            `{"loss_classification": scalar}`, or float (N, features).
        """
        batch = collate(batch)
        if not self.training:
            features = self.encoder.features(self.normalise(batch["image"]))
            return F.normalize(features.float(), dim=1)
        labels = batch["label"].to(self.device, non_blocking=True)
        logits = full_precision(self.encoder(self.normalise(batch["views"][0])))
        log_scalar("[metric]top1", (logits.argmax(1) == labels).float().mean() * 100)
        return {
            "loss_classification": F.cross_entropy(
                logits, labels, label_smoothing=self.label_smoothing
            )
        }

    @torch.no_grad()
    def logits(self, batch: dict) -> Tensor:
        """`{"image": uint8 (N, C, H, W)}` -> (N, classes), in eval mode."""
        return self.encoder(self.normalise(batch["image"]))

    def split_step(self, batch: dict | list[dict], parts: int) -> list[dict]:
        """Divide a step into equal parts, each of whole BN groups, to call the model with.

        The mean of their losses is the loss of the undivided step.
        """
        batch = collate(batch)
        pieces = zip(batch["views"][0].chunk(parts), batch["label"].chunk(parts), strict=True)
        return [{"views": [view], "label": label} for view, label in pieces]


def linear(in_features: int, num_classes: int) -> nn.Linear:
    """The fully connected layer, drawn from N(0, 0.01) with no bias at first, as in MoCo's
    `main_lincls.py` and in Goyal et al. (arXiv 1706.02677, Sec. 5.1)."""
    layer = nn.Linear(in_features, num_classes)
    nn.init.normal_(layer.weight, std=0.01)
    nn.init.zeros_(layer.bias)
    return layer
