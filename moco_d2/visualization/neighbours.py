"""Nearest neighbours of some images in a data set, under several sets of features."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from moco_d2.visualization.style import COLOURS, STYLE
from moco_d2.visualization.tiles import WHITE, framed, tile

_SIDE, _FRAME, _GAP, _TEXT = 112, 4, 6, 17  # pixels
_CELL_WIDTH = _SIDE + 2 * (_FRAME + _GAP)
_CELL_HEIGHT = _CELL_WIDTH + _TEXT
_DPI = 100
_SAME, _OTHER = COLOURS[3][0], COLOURS[2][0]
_LETTERS = 19  # that find room below a tile


@dataclass(frozen=True)
class Picture:
    """An image, uint8 (H, W, 3), RGB, with its class, "" where that is unknown."""

    image: np.ndarray
    label: str = ""


@dataclass(frozen=True)
class Neighbour:
    picture: Picture
    similarity: float  # cosine


def spread_over_classes(labels: np.ndarray, order: np.ndarray, count: int) -> np.ndarray:
    """Choose images of as many classes as there are, in turns.

    Args:
        labels: int64 (N,).
        order: int64 (M,), numbers below N in the order in which they are preferred.
        count: how many are chosen, at most.

    Returns:
        int64 (min(count, M),).
    """
    seen: dict[int, int] = {}
    turns = []
    for label in labels[order].tolist():
        turns.append(seen.get(label, 0))
        seen[label] = turns[-1] + 1
    return order[np.argsort(turns, kind="stable")[:count]]


def draw_neighbours(
    queries: Sequence[Picture], found: Mapping[str, Sequence[Sequence[Neighbour]]]
) -> Figure:
    """Rows of a query and what is nearest to it, a row for each set of features.

    Neighbours of the query's class have a green frame, those of another class an orange one.

    Args:
        queries: N of them.
        found: name of the features -> for each query its neighbours, nearest first.
    """
    rows, columns = len(queries) * len(found), max(len(near) for near in next(iter(found.values())))
    left = 9 * max(len(name) for name in found) + 20 if len(found) > 1 else 0
    top = 30
    first = _CELL_WIDTH + left  # where neighbours begin
    height = top + rows * _CELL_HEIGHT + (len(queries) - 1) * 2 * _GAP
    canvas = np.full((height, first + columns * _CELL_WIDTH, 3), WHITE, np.uint8)
    texts = []
    y = top
    for number, query in enumerate(queries):
        _put(canvas, texts, query, 0, y)
        for name, near in found.items():
            if left:
                texts.append((_CELL_WIDTH + left / 2, y + _CELL_WIDTH / 2, name, 10))
            for column, neighbour in enumerate(near[number]):
                _put(
                    canvas,
                    texts,
                    neighbour.picture,
                    first + column * _CELL_WIDTH,
                    y,
                    neighbour.similarity,
                    query,
                )
            y += _CELL_HEIGHT
        y += 2 * _GAP
    texts.append((_CELL_WIDTH / 2, top / 2, "query", 10))
    with plt.rc_context(STYLE):
        figure = plt.figure(figsize=(canvas.shape[1] / _DPI, canvas.shape[0] / _DPI), dpi=_DPI)
        axis = figure.add_axes((0, 0, 1, 1))
        axis.imshow(canvas, interpolation="antialiased")
        axis.axis("off")
        for x, y, text, size in texts:
            axis.text(x, y, text, fontsize=size, ha="center", va="center")
        axis.text(first + _GAP, top / 2, _legend(queries, found), fontsize=10, va="center")
    return figure


def _legend(queries: Sequence[Picture], found: Mapping) -> str:
    text = "nearest neighbours, with cosine similarity"
    if not any(query.label for query in queries):
        return text
    shares = ", ".join(f"{name} {share:.0f} %" for name, share in agreement(queries, found).items())
    return f"{text}. Green: the query's class ({shares})"


def agreement(
    queries: Sequence[Picture], found: Mapping[str, Sequence[Sequence[Neighbour]]]
) -> dict[str, float]:
    """Percentage of the neighbours shown that are of their query's class, by set of features."""
    shares = {}
    for name, rows in found.items():
        pairs = zip(queries, rows, strict=True)
        same = [
            n.picture.label == query.label for query, near in pairs if query.label for n in near
        ]
        shares[name] = 100.0 * sum(same) / max(1, len(same))
    return shares


def _put(
    canvas: np.ndarray,
    texts: list,
    picture: Picture,
    x: int,
    y: int,
    similarity: float | None = None,
    query: Picture | None = None,
) -> None:
    colour = (WHITE,) * 3
    if query is not None and query.label and picture.label:
        colour = [round(255 * c) for c in to_rgb(_SAME if picture.label == query.label else _OTHER)]
    image = framed(framed(tile(picture.image, _SIDE), _FRAME, colour), _GAP)
    canvas[y : y + _CELL_WIDTH, x : x + _CELL_WIDTH] = image
    label = picture.label if len(picture.label) <= _LETTERS else picture.label[: _LETTERS - 1] + "…"
    words = [] if similarity is None else [f"{similarity:.2f}"]
    words += [label] if label else []
    texts.append((x + _CELL_WIDTH / 2, y + _CELL_WIDTH + _TEXT / 2 - _GAP, "  ".join(words), 7.5))
