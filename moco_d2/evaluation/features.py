"""kNN accuracy of a model's features on labelled image sets, extracted by all processes."""

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from detectron2.config import CfgNode
from detectron2.utils import comm
from detectron2.utils.events import get_event_storage, has_event_storage
from torch import Tensor, nn

from moco_d2.data.build import build_eval_loader, pixel_options
from moco_d2.data.index import ImageIndex
from moco_d2.data.labels import load_labelled_index, with_classes
from moco_d2.data.streams import Stream, generator
from moco_d2.errors import UserError
from moco_d2.evaluation.knn import accuracy, knn_predict
from moco_d2.evaluation.neighbours import draw_neighbours

logger = logging.getLogger(__name__)

_MAX_BATCH = 256


class Extracted(NamedTuple):
    """Features of the R images that could be read, on the CPU."""

    features: Tensor  # float32 (R, C)
    labels: Tensor  # int64 (R,)
    shown: Tensor  # int64 (R,), which images


@torch.no_grad()
def feature_batches(
    model: Callable[[dict], Tensor], index: ImageIndex, indices: np.ndarray, **options
) -> Iterator[tuple[Tensor, Tensor]]:
    """Features of the centre crops of images, batch by batch, on the CPU.

    Args:
        model: maps `{"image": uint8 (n, C, H, W)}` to (n, features); in eval mode.
        indices: int64 (M,) into the index.
        options: of :func:`build_eval_loader`.

    Yields:
        int64 (n,), which images, and float32 (n, features). Unreadable images are left out.
    """
    for batch in build_eval_loader(index, indices=indices, **options):
        yield batch["index"], model(batch).float().cpu()


def extract_features(
    model: Callable[[dict], Tensor], cfg: CfgNode, index: ImageIndex, indices: np.ndarray
) -> Extracted:
    """Features and labels of images, on every process. A collective.

    Args:
        model: maps `{"image": uint8 (n, 3, H, W)}` to (n, C); in eval mode.
        indices: int64 (M,) into the index, the same on every process.

    Returns:
        of the R <= M images that can be read, in the order of `indices`.

    Raises:
        UserError: none can be read, or too many cannot.
    """
    rank, world_size = comm.get_rank(), comm.get_world_size()
    mine = feature_batches(
        model,
        index,
        indices[rank::world_size],
        size=cfg.INPUT.VIEWS.SIZE,
        batch_size=min(_MAX_BATCH, max(1, cfg.SOLVER.IMS_PER_BATCH // world_size)),
        num_workers=cfg.DATALOADER.NUM_WORKERS,
        **pixel_options(cfg),
    )
    batches = [batch for part in comm.all_gather(list(mine)) for batch in part]
    if not batches:
        raise UserError("none of the images to evaluate can be read; the log says why")
    shown, features = (torch.cat(parts) for parts in zip(*batches, strict=True))
    sorter = np.argsort(indices)
    position = sorter[np.searchsorted(indices, shown.numpy(), sorter=sorter)]
    order = torch.from_numpy(np.argsort(position))
    shown = shown[order]
    return Extracted(features[order], torch.from_numpy(index.labels[shown.numpy()]), shown)


def knn_sets(cfg: CfgNode) -> tuple[ImageIndex | None, dict[str, ImageIndex]]:
    """TEST.KNN.BANK and the sets of DATASETS.TEST by name.

    Raises:
        UserError: an image has no label, or is of a class that the bank does not have.
    """
    name = cfg.TEST.KNN.BANK
    bank = load_labelled_index([name], "TEST.KNN.BANK") if name else None
    tests = {test: load_labelled_index([test], "DATASETS.TEST") for test in cfg.DATASETS.TEST}
    if bank is not None:
        tests = {
            test: with_classes(index, bank.classes, test, "TEST.KNN.BANK")
            for test, index in tests.items()
        }
    return bank, tests


def evaluate_knn(cfg: CfgNode, model: nn.Module) -> OrderedDict:
    """kNN accuracy of the features on every set of DATASETS.TEST. A collective.

    Args:
        model: eval forward returns L2-normalised features (N, C), as MoCo's does.

    Returns:
        `{"knn": {"top1": percent, "top5": percent}}`, by data set when there are several; nothing
        without a set.
    """
    if not cfg.DATASETS.TEST:
        return OrderedDict()
    was_training = model.training
    model.eval()
    knn, bank = cfg.TEST.KNN, None
    bank_index, tests = knn_sets(cfg)
    try:
        if bank_index is not None:
            bank = extract_features(model, cfg, bank_index, _subset(len(bank_index), knn.BANK_SIZE))
        results = OrderedDict()
        for name, index in tests.items():
            shown = _subset(len(index), knn.TEST_SIZE, draw=1)
            queries = extract_features(model, cfg, index, shown)
            voters = bank or queries
            ranked = knn_predict(
                voters.features,
                voters.labels,
                queries.features,
                k=knn.K,
                temperature=knn.TEMPERATURE,
                num_classes=len(index.classes),
                own_index=None if bank else torch.arange(len(queries.labels)),
            )
            top = {f"top{t}": accuracy(ranked, queries.labels, t) for t in (1, 5)}
            logger.info(f"kNN on {name}: top-1 {top['top1']:.2f} %, top-5 {top['top5']:.2f} %")
            results[name] = {"knn": top}
            if has_event_storage() and comm.is_main_process() and cfg.MONITORS.PICTURE_PERIOD > 0:
                searched = bank and (bank_index, bank.features, bank.shown)
                board = draw_neighbours(cfg, (index, queries.features, queries.shown), searched)
                get_event_storage().put_image(f"nearest neighbours in {name}", board)
    finally:
        model.train(was_training)
    return next(iter(results.values())) if len(results) == 1 else results


def _subset(total: int, limit: int, draw: int = 0) -> np.ndarray:
    """At most `limit` of `total` numbers, the same for a `draw` every time; all for 0.

    Drawn, not every n-th: labels may take turns along the data set.
    """
    if limit <= 0 or limit >= total:
        return np.arange(total)
    return np.sort(generator(Stream.KNN_BANK, draw).permutation(total)[:limit])
