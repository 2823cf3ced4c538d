"""A picture of which classes are taken for which."""

from collections.abc import Sequence

import numpy as np
from matplotlib import pyplot as plt

from moco_d2.visualization.style import STYLE

_NAMED = 40  # classes at most whose names find room
_NUMBERED = 16  # the same, with a number in each cell


def draw_confusion(confusion: np.ndarray, classes: Sequence[str], path: str, title: str) -> None:
    """Draw a confusion matrix, in percent of each row.

    Args:
        confusion: int64 (classes, classes), images of the row's class taken for the column's.
        classes: their names.
        path: of the PNG.
        title: of the picture.
    """
    count = len(classes)
    shares = 100 * confusion / np.maximum(confusion.sum(axis=1, keepdims=True), 1)
    side = min(14, 4 + 0.35 * count)
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(side, side), constrained_layout=True)
        image = axis.imshow(shares, cmap="viridis", vmin=0, vmax=100)
        if count <= _NAMED:
            axis.set_xticks(range(count), classes, rotation=90)
            axis.set_yticks(range(count), classes)
        if count <= _NUMBERED:
            for (row, column), share in np.ndenumerate(shares):
                colour = "black" if share > 60 else "white"
                axis.text(column, row, f"{share:.0f}", ha="center", va="center", color=colour)
        axis.set_xlabel("taken for")
        axis.set_ylabel("class")
        axis.set_title(title)
        figure.colorbar(image, shrink=0.7, label="% of the class")
        figure.savefig(path, dpi=110)
        plt.close(figure)
