"""Momentum Contrast, v1 and v2 (arXiv 1911.05722, 2003.04297): Algorithm 1 of the paper."""

import math

import torch
import torch.nn.functional as F
from detectron2.config import configurable
from detectron2.modeling import META_ARCH_REGISTRY
from detectron2.utils import comm
from torch import Tensor, nn

from moco_d2.engine.scalars import log_scalar
from moco_d2.modeling.dictionary import Dictionary, Step, build_dictionary
from moco_d2.modeling.encoder import Encoder, build_encoder
from moco_d2.modeling.inputs import collate, full_precision
from moco_d2.modeling.loss import info_nce
from moco_d2.modeling.momentum import MomentumModel
from moco_d2.modeling.shuffle import gather_keys, shuffle_images, shuffle_permutation


@META_ARCH_REGISTRY.register()
class MoCo(MomentumModel):
    """Queries against keys: of a slowly moving encoder and a queue of earlier ones, or, to compare
    with, those of the other dictionaries in :mod:`moco_d2.modeling.dictionary`.

    A training step is: `forward` and `backward` -> optimizer step -> :meth:`finish_step`.
    """

    @configurable
    def __init__(
        self,
        *,
        encoder: Encoder,
        dictionary: Dictionary,
        temperature: float,
        shuffle: bool,
        seed: int,
        pixel_mean: list[float],
        pixel_std: list[float],
        symmetric: bool = False,
    ):
        """
        Args:
            encoder: the query encoder; the key encoder starts as its copy.
            dictionary: where the keys come from.
            temperature: tau of the loss.
            shuffle: encode keys in BN groups drawn at random from the whole batch (Sec. 3.3).
            seed: of the shuffle permutations.
            pixel_mean, pixel_std: per channel, on the 0-255 scale.
            symmetric: each view is the query once and the key once; the loss is the mean of both.
        """
        super().__init__(encoder, pixel_mean, pixel_std, dictionary.key_encoder)
        self.dictionary = dictionary
        self.temperature = temperature
        self.shuffle = shuffle
        self.seed = seed
        self.symmetric = symmetric
        self._step: Step | None = None
        self._steps_seen = 0

    @classmethod
    def from_config(cls, cfg):
        moco = cfg.MODEL.MOCO
        dictionary = build_dictionary(cfg)
        forwards = (2 if dictionary.key_encoder == "query" else 1) * (2 if moco.SYMMETRIC else 1)
        return {
            "encoder": build_encoder(cfg, forwards=forwards),
            "dictionary": dictionary,
            "temperature": moco.TEMPERATURE,
            "shuffle": moco.SHUFFLE_BN,
            "seed": max(cfg.SEED, 0),
            "pixel_mean": cfg.MODEL.PIXEL_MEAN,
            "pixel_std": cfg.MODEL.PIXEL_STD,
            "symmetric": moco.SYMMETRIC,
        }

    def forward(self, batch: dict | list[dict]) -> dict[str, Tensor] | Tensor:
        """Loss of a step in training; L2-normalised backbone features in evaluation.

        Args:
            batch: in training a step, `{"views": [uint8 (N, C, H, W), uint8 (N, C, H, W)],
                "position": int64 (N,), "index": int64 (N,)}`, query's view first, N images of this
                process, the same N on each; `position` counts the images of the whole run and keys
                the shuffle (without it the steps are counted), `index` says which images of the
                data set they are (for a memory bank); or a part of a step, from
                :meth:`split_step`. In evaluation `{"image": uint8 (N, C, H, W)}`. Steps and images
                also as detectron2's list of one dict per image.

        Returns:
            `{"loss_contrastive": scalar}`, or float (N, features).
        """
        batch = collate(batch)
        if not self.training:
            return self.features(batch["image"])

        if "contrasts" not in batch:
            (batch,) = self.split_step(batch, 1)
        losses = []
        for view, keys in zip(batch["queries"], batch["contrasts"], strict=True):
            q = self.encode(self.encoder_q, view)
            loss, rank = info_nce(
                q, keys.k, keys.negatives, self.temperature, keys.ids, keys.negative_ids
            )
            losses.append(loss)
            self.observe(q, keys)
            self._step.queries.append(q.detach())
            log_scalar("[metric]contrastive_acc1", (rank == 0).float().mean() * 100)
            log_scalar("[metric]contrastive_acc5", (rank < 5).float().mean() * 100)
        log_scalar("[metric]chance_level", math.log(batch["candidates"]))
        return {"loss_contrastive": torch.stack(losses).mean()}

    def split_step(self, batch: dict | list[dict], parts: int) -> list[dict]:
        """Encode a step's keys and divide its queries, so that each part can be its own forward.

        All queries meet the keys of the whole batch and the dictionary as it stands, so that the
        mean of the parts' losses is the loss of the undivided step. Call :meth:`finish_step` once.

        Args:
            batch: as for `forward`, in training.
            parts: number of equal parts, each of whole BN groups; with `forwards` of
                :func:`build_encoder` they make up the encoders' `groups.parts`.

        Returns:
            `parts` batches to call the model with. Lists have an entry per direction of the loss:
            `{"queries": [uint8 (N / parts, C, H, W)], "contrasts": [Contrast], "candidates": int}`
        """
        batch = collate(batch)
        self._steps_seen += 1
        views = [view.to(self.device, non_blocking=True) for view in batch["views"]]
        queries, others = ([*views], views[::-1]) if self.symmetric else (views[:1], views[1:])
        count = len(views[0])
        batch_size, first = comm.get_world_size() * count, comm.get_rank() * count
        iteration = self._steps_seen
        if "position" in batch:
            iteration = int(batch["position"][0]) // batch_size
        index = batch.get("index")
        step = Step(
            iteration,
            own=slice(first, first + count),
            index=None if index is None else index.to(self.device, non_blocking=True),
            keys=[],
        )
        if self.encoder_k is not None:
            step.keys = [self.encode_keys(view, iteration, parts) for view in others]
        contrasts = [self.dictionary.contrast(step, i) for i in range(len(queries))]
        self.begin_step()
        self._step = step
        divided = zip(
            zip(*(view.chunk(parts) for view in queries), strict=True),
            zip(*(contrast.chunk(parts) for contrast in contrasts), strict=True),
            strict=True,
        )
        candidates = self.dictionary.candidates(batch_size)
        return [
            {"queries": list(q), "contrasts": list(keys), "candidates": candidates}
            for q, keys in divided
        ]

    def encode(self, encoder: nn.Module, images: Tensor) -> Tensor:
        """uint8 (N, C, H, W) -> (N, C), L2-normalised, in float32 (float64 in a float64 model)."""
        return F.normalize(full_precision(encoder(self.normalise(images))), dim=1)

    def encode_keys(self, images: Tensor, iteration: int, parts: int = 1) -> Tensor:
        """Keys of the whole batch, encoded in shuffled BN groups.

        Args:
            images: uint8 (N, C, H, W) of this process.
            iteration: keys the permutation; the same on every process.
            parts: forwards of the key encoder, each of whole groups.

        Returns:
            (B, C) L2-normalised keys of all processes in the order of position. Without gradient,
            unless the query encoder is the key encoder.
        """
        permutation = None
        if self.shuffle:
            batch_size = comm.get_world_size() * len(images)
            permutation = shuffle_permutation(batch_size, self.seed, iteration)
            images = shuffle_images(images, permutation)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.key_encoder_follows):
            k = torch.cat([self.encode(self.encoder_k, part) for part in images.chunk(parts)])
            return gather_keys(k, permutation)

    @torch.no_grad()
    def finish_step(self, momentum: float) -> None:
        """What follows the optimizer's step: move the key encoder, take the step into the
        dictionary.

        Args:
            momentum: m of :meth:`update_key_encoder`.
        """
        super().finish_step(momentum)
        self.dictionary.finish_(self._step)
        self._step = None
