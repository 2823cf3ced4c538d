"""Momentum Contrast, v1 and v2 (arXiv 1911.05722, 2003.04297): Algorithm 1 of the paper."""

import math

import torch
import torch.nn.functional as F
from detectron2.config import configurable
from detectron2.modeling import META_ARCH_REGISTRY
from detectron2.utils import comm
from torch import Tensor

from moco_d2.engine.scalars import log_scalar
from moco_d2.modeling.dictionary import KeyQueue
from moco_d2.modeling.encoder import Encoder, build_encoder
from moco_d2.modeling.inputs import collate, full_precision
from moco_d2.modeling.loss import info_nce
from moco_d2.modeling.momentum import MomentumModel
from moco_d2.modeling.shuffle import gather_keys, shuffle_images, shuffle_permutation


@META_ARCH_REGISTRY.register()
class MoCo(MomentumModel):
    """Queries against keys of a slowly moving encoder and a queue of earlier keys.

    A training step is: `forward` and `backward` -> optimizer step -> :meth:`finish_step`.
    """

    @configurable
    def __init__(
        self,
        *,
        encoder: Encoder,
        dictionary: KeyQueue,
        temperature: float,
        shuffle: bool,
        seed: int,
        pixel_mean: list[float],
        pixel_std: list[float],
    ):
        """
        Args:
            encoder: the query encoder; the key encoder starts as its copy.
            dictionary: where the negatives come from.
            temperature: tau of the loss.
            shuffle: encode keys in BN groups drawn at random from the whole batch (Sec. 3.3).
            seed: of the shuffle permutations.
            pixel_mean, pixel_std: per channel, on the 0-255 scale.
        """
        super().__init__(encoder, pixel_mean, pixel_std)
        self.dictionary = dictionary
        self.temperature = temperature
        self.shuffle = shuffle
        self.seed = seed
        self._step_keys: Tensor | None = None
        self._steps_seen = 0

    @classmethod
    def from_config(cls, cfg):
        moco, seed = cfg.MODEL.MOCO, max(cfg.SEED, 0)
        return {
            "encoder": build_encoder(cfg),
            "dictionary": KeyQueue(moco.QUEUE_SIZE, moco.DIM, seed),
            "temperature": moco.TEMPERATURE,
            "shuffle": moco.SHUFFLE_BN,
            "seed": seed,
            "pixel_mean": cfg.MODEL.PIXEL_MEAN,
            "pixel_std": cfg.MODEL.PIXEL_STD,
        }

    def forward(self, batch: dict | list[dict]) -> dict[str, Tensor] | Tensor:
        """Loss of a step in training; L2-normalised backbone features in evaluation.

        Args:
            batch: in training a step, `{"views": [uint8 (N, C, H, W), uint8 (N, C, H, W)],
                "position": int64 (N,)}`, query's view first, N images of this process, the same N
                on each; `position` counts the images of the whole run and keys the shuffle
                (without it the steps are counted); or a part of a step, from :meth:`split_step`.
                In evaluation `{"image": uint8 (N, C, H, W)}`. Steps and images also as
                detectron2's list of one dict per image.

        Returns:
            `{"loss_contrastive": scalar}`, or float (N, features).
        """
        batch = collate(batch)
        if not self.training:
            return self.features(batch["image"])

        if "keys" not in batch:
            (batch,) = self.split_step(batch, 1)
        q = F.normalize(full_precision(self.encoder_q(self.normalise(batch["view"]))), dim=1)
        loss, rank = info_nce(q, batch["keys"], self.dictionary.keys, self.temperature)
        log_scalar("[metric]contrastive_acc1", (rank == 0).float().mean() * 100)
        log_scalar("[metric]contrastive_acc5", (rank < 5).float().mean() * 100)
        log_scalar("[metric]chance_level", math.log(len(self.dictionary.keys) + 1))
        return {"loss_contrastive": loss}

    @torch.no_grad()
    def split_step(self, batch: dict | list[dict], parts: int) -> list[dict]:
        """Encode a step's keys and divide its queries, so that each part can be its own forward.

        All queries meet the keys of the whole batch and the dictionary as it stands, so that the
        mean of the parts' losses is the loss of the undivided step. Call :meth:`finish_step` once.

        Args:
            batch: as for `forward`, in training.
            parts: number of equal parts, each of whole BN groups; the encoders' `groups.parts`.

        Returns:
            `parts` batches `{"view": uint8 (N / parts, C, H, W), "keys": (N / parts, C)}` to call
            the model with.
        """
        batch = collate(batch)
        self._steps_seen += 1
        view_q, view_k = (view.to(self.device, non_blocking=True) for view in batch["views"])
        iteration = self._steps_seen
        if "position" in batch:
            iteration = int(batch["position"][0]) // (comm.get_world_size() * len(view_q))
        keys = self.encode_keys(view_k, iteration, parts)  # (B, C), of all processes
        self.begin_step()
        self._step_keys = keys
        first = comm.get_rank() * len(view_q)
        own = keys[first : first + len(view_q)]
        return [
            {"view": view, "keys": keys}
            for view, keys in zip(view_q.chunk(parts), own.chunk(parts), strict=True)
        ]

    @torch.no_grad()
    def encode_keys(self, images: Tensor, iteration: int, parts: int = 1) -> Tensor:
        """Keys of the whole batch, encoded in shuffled BN groups.

        Args:
            images: uint8 (N, C, H, W) of this process.
            iteration: keys the permutation; the same on every process.
            parts: forwards of the key encoder, each of whole groups.

        Returns:
            (B, C) L2-normalised keys of all processes in the order of position.
        """
        permutation = None
        if self.shuffle:
            batch_size = comm.get_world_size() * len(images)
            permutation = shuffle_permutation(batch_size, self.seed, iteration)
            images = shuffle_images(images, permutation)
        k = torch.cat([self.encoder_k(self.normalise(part)) for part in images.chunk(parts)])
        return gather_keys(F.normalize(full_precision(k), dim=1), permutation)

    @torch.no_grad()
    def finish_step(self, momentum: float) -> None:
        """What follows the optimizer's step: move the key encoder, enqueue the step's keys.

        Args:
            momentum: m of :meth:`update_key_encoder`.
        """
        super().finish_step(momentum)
        self.dictionary.enqueue_(self._step_keys)
        self._step_keys = None
