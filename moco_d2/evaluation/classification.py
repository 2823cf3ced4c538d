"""Top-1 and top-5 accuracy on labelled image sets, each image once by one of all processes."""

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np
import torch
from detectron2.config import CfgNode
from detectron2.utils import comm
from torch import Tensor, nn

from moco_d2.data.build import build_eval_loader, pixel_options
from moco_d2.data.index import ImageIndex
from moco_d2.data.labels import load_labelled_index, with_classes
from moco_d2.errors import UserError

logger = logging.getLogger(__name__)

TOP = (1, 5)
_MAX_BATCH = 256


def evaluate_classification(cfg: CfgNode, model: nn.Module, classes: Sequence[str]) -> OrderedDict:
    """Accuracy on the centre crops of every set of DATASETS.TEST. A collective.

    Args:
        model: with `logits`, as ImageClassifier.
        classes: names of the classes of the logits.

    Returns:
        `{name of the set: {"classification": {"top1": percent, "top5": percent}}}`.
    """
    was_training = model.training
    model.eval()
    results = OrderedDict()
    try:
        for name in cfg.DATASETS.TEST:
            index = with_classes(load_labelled_index([name], "DATASETS.TEST"), classes, name)
            top = accuracies(cfg, model.logits, index)
            logger.info(
                f"Classification of {name}: top-1 {top['top1']:.2f} %, top-5 {top['top5']:.2f} %"
            )
            results[name] = {"classification": top}
    finally:
        model.train(was_training)
    return results


@torch.no_grad()
def accuracies(
    cfg: CfgNode, logits: Callable[[dict], Tensor], index: ImageIndex
) -> dict[str, float]:
    """Accuracies in percent of the images that can be read. A collective.

    Args:
        logits: maps `{"image": uint8 (n, C, H, W)}` to (n, classes). Of equal scores, that of the
            class with the lower number ranks higher.
        index: labelled images.
    """
    rank, world_size = comm.get_rank(), comm.get_world_size()
    loader = build_eval_loader(
        index,
        size=cfg.INPUT.VIEWS.SIZE,
        batch_size=min(_MAX_BATCH, max(1, cfg.SOLVER.IMS_PER_BATCH // world_size)),
        indices=np.arange(len(index))[rank::world_size],
        num_workers=cfg.DATALOADER.NUM_WORKERS,
        **pixel_options(cfg),
    )
    counts, total = [], 0
    for batch in loader:
        scores = logits(batch).float()  # (n, classes)
        labels = batch["label"].to(scores.device)
        ranked = scores.argsort(dim=1, descending=True, stable=True)
        hits = ranked[:, : max(TOP)] == labels[:, None]  # (n, 5)
        counts.append(torch.stack([hits[:, :t].sum() for t in TOP]).cpu())
        total += len(labels)
    mine = (torch.stack(counts).sum(0).tolist() if counts else [0] * len(TOP), total)
    shares = comm.all_gather(mine)
    total = sum(n for _, n in shares)
    correct = np.sum([c for c, _ in shares], axis=0).tolist()
    if not total:
        raise UserError("none of the images to evaluate can be read; the log says why")
    return {f"top{t}": 100.0 * c / total for t, c in zip(TOP, correct, strict=True)}
