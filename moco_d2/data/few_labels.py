"""Small labelled subsets that are the same on every run: a share, or a number of images.

A number `few` says how much is kept: 0 all; below 1 that share, at least one image; from 1 on that
many images, 1.0 being one. For the same seed, a smaller subset lies in every larger one.
"""

import numpy as np

from moco_d2.data.streams import Stream, generator
from moco_d2.errors import UserError


def few_images(
    count: int, few: float, seed: int, part: int = 0, key: str = "DATASETS.FEW_LABELS"
) -> np.ndarray:
    """Draw a subset of a data set.

    Args:
        count: images in the data set.
        few: how much is kept, see the head of this file.
        seed: what is drawn depends on it, on `count` and on `part` alone.
        part: number of one of several independent draws.
        key: what says how much is kept, for errors.

    Returns:
        int64, rising numbers of images, 0 to count - 1.

    Raises:
        UserError: `few` is negative, no whole number from 1 on, or more than there are.
    """
    kept = _number(count, few, key)
    order = generator(Stream.FEW_LABELS, seed, part).permutation(count)
    return np.sort(order[:kept])


def few_per_class(
    labels: np.ndarray, few: float, seed: int, key: str = "DATASETS.FEW_LABELS"
) -> np.ndarray:
    """Draw a subset that keeps the same share, or as many images, of every class.

    Args:
        labels: int64 (N,), 0 or more.
        few, seed, key: as for :func:`few_images`, for each class.

    Returns:
        int64, rising numbers of images, 0 to N - 1.

    Raises:
        UserError: as :func:`few_images`; a class has too few images.
    """
    by_class = np.argsort(labels, kind="stable")
    starts = np.flatnonzero(np.diff(labels[by_class], prepend=-1))
    members = np.split(by_class, starts)[1:]
    kept = [m[few_images(len(m), few, seed, int(labels[m[0]]), key)] for m in members]
    return np.sort(np.concatenate(kept)) if kept else np.empty(0, dtype=np.int64)


def _number(count: int, few: float, key: str) -> int:
    if few < 0 or (few >= 1 and few != int(few)):
        raise UserError(
            f"{key} is {few:g}: give 0 for all labels, a share below 1, or a whole "
            "number of images"
        )
    if few == 0:
        return count
    if few < 1:
        return max(1, round(few * count))
    if few > count:
        raise UserError(
            f"{key} is {few:g}, and there are only {count} images to draw from (of a "
            "class, in classification): give no more than that, or a share below 1"
        )
    return int(few)
