"""What a pretraining run tells of its health, from what its steps have computed anyway."""

import math
from collections.abc import Iterator

import torch
from detectron2.engine import HookBase
from detectron2.utils import comm
from torch import Tensor

from moco_d2.engine.distributed import all_gather_rows
from moco_d2.engine.scalars import log_scalar
from moco_d2.evaluation.spread import effective_rank, feature_std
from moco_d2.modeling.dictionary import Contrast, KeyQueue
from moco_d2.modeling.momentum import MomentumModel
from moco_d2.visualization.boards import view_board

_PAIRS = 8  # of views, in a picture


class Monitors(HookBase):
    """Logs similarities, the spread of the queries, the dictionary's state and the distance of the
    encoders in every so many steps; pictures of view pairs more seldom.

    It looks on: nothing that is trained depends on it. Values stay on their device until metrics
    are written. It comes after :class:`moco_d2.engine.hooks.KeyEncoderUpdate`.
    """

    def __init__(
        self, model: MomentumModel, keys_per_step: int, period: int, picture_period: int, order: str
    ):
        """
        Args:
            model: not in DDP.
            keys_per_step: that a queue takes in, of all processes.
            period: iterations from one step that is looked at to the next; 0: none is.
            picture_period: the same for pictures, the first step's among them.
            order: of the views' channels, "RGB" or "BGR".
        """
        self._model = model
        self._keys_per_step = keys_per_step
        self._period = period
        self._picture_period = picture_period
        self._order = order
        self._queries: list[Tensor] = []
        self._views: list[Tensor] | None = None

    def see(self, batches: Iterator[dict]) -> Iterator[dict]:
        """Pass batches on, one per step, remembering the views that are to be drawn."""
        for batch in batches:
            if self._picture_is_due():
                self._views = [view[:_PAIRS] for view in batch["views"]]
            yield batch

    def before_step(self):
        if self._period > 0 and (self.trainer.iter + 1) % self._period == 0:
            self._model.observer = self._observe

    def after_step(self):
        if self._model.observer is not None:
            self._model.observer = None
            self._log()
        if self._views is not None:
            board = view_board(self._views, self._order)
            self.trainer.storage.put_image("views of query (above) and key", board)
            self._views = None

    def _picture_is_due(self) -> bool:
        period = self._picture_period
        return comm.is_main_process() and period > 0 and self.trainer.iter % period == 0

    def _observe(self, q: Tensor, contrast: Contrast) -> None:
        # Here, not after the step, whose keys will be written over the oldest ones.
        for name, value in similarities(q, contrast).items():
            log_scalar(f"[metric]{name}", value)
        self._queries.append(q.detach())

    @torch.no_grad()
    def _log(self) -> None:
        queries, self._queries = all_gather_rows(torch.cat(self._queries)), []
        log_scalar("[metric]feature_std", feature_std(queries))
        log_scalar("[metric]effective_rank", effective_rank(queries))
        if self._model.key_encoder_follows:
            log_scalar("[metric]encoder_distance", encoder_distance(self._model))
        dictionary = getattr(self._model, "dictionary", None)
        if isinstance(dictionary, KeyQueue):
            log_scalar("[metric]queue_fill", dictionary.filled / len(dictionary.keys))
            age = (dictionary.filled / self._keys_per_step).ceil()
            log_scalar("[metric]oldest_key_age", age)


@torch.no_grad()
def similarities(q: Tensor, contrast: Contrast) -> dict[str, Tensor]:
    """Cosines of queries with what they are compared with, as the loss sees it: negatives that it
    leaves out do not count.

    Args:
        q: (N, C) L2-normalised.

    Returns:
        scalars, means over the queries: `positive_similarity`, `negative_similarity` (over all
        negatives of a query) and `hardest_negative` (the most similar one).
    """
    with torch.autocast(q.device.type, enabled=False):
        negative = q @ contrast.negatives.to(q.dtype).T  # (N, K)
        if contrast.ids is None:
            mean = negative.mean()
        else:
            left_out = contrast.ids[:, None] == contrast.negative_ids
            mean = negative.masked_fill_(left_out, 0).sum() / (~left_out).sum()
            negative.masked_fill_(left_out, -math.inf)
        return {
            "positive_similarity": (q * contrast.k).sum(dim=1).mean(),
            "negative_similarity": mean,
            "hardest_negative": negative.amax(dim=1).mean(),
        }


@torch.no_grad()
def encoder_distance(model: MomentumModel) -> Tensor:
    """|theta_q - theta_k| / |theta_q|, L2 over all parameters of the two encoders; a scalar."""
    q, k = list(model.encoder_q.parameters()), list(model.encoder_k.parameters())
    # One parameter at a time: a difference of all would be another encoder in memory.
    apart = torch.stack([torch.dist(a, b) for a, b in zip(q, k, strict=True)]).norm()
    return apart / torch.stack(torch._foreach_norm(q)).norm()
