"""What features are worth: kNN and linear classification of one set by another, and the table."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from moco_d2.evaluation.knn import accuracy, nearest_neighbours, rank_by_votes
from moco_d2.evaluation.linear_heads import EPOCHS, standardise, train_heads

logger = logging.getLogger(__name__)

TOP = (1, 5)
NEIGHBOURS = (1, 5, 10, 20, 50, 100, 200)
# MoCo's features want 30, supervised ones 0.1.
LEARNING_RATES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
_CONFUSED = 20  # pairs of classes that results name


@dataclass(frozen=True)
class Labelled:
    """Features with their labels.

    Attributes:
        features: float (N, C).
        labels: int64 (N,), on the same device.
    """

    features: Tensor
    labels: Tensor


@torch.no_grad()
def judge(
    train: Labelled,
    val: Labelled,
    classes: Sequence[str],
    *,
    neighbours: Sequence[int] = NEIGHBOURS,
    temperature: float = 0.07,
    learning_rates: Sequence[float] = LEARNING_RATES,
    epochs: int = EPOCHS,
    standardised: bool = False,
    seed: int = 0,
    progress: Callable[[int], None] = lambda iterations: None,
) -> tuple[dict[str, Any], np.ndarray]:
    """Classify a set by its nearest neighbours in another, and by linear heads trained on that.

    Args:
        classes: names of the classes.
        neighbours: numbers k of neighbours; those above the size of the set count as that.
        temperature: of the neighbours' votes.
        learning_rates: one head each, for batches of 256.
        epochs: that heads are trained for.
        standardised: heads see channels of mean 0 and standard deviation 1 over `train`.
        seed: of the heads' weights and batches.
        progress: see :func:`train_heads`.

    Returns:
        what `results.json` holds of it, percentages but for numbers of images; and the confusion
        of the best head, int64 (classes, classes): images of the row's class that are taken for
        the column's.
    """
    knn, by_neighbours = _knn(train, val, len(classes), neighbours, temperature)
    if standardised:
        features = [standardise(part.features, train.features) for part in (train, val)]
        train, val = Labelled(features[0], train.labels), Labelled(features[1], val.labels)
    heads = train_heads(
        train.features,
        train.labels,
        classes=len(classes),
        learning_rates=learning_rates,
        epochs=epochs,
        seed=seed,
        progress=progress,
    )
    ranked = torch.cat(list(heads.ranked(val.features, max(TOP))))  # (N, L, 5)
    linear = {
        f"{rate:g}": _accuracies(ranked[:, i], val.labels) for i, rate in enumerate(learning_rates)
    }
    k, rate = _best(knn), _best(linear)
    confusion = _confusion(val.labels, ranked[:, list(linear).index(rate), 0], len(classes))
    by_class = confusion.sum(axis=1)
    neighbours_right = _confusion(val.labels, by_neighbours[k][:, 0], len(classes)).diagonal()
    results = {
        "knn": knn,
        "linear": linear,
        "best": {
            "knn": {"k": int(k), **knn[k]},
            "linear": {"learning_rate": float(rate), **linear[rate]},
        },
        "per_class": {
            name: {
                "images": int(count),
                "knn": 100 * float(near) / int(count),
                "linear": 100 * float(right) / int(count),
            }
            for name, count, near, right in zip(
                classes, by_class, neighbours_right, confusion.diagonal(), strict=True
            )
            if count
        },
        "confused": _most_confused(confusion, classes),
    }
    return results, confusion


def _knn(
    bank: Labelled, queries: Labelled, classes: int, neighbours: Sequence[int], temperature: float
) -> tuple[dict[str, dict[str, float]], dict[str, Tensor]]:
    """Accuracies by k, and the first of the ranked classes (N, 5) by k."""
    numbers = sorted({min(k, len(bank.features)) for k in neighbours})
    normalised = [F.normalize(part.features, dim=1) for part in (bank, queries)]
    similarity, index = nearest_neighbours(*normalised, numbers[-1])
    labels = bank.labels[index]
    ranked = {}
    for k in numbers:
        by_votes = rank_by_votes(
            similarity[:, :k], labels[:, :k], temperature=temperature, num_classes=classes
        )
        # The slice itself would keep all classes in memory.
        ranked[str(k)] = by_votes[:, : max(TOP)].clone()
    return {k: _accuracies(r, queries.labels) for k, r in ranked.items()}, ranked


def _accuracies(ranked: Tensor, labels: Tensor) -> dict[str, float]:
    return {f"top{t}": accuracy(ranked, labels, t) for t in TOP}


def _best(by_setting: dict[str, dict[str, float]]) -> str:
    """The setting of the highest top-1; of equal ones the first."""
    return max(by_setting, key=lambda setting: by_setting[setting]["top1"])


def _confusion(labels: Tensor, predicted: Tensor, classes: int) -> np.ndarray:
    pairs = torch.bincount(labels * classes + predicted, minlength=classes**2)
    return pairs.view(classes, classes).cpu().numpy()


def _most_confused(confusion: np.ndarray, classes: Sequence[str]) -> list[dict[str, Any]]:
    wrong = confusion * (1 - np.eye(len(classes), dtype=np.int64))
    order = np.argsort(-wrong, axis=None, kind="stable")[:_CONFUSED]
    pairs = zip(*np.unravel_index(order, wrong.shape), strict=True)
    return [
        {"class": classes[i], "taken_for": classes[j], "images": int(wrong[i, j])}
        for i, j in pairs
        if wrong[i, j]
    ]


def table(results: dict[str, dict[str, Any]]) -> str:
    """A row for each set of weights, with the best number of neighbours and learning rate.

    Args:
        results: name of the weights -> what :func:`judge` returned of them, with `features` and
            `architecture`.
    """
    width = max(len("weights"), *map(len, results))
    lines = [
        f"{'':{width}}  {'kNN':>7}{'':16}{'linear':>12}",
        f"{'weights':{width}}  {'top-1':>7} {'top-5':>7} {'k':>5}  {'top-1':>7} {'top-5':>7}"
        f" {'lr':>6}  features",
    ]
    for name, result in results.items():
        knn, linear = result["best"]["knn"], result["best"]["linear"]
        lines.append(
            f"{name:{width}}  {knn['top1']:7.2f} {knn['top5']:7.2f} {knn['k']:5d}  "
            f"{linear['top1']:7.2f} {linear['top5']:7.2f} {linear['learning_rate']:6g}  "
            f"{result['features']}, {result['architecture']}"
        )
    for name, result in results.items():
        rates = [float(rate) for rate in result["linear"]]
        if result["best"]["linear"]["learning_rate"] in (min(rates), max(rates)) and len(rates) > 2:
            lines.append(
                f"{name}: the best learning rate is at the end of those tried; widen "
                "--learning-rates"
            )
    return "\n".join(lines)
