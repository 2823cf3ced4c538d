"""Loaders: places of the sample stream in batches, the same on any number of processes."""

import logging
import math
from collections.abc import Iterator, Sequence
from itertools import count, islice
from typing import Any

import cv2
import numpy as np
import torch
from detectron2.config import CfgNode
from torch.utils.data import DataLoader, Sampler

from moco_d2.data.augmentation import Recipe, ViewRecipe, get_view_recipe
from moco_d2.data.collate import Collate, CollateLabelled, CollateViews
from moco_d2.data.image_cache import ImageCache, open_image_cache
from moco_d2.data.index import ImageIndex
from moco_d2.data.mapper import NoReadableImages, ViewMapper
from moco_d2.data.pixels import PixelFormat
from moco_d2.data.streams import SampleStream
from moco_d2.data.unreadable import UnreadableImages
from moco_d2.errors import UserError

logger = logging.getLogger(__name__)

# INPUT.FORMAT -> where its channels are in RGB; both orders are their own inverse.
_ORDERS = {"RGB": (0, 1, 2), "BGR": (2, 1, 0)}

Place = tuple[int, int]  # position in the sample stream, index of an image


class PositionBatchSampler(Sampler[list[Place]]):
    """Yields the places of each iteration that belong to one process.

    Iteration t takes positions t B to (t + 1) B of the sample stream, process r the r-th of
    ``world_size`` equal blocks of them. Nothing but t is needed to go on after a stop.
    """

    def __init__(
        self,
        num_images: int,
        *,
        batch_size: int,
        seed: int,
        start_iter: int = 0,
        num_iters: int | None = None,
        rank: int = 0,
        world_size: int = 1,
    ):
        """
        Args:
            num_images: images in an epoch.
            batch_size: B, of all processes together, a multiple of ``world_size``.
            seed: of the run.
            start_iter: iteration of the first batch.
            num_iters: number of batches; None: no end.
            rank: of this process, 0 to ``world_size`` - 1.
            world_size: number of processes.
        """
        if batch_size < 1 or batch_size % world_size:
            raise UserError(
                f"SOLVER.IMS_PER_BATCH is {batch_size}, which {world_size} process(es) cannot "
                f"share equally: make it a multiple of {world_size}."
            )
        self._num_images = num_images
        self._seed = seed
        self._batch_size = batch_size
        self._local = batch_size // world_size
        self._rank = rank
        self._start = start_iter
        self._num_iters = num_iters

    def __iter__(self) -> Iterator[list[Place]]:
        stream = SampleStream(self._num_images, self._seed)
        for iteration in islice(count(self._start), self._num_iters):
            first = iteration * self._batch_size + self._rank * self._local
            samples = stream.samples(first, self._local).tolist()
            yield list(zip(range(first, first + self._local), samples, strict=True))


class PretrainLoader:
    """Iterates over batches of views; see :func:`build_pretrain_loader`."""

    def __init__(self, batches: DataLoader, num_images: int, cache: ImageCache | None = None):
        self._batches = batches
        self._num_images = num_images
        self._cache = cache

    def __iter__(self) -> Iterator[dict[str, Any]]:
        first_position = None
        for batch in self._batches:
            if isinstance(batch, NoReadableImages):
                raise batch
            if self._cache is not None:
                last = int(batch["position"][-1])
                first_position = last if first_position is None else first_position
                if last - first_position >= self._num_images:  # an epoch has gone by
                    self._report(self._cache)
                    first_position = math.inf
            yield batch

    def _report(self, cache: ImageCache) -> None:
        size, images = cache.usage()
        logger.info(
            f"The image cache holds {images} images in {size / 1e9:.2f} of {cache.limit / 1e9:g} "
            f"GB (DATALOADER.CACHE_GB); the data set has {self._num_images}."
        )


class EvalLoader:
    """Iterates over labelled images once; see :func:`build_eval_loader`."""

    def __init__(self, batches: DataLoader, num_images: int):
        self._batches = batches
        self._num_images = num_images

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        unreadable = UnreadableImages(self._num_images)
        for batch in self._batches:
            unreadable.update(batch.pop("unreadable"))
            unreadable.check(self._num_images)
            if len(batch["index"]):
                yield batch


def pixel_options(cfg: CfgNode) -> dict[str, Any]:
    """What a config says about pixels, as arguments of the loaders."""
    return {
        "pixel_mean": cfg.MODEL.PIXEL_MEAN,
        "format": cfg.INPUT.FORMAT,
        "deep_range": tuple(cfg.INPUT.DEEP_RANGE),
        "max_pixels": cfg.INPUT.MAX_PIXELS,
    }


