"""From backbones and images to pictures of what their features find similar."""

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor
from tqdm import tqdm

from moco_d2.data.few_labels import few_images
from moco_d2.data.index import ImageIndex
from moco_d2.data.pixels import PixelFormat
from moco_d2.engine.memory import free_memory
from moco_d2.errors import UserError
from moco_d2.evaluation.frozen_features import FrozenFeatures, finite_batches
from moco_d2.evaluation.knn import nearest_neighbours
from moco_d2.visualization.embedding import Map, draw_maps
from moco_d2.visualization.neighbours import (
    Neighbour,
    Picture,
    draw_neighbours,
    spread_over_classes,
)
from moco_d2.visualization.tiles import original
from moco_d2.visualization.tsne import principal_components, tsne, tsne_bytes

_BATCH = 128
_COMPONENTS = 50  # that t-SNE sees


@dataclass(frozen=True)
class Reading:
    """How images are read: side of the centre crops in pixels, where features are computed,
    processes that read, and INPUT.DEEP_RANGE."""

    size: int = 224
    device: str = "cpu"
    num_workers: int = 0
    deep_range: tuple[int, int] = (0, 65535)


def neighbours_picture(
    networks: Mapping[str, FrozenFeatures],
    index: ImageIndex,
    reading: Reading,
    *,
    queries: ImageIndex | None = None,
    count: int = 8,
    k: int = 8,
    max_images: int = 0,
    seed: int = 0,
) -> Figure:
    """Draw the k nearest neighbours of some images.

    Args:
        networks: name -> backbone.
        index: images that are searched.
        queries: images whose neighbours are shown, all of them; None: `count` of those that are
            searched, of as many classes as there are, themselves left out.
        max_images: search so many, drawn by `seed`; 0: all.

    Raises:
        UserError: images, backbones or settings do not fit together.
    """
    numbers = _drawn(len(index), max_images, seed)
    every = index
    if queries is not None:
        every = ImageIndex.concatenate([index, queries])
        numbers = np.concatenate([numbers, np.arange(len(index), len(every))])
    numbers, features = features_of(networks, every, numbers, reading)
    if queries is None:
        order = np.random.default_rng(seed).permutation(len(numbers))
        asked = spread_over_classes(every.labels[numbers], order, count)
        searched, own = np.arange(len(numbers)), torch.from_numpy(asked)
    else:
        searched, own = np.flatnonzero(numbers < len(index)), None
        asked = np.flatnonzero(numbers >= len(index))
    if len(asked) == 0 or len(searched) == 0:
        raise UserError("none of the queries, or of the images to search, can be read")

    pixels = PixelFormat(
        tuple(next(iter(networks.values())).convention["pixel_mean"]), reading.deep_range
    )

    @functools.cache
    def picture(number: int) -> Picture:
        label = every.labels[number]
        return Picture(original(every, number, pixels), every.classes[label] if label >= 0 else "")

    found = {}
    for name, values in features.items():
        similarity, nearest = nearest_neighbours(values[searched], values[asked], k, own)
        found[name] = [
            [Neighbour(picture(int(numbers[searched[i]])), s) for s, i in zip(*row, strict=True)]
            for row in zip(similarity.tolist(), nearest.tolist(), strict=True)
        ]
    return draw_neighbours([picture(int(numbers[i])) for i in asked], found)


def embedding_picture(
    networks: Mapping[str, FrozenFeatures],
    index: ImageIndex,
    reading: Reading,
    *,
    method: str = "tsne",
    max_images: int = 1000,
    perplexity: float = 30.0,
    seed: int = 0,
) -> Figure:
    """Draw a map of images for each backbone.

    Args:
        networks: name -> backbone.
        method: "tsne" or "pca".
        max_images: show so many, drawn by `seed`; 0: all.

    Raises:
        UserError: images, backbones or settings do not fit together, or t-SNE not into memory.
    """
    drawn = _drawn(len(index), max_images, seed)
    if method == "tsne":
        _check_memory(len(drawn), reading.device)
    numbers, features = features_of(networks, index, drawn, reading)
    if len(numbers) < 3:
        raise UserError(f"a map needs at least 3 images; {len(numbers)} can be read: name more")
    labels = index.labels[numbers]
    maps = {}
    for name, values in features.items():
        points, words = _METHODS[method](values.to(reading.device), name, perplexity)
        notes = [words, *_own_class(values, labels)]
        maps[name] = Map(points.cpu().double().numpy(), "; ".join(notes))
    return draw_maps(maps, labels, index.classes)


def _check_memory(images: int, device: str) -> None:
    needed, free = tsne_bytes(images), free_memory(device)
    if needed > free:
        raise UserError(
            f"t-SNE of {images} images needs {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are "
            "free: lower --max-images, or use --method pca"
        )


def _pca(values: Tensor, name: str, perplexity: float) -> tuple[Tensor, str]:
    centred = values.double() - values.double().mean(dim=0)
    points = principal_components(values, 2)
    share = points.square().sum() / centred.square().sum().clamp(min=1e-30)
    return points, f"PCA, {100 * share:.0f} % of the variance"


def _tsne(values: Tensor, name: str, perplexity: float) -> tuple[Tensor, str]:
    reduced = principal_components(values, _COMPONENTS).float()
    iterations = tqdm(range(750), desc=f"{name}, t-SNE", unit=" iterations", disable=None)
    return tsne(reduced, perplexity=perplexity, iterations=iterations), "t-SNE"


_METHODS: dict[str, Callable[[Tensor, str, float], tuple[Tensor, str]]] = {
    "tsne": _tsne,
    "pca": _pca,
}


def _own_class(values: Tensor, labels: np.ndarray) -> Iterator[str]:
    """In words, how often an image's nearest neighbour, by all features, is of its class."""
    known = np.flatnonzero(labels >= 0)
    if len(np.unique(labels[known])) > 1:
        values, labels = values[known], labels[known]
        _, nearest = nearest_neighbours(values, values, 1, torch.arange(len(values)))
        share = 100 * np.mean(labels[nearest[:, 0].numpy()] == labels)
        yield f"nearest neighbour of the same class: {share:.0f} %"


def features_of(
    networks: Mapping[str, FrozenFeatures],
    index: ImageIndex,
    numbers: np.ndarray,
    reading: Reading,
) -> tuple[np.ndarray, dict[str, Tensor]]:
    """L2-normalised features of images by each backbone, on the CPU.

    Args:
        numbers: int64 (M,), rising.

    Returns:
        int64 (R,), the R <= M images that can be read, and float32 (R, C) by name.
    """
    for network in networks.values():
        network.check_size(reading.size)
    found, kept = {}, numbers
    for name, network in networks.items():
        network.to(reading.device)
        batches = finite_batches(
            network,
            index,
            kept,  # what one could not read, none will
            name,
            size=reading.size,
            batch_size=_BATCH,
            num_workers=reading.num_workers,
            deep_range=reading.deep_range,
        )
        shown = []
        with tqdm(total=len(kept), desc=name, unit=" images", disable=None) as bar:
            for batch in batches:
                shown.append(batch)
                bar.update(len(batch[0]))
        network.to("cpu")
        if not shown:
            raise UserError("none of the images can be read; the log says why")
        read, features = (torch.cat(parts) for parts in zip(*shown, strict=True))
        kept, found[name] = read.numpy(), torch.nn.functional.normalize(features, dim=1)
    return kept, found


def _drawn(total: int, limit: int, seed: int) -> np.ndarray:
    """At most `limit` of `total` numbers, rising; all for 0."""
    return few_images(total, min(limit, total), seed)
