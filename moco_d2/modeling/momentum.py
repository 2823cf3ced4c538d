"""What all Momentum Contrast shares: two encoders, of which one follows the other slowly."""

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from moco_d2.modeling.dictionary import Contrast
from moco_d2.modeling.encoder import Encoder
from moco_d2.modeling.inputs import ImageModel


class MomentumModel(ImageModel):
    """A query encoder, the key encoder that starts as its copy, and the order of a training step:
    forward and backward, optimizer step, `finish_step`."""

    def __init__(
        self,
        encoder: Encoder,
        pixel_mean: list[float],
        pixel_std: list[float],
        key_encoder: str = "follows",
    ):
        """
        Args:
            encoder: the query encoder.
            pixel_mean, pixel_std: per channel, on the 0-255 scale.
            key_encoder: "follows": a copy that moves slowly; for what MoCo is compared with
                "query": the query encoder itself, or "none".
        """
        super().__init__(pixel_mean, pixel_std)
        self.encoder_q = encoder
        self.encoder_k = encoder if key_encoder == "query" else None
        self.key_encoder_follows = key_encoder == "follows"
        if self.key_encoder_follows:
            self.encoder_k = copy.deepcopy(encoder).requires_grad_(False)
        self._in_step = False
        # Called, if set, with every comparison of a training step: queries (N, C) and their keys.
        self.observer: Callable[[Tensor, Contrast], None] | None = None

    def features(self, images: Tensor) -> Tensor:
        """uint8 (N, C, H, W) -> L2-normalised backbone features of the query encoder, float32
        (N, features)."""
        return F.normalize(self.encoder_q.features(self.normalise(images)).float(), dim=1)

    def observe(self, q: Tensor, contrast: Contrast) -> None:
        """To be called with what the loss has compared."""
        if self.observer is not None:
            self.observer(q, contrast)

    def begin_step(self) -> None:
        """To be called once a step's keys are encoded: they wait for :meth:`finish_step`.

        Raises:
            RuntimeError: those of the step before still do.
        """
        if self._in_step:
            name = type(self).__name__
            raise RuntimeError(
                f"two training steps without {name}.finish_step between them: keys would be lost "
                "and the key encoder never move. Train with PretrainTrainer of "
                "moco_d2.engine.trainer, or register KeyEncoderUpdate of moco_d2.engine.hooks with "
                "your trainer"
            )
        self._in_step = True

    @torch.no_grad()
    def finish_step(self, momentum: float) -> None:
        """What follows the optimizer's step: move the key encoder.

        Args:
            momentum: m of :meth:`update_key_encoder`.
        """
        if not self._in_step:
            raise RuntimeError(
                f"{type(self).__name__}.finish_step was called without a training forward before it"
            )
        self._in_step = False
        self.update_key_encoder(momentum)

    @torch.no_grad()
    def update_key_encoder(self, momentum: float) -> None:
        """theta_k <- m theta_k + (1 - m) theta_q (Eq. 2 of arXiv 1911.05722). Parameters only:
        each encoder's running statistics are its own. Nothing, without an encoder that follows."""
        if not self.key_encoder_follows:
            return
        torch._foreach_lerp_(
            list(self.encoder_k.parameters()), list(self.encoder_q.parameters()), 1 - momentum
        )