def build_pretrain_loader(
    index: ImageIndex,
    *,
    batch_size: int,
    size: int,
    recipes: Sequence[str],
    seed: int,
    pixel_mean: Sequence[float],
    format: str = "RGB",
    deep_range: Sequence[int] = (0, 65535),
    max_pixels: int = 200_000_000,
    min_crop: float = 0.0,
    cache: str = "none",
    cache_gb: float = 8.0,
    start_iter: int = 0,
    num_iters: int | None = None,
    rank: int = 0,
    world_size: int = 1,
    num_workers: int = 0,
) -> PretrainLoader:
    """Build the loader of a process's share of each batch of views.

    What an iteration holds depends on ``index``, ``batch_size``, ``size``, the recipes and the
    seed, and not on processes, workers or the iteration that the loader starts with.

    Args:
        index: the images.
        batch_size: of all processes together.
        size: side of the views, in pixels.
        recipes: names of view recipes, one for each view of an image.
        seed: of the run, 64 bits.
        pixel_mean: a float per channel, which sets their number, C; shown through transparent
            pixels.
        format: channel order where C = 3, "RGB" or "BGR".
        deep_range: the values of 16-bit images that become 0 and 255.
        max_pixels: images with more are unreadable.
        min_crop: smallest share of an image that a crop shows; 0: that of the recipes.
        cache: "none", or "ram" or "disk": keep decoded images there.
        cache_gb: size of the cache at most, in 10^9 bytes.
        start_iter: iteration of the first batch.
        num_iters: number of batches; None: no end.
        rank, world_size: this process and the number of processes.
        num_workers: processes that load; 0 loads in this one.

    Returns:
        An iterable over dicts, with n = batch_size / world_size: ``views`` (a tensor for each
        recipe, uint8 (n, C, size, size)), ``position``, ``index`` and ``label`` (int64 (n,), place
        in the sample stream, image shown there, and its label, -1 unknown), ``unreadable`` (list of
        (index, path, reason): images that were due but replaced). Iterating raises
        :class:`NoReadableImages` if no replacement is found.

    Raises:
        ValueError: unknown recipe or format, or a batch that the processes cannot share.
    """
    sampler = PositionBatchSampler(
        len(index),
        batch_size=batch_size,
        seed=seed,
        start_iter=start_iter,
        num_iters=num_iters,
        rank=rank,
        world_size=world_size,
    )
    order = _channel_order(pixel_mean, format)
    pixels = _pixel_format(pixel_mean, order, deep_range, max_pixels)
    views = tuple(_recipe_for(name, pixels.channels, min_crop) for name in recipes)
    images = open_image_cache(cache, cache_gb)
    mapper = ViewMapper(index, views, size, seed, pixels, cache=images)
    batches = _loader(mapper, sampler, CollateViews(order), num_workers)
    return PretrainLoader(batches, len(index), images)


def build_eval_loader(
    index: ImageIndex,
    *,
    size: int,
    batch_size: int,
    indices: np.ndarray,
    pixel_mean: Sequence[float],
    format: str = "RGB",
    deep_range: Sequence[int] = (0, 65535),
    max_pixels: int = 200_000_000,
    num_workers: int = 0,
) -> EvalLoader:
    """Build a loader that shows the centre crop of some images once, in the order given.

    Args:
        index: the images.
        size: side of the crop, in pixels.
        batch_size: images in a batch; the last may have fewer.
        indices: int64 (M,), which images.
        pixel_mean, format, deep_range, max_pixels, num_workers: as in
            :func:`build_pretrain_loader`.

    Returns:
        An iterable over dicts: ``image`` (uint8 (n, C, size, size)), ``label`` (int64 (n,), -1
        unknown) and ``index`` (int64 (n,)). Unreadable images are left out and logged; more than
        1 % of them is a UserError.

    Raises:
        ValueError: unknown format.
    """
    places = list(enumerate(np.asarray(indices).tolist()))
    batches = [places[i : i + batch_size] for i in range(0, len(places), batch_size)]
    recipes = (get_view_recipe("center_crop"),)
    order = _channel_order(pixel_mean, format)
    pixels = _pixel_format(pixel_mean, order, deep_range, max_pixels)
    mapper = ViewMapper(index, recipes, size, 0, pixels, attempts=0)
    loader = _loader(mapper, batches, CollateLabelled(order), num_workers)
    return EvalLoader(loader, len(places))


def _channel_order(pixel_mean: Sequence[float], image_format: str) -> tuple[int, ...]:
    """Where each channel of a batch is in a decoded image."""
    if len(pixel_mean) != 3:
        return tuple(range(len(pixel_mean)))
    if image_format not in _ORDERS:
        raise UserError(
            f"INPUT.FORMAT is {image_format!r}: pretraining takes one of {', '.join(_ORDERS)}."
        )
    return _ORDERS[image_format]


def _pixel_format(
    pixel_mean: Sequence[float],
    order: Sequence[int],
    deep_range: Sequence[int],
    max_pixels: int,
) -> PixelFormat:
    if not 0 <= deep_range[0] < deep_range[1] <= 65535:
        raise UserError(
            f"INPUT.DEEP_RANGE is {tuple(deep_range)}: it must be two rising values of 0 to 65535."
        )
    mean = tuple(float(pixel_mean[channel]) for channel in order)
    return PixelFormat(mean, tuple(deep_range), max_pixels)


def _recipe_for(name: str, channels: int, min_crop: float) -> Recipe:
    """The recipe without what makes no sense for so many channels, which is logged."""
    recipe = get_view_recipe(name)
    if not isinstance(recipe, ViewRecipe):
        return recipe
    if min_crop:
        recipe = recipe.with_smallest_crop(min_crop)
    recipe, dropped = recipe.for_channels(channels)
    if dropped:
        logger.info(
            f"Views {name}: without {', '.join(dropped)}, since images have {channels} "
            "channel(s) (MODEL.PIXEL_MEAN)."
        )
    return recipe


def _loader(mapper: ViewMapper, batches: Any, collate: Collate, num_workers: int) -> DataLoader:
    return DataLoader(
        mapper,
        batch_sampler=batches,
        collate_fn=collate,
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
        pin_memory=torch.cuda.is_available(),
        worker_init_fn=_init_worker,
        generator=torch.Generator(),  # so that loading takes nothing from the global one
    )


def _init_worker(worker: int) -> None:
    cv2.setNumThreads(0)
    torch.set_num_threads(1)
