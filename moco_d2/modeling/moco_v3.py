"""Momentum Contrast, v3 (arXiv 2104.02057): Algorithm 1 of the paper."""

import math

import torch
import torch.nn.functional as F
from detectron2.config import configurable
from detectron2.modeling import META_ARCH_REGISTRY
from detectron2.utils import comm
from torch import Tensor, nn

from moco_d2.engine.distributed import all_gather_rows
from moco_d2.engine.scalars import log_scalar
from moco_d2.modeling.batch_norm import group_batch_norms_
from moco_d2.modeling.dictionary import Contrast
from moco_d2.modeling.encoder import Encoder, build_encoder
from moco_d2.modeling.heads import build_predictor
from moco_d2.modeling.inputs import collate, full_precision
from moco_d2.modeling.loss import info_nce
from moco_d2.modeling.momentum import MomentumModel


@META_ARCH_REGISTRY.register()
class MoCoV3(MomentumModel):
    """Predictions from each view against the keys of the other view of the whole batch.

    There is no dictionary: the negatives of an image are the batch's other images. A training step
    is: `forward` and `backward` -> optimizer step -> :meth:`finish_step`.
    """

    @configurable
    def __init__(
        self,
        *,
        encoder: Encoder,
        predictor: nn.Module,
        temperature: float,
        pixel_mean: list[float],
        pixel_std: list[float],
    ):
        """
        Args:
            encoder: the query encoder, backbone and projector; the key encoder starts as its copy.
                Each encodes both views, so `groups.parts` is twice the parts of a step.
            predictor: (N, C) -> (N, C), on queries only. Its batch norms are made grouped ones in
                place, over the encoder's groups.
            temperature: tau of the loss.
            pixel_mean, pixel_std: per channel, on the 0-255 scale.
        """
        super().__init__(encoder, pixel_mean, pixel_std)
        self.predictor = group_batch_norms_(predictor, encoder.groups)
        self.temperature = temperature

    @classmethod
    def from_config(cls, cfg):
        moco = cfg.MODEL.MOCO
        return {
            "encoder": build_encoder(cfg, forwards=2),
            "predictor": build_predictor(moco.DIM, moco.MLP_DIM, moco.PREDICTOR_LAST_NORM),
            "temperature": moco.TEMPERATURE,
            "pixel_mean": cfg.MODEL.PIXEL_MEAN,
            "pixel_std": cfg.MODEL.PIXEL_STD,
        }

    def forward(self, batch: dict | list[dict]) -> dict[str, Tensor] | Tensor:
        """Loss of a step in training; L2-normalised backbone features in evaluation.

        Args:
            batch: in training a step, `{"views": [uint8 (N, C, H, W), uint8 (N, C, H, W)]}`, N
                images of this process, the same N on each; or a part of a step, from
                :meth:`split_step`. In evaluation `{"image": uint8 (N, C, H, W)}`. Steps and images
                also as detectron2's list of one dict per image.

        Returns:
            `{"loss_contrastive": scalar}`, or float (N, features).
        """
        batch = collate(batch)
        if not self.training:
            return self.features(batch["image"])

        if "keys" not in batch:
            (batch,) = self.split_step(batch, 1)
        q1, q2 = (self.predictor(self.encoder_q(self.normalise(x))) for x in batch["views"])
        k1, k2 = batch["keys"]
        loss = self.contrastive_loss(q1, k2, batch["own"])
        loss = loss + self.contrastive_loss(q2, k1, batch["own"])
        log_scalar("[metric]chance_level", 4 * self.temperature * math.log(len(k1)))
        return {"loss_contrastive": loss}

    def contrastive_loss(self, q: Tensor, keys: Tensor, own: slice) -> Tensor:
        """2 tau times the cross-entropy of telling the own key from those of all other images:
        `ctr` of Algorithm 1. The factor keeps the size of the gradient when tau changes.

        Args:
            q: (N, C) predictions.
            keys: (B, C) L2-normalised keys of the whole batch, without gradient.
            own: the rows of the predictions' own keys, N of them.
        """
        q = F.normalize(full_precision(q), dim=1)
        ids = torch.arange(len(keys), device=keys.device)
        # The own key is the positive and not also a negative.
        loss, rank = info_nce(q, keys[own], keys, self.temperature, ids[own], ids)
        self.observe(q, Contrast(keys[own], keys, ids[own], ids))
        log_scalar("[metric]contrastive_acc1", (rank == 0).float().mean() * 100)
        log_scalar("[metric]contrastive_acc5", (rank < 5).float().mean() * 100)
        return 2 * self.temperature * loss

    @torch.no_grad()
    def split_step(self, batch: dict | list[dict], parts: int) -> list[dict]:
        """Encode a step's keys and divide its queries, so that each part can be its own forward.

        All queries meet the keys of the whole batch, so that the mean of the parts' losses is the
        loss of the undivided step. Call :meth:`finish_step` once.

        Args:
            batch: as for `forward`, in training.
            parts: number of equal parts, each of whole BN groups; half the encoders'
                `groups.parts`.

        Returns:
            `parts` batches `{"views": [two of uint8 (N / parts, C, H, W)], "keys": [two of
            (B, C)], "own": slice}` to call the model with; `own` says which keys are theirs.
        """
        views = [view.to(self.device, non_blocking=True) for view in collate(batch)["views"]]
        keys = [self.encode_keys(view, parts) for view in views]
        self.begin_step()
        divided = zip(*(view.chunk(parts) for view in views), strict=True)
        size = len(views[0]) // parts
        first = comm.get_rank() * len(views[0])
        return [
            {"views": list(part), "keys": keys, "own": slice(start, start + size)}
            for part, start in zip(divided, range(first, first + parts * size, size), strict=True)
        ]

    @torch.no_grad()
    def encode_keys(self, images: Tensor, parts: int = 1) -> Tensor:
        """uint8 (N, C, H, W) of this process -> (B, C) L2-normalised keys of all processes, in the
        order of position."""
        k = torch.cat([self.encoder_k(self.normalise(part)) for part in images.chunk(parts)])
        return all_gather_rows(F.normalize(full_precision(k), dim=1))
