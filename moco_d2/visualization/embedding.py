"""Maps of features in two dimensions, coloured by class."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from moco_d2.visualization.style import COLOURS, STYLE

_SIDE = 4.6  # inches
_COLOURS = [light for light, _ in COLOURS[1:]]
_MARKERS = ("o", "^", "s")
_GREY = "#c4c8cc"
NAMED = len(_COLOURS) * len(_MARKERS)  # classes that are told apart


@dataclass(frozen=True)
class Map:
    """Where images are, float (N, 2), and a line below the title."""

    points: np.ndarray
    note: str


def draw_maps(maps: Mapping[str, Map], labels: np.ndarray, classes: Sequence[str]) -> Figure:
    """Draw maps of the same images side by side.

    Args:
        maps: name of the features -> map.
        labels: int64 (N,), -1 where unknown.
        classes: their names; the most frequent `NAMED` have a colour and a marker of their own, the
            others are grey.
    """
    kinds = _kinds(labels, classes)
    columns = min(3, len(maps))
    rows = -(-len(maps) // columns)
    legend = 0.55 + 0.075 * max(len(name) for name, *_ in kinds) if len(kinds) > 1 else 0
    size = 14 if len(labels) <= 1000 else 8
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            rows,
            columns,
            figsize=(columns * _SIDE + legend, rows * (_SIDE + 0.4)),
            layout="constrained",
            squeeze=False,
        )
        for axis, (name, shown) in zip(axes.flat, maps.items(), strict=False):
            for _, members, colour, marker in reversed(kinds):  # grey is below the others
                x, y = shown.points[members].T
                axis.scatter(x, y, s=size, c=colour, marker=marker, alpha=0.75, linewidths=0)
            axis.set_title(f"{name}\n", loc="left", fontsize=11.5)
            axis.text(0, 1.02, shown.note, transform=axis.transAxes, fontsize=9, alpha=0.7)
            axis.set_aspect("equal", adjustable="datalim")
            axis.set(xticks=[], yticks=[])
            axis.spines[:].set_visible(False)
        for axis in axes.flat[len(maps) :]:
            axis.remove()
        if legend:
            handles = [
                Line2D([], [], color=colour, marker=marker, ls="", markersize=6)
                for _, _, colour, marker in kinds
            ]
            names = [name for name, *_ in kinds]
            figure.legend(handles, names, loc="outside right upper", frameon=False)
    return figure


def _kinds(labels: np.ndarray, classes: Sequence[str]) -> list[tuple]:
    """(name, which images, colour, marker); what has no colour of its own is last."""
    present, counts = np.unique(labels[labels >= 0], return_counts=True)
    named = np.sort(present[np.argsort(-counts, kind="stable")[:NAMED]])
    kinds = [
        (classes[c], labels == c, _COLOURS[i % len(_COLOURS)], _MARKERS[i // len(_COLOURS)])
        for i, c in enumerate(named.tolist())
    ]
    others = ~np.isin(labels, named)
    if others.any():
        rest = len(present) - len(named)
        name = f"{rest} other classes" if rest else "no class"
        kinds.append((name, others, _GREY if kinds else _COLOURS[0], "o"))
    return kinds
