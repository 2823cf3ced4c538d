"""One place of the sample stream to its views: read, replace what is unreadable, augment."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moco_d2.data.augmentation import Recipe, ViewRecipe
from moco_d2.data.image_cache import ImageCache, image_key
from moco_d2.data.image_headers import stored_shape, upright_jpeg_shape
from moco_d2.data.image_io import REDUCTIONS, decode_image
from moco_d2.data.index import ImageIndex
from moco_d2.data.operations import resize
from moco_d2.data.pixels import PixelFormat, UnreadableImage
from moco_d2.data.streams import Stream, generator
from moco_d2.errors import UserError

_ATTEMPTS = 32  # others tried in place of an unreadable image
_RESERVE = 1.25  # pixels of a reduced image for one of the view, so that filters can do their work


class NoReadableImages(UserError):
    """An image is unreadable and so is every other that was tried in its place.

    Attributes:
        unreadable: (index, path, reason) of each.
    """

    def __init__(self, unreadable: Sequence[tuple[int, str, str]]):
        super().__init__(unreadable)
        self.unreadable = unreadable

    def __str__(self) -> str:
        reasons = {path: reason for _, path, reason in self.unreadable}
        shown = "; ".join(f"{path} ({reason})" for path, reason in list(reasons.items())[:5])
        return (
            f"{len(self.unreadable)} draws in a row gave no readable image, so there is nothing to "
            f"train on. Check the data set: {shown}."
        )


@dataclass(frozen=True)
class Sample:
    """The views of one image.

    Attributes:
        images: uint8 (size, size, C) each, RGB where C = 3.
        position: place in the sample stream.
        index: the image shown, in the data set.
        label: its label, -1 if not known.
        unreadable: (index, path, reason) of each image that was found unreadable here.
    """

    images: tuple[np.ndarray, ...]
    position: int
    index: int
    label: int
    unreadable: tuple[tuple[int, str, str], ...]


@dataclass(frozen=True)
class ViewMapper:
    """Maps (position, index) to a :class:`Sample`; what it returns depends on nothing else.

    Attributes:
        images: the data set.
        recipes: one for each view.
        size: side of the views in pixels.
        seed: of the run.
        pixels: what image files are read as.
        attempts: other images to try in place of an unreadable one.
        cache: where decoded images are kept. With it, all images are shrunk to what views need,
            whether or not they find room in it, so that views do not depend on that.
    """

    images: ImageIndex
    recipes: tuple[Recipe, ...]
    size: int
    seed: int
    pixels: PixelFormat
    attempts: int = _ATTEMPTS
    cache: ImageCache | None = None

    def __getitem__(self, place: tuple[int, int]) -> Sample | NoReadableImages:
        """Make the views of one place. Random numbers are keyed by (seed, position, view).

        Args:
            place: position in the sample stream, and index of the image that is due there.

        Returns:
            The sample; or the error that nothing could be read, returned so that it reaches the
            main process as it is, without a worker's stack trace around it.
        """
        position, index = place
        unreadable = []
        for attempt in range(self.attempts + 1):
            try:
                views = self._views(index, position)
            except UnreadableImage as error:
                unreadable.append((index, error.path, error.reason))
                index = self._substitute(position, attempt)
                continue
            label = int(self.images.labels[index])
            return Sample(views, position, index, label, tuple(unreadable))
        return NoReadableImages(unreadable)

    def _views(self, index: int, position: int) -> tuple[np.ndarray, ...]:
        """Decode an image once, no larger than its views need, and make them."""
        draws = [generator(Stream.VIEW, self.seed, position, v) for v in range(len(self.recipes))]
        drawn = []
        if self.cache is not None:
            image = self._cached(index)
        else:
            data = self.images.read(index)
            factor, drawn = self._choose_reduction(data, draws)
            image = decode_image(data, self.images.path(index), self.pixels, factor)
        if drawn:
            views = [recipe.apply(image, params) for recipe, params in drawn]
        else:
            pairs = zip(self.recipes, draws, strict=True)
            views = [recipe(image, rng, self.size) for recipe, rng in pairs]
        expected = (self.size, self.size, self.pixels.channels)
        for recipe, view in zip(self.recipes, views, strict=True):
            if view.shape != expected or view.dtype != np.uint8:
                raise ValueError(
                    f"The view recipe {recipe} returned {view.dtype} {view.shape}: it must return "
                    f"uint8 {expected}."
                )
        return tuple(views)

    def _cached(self, index: int) -> np.ndarray:
        """An image shrunk to what any view can show, from the cache or the file."""
        key = image_key(self.images, index, (self.pixels, self._useful))
        image = self.cache.get(key)
        if image is None:
            path = self.images.path(index)
            image = decode_image(self.images.read(index), path, self.pixels)
            shorter = min(image.shape[:2])
            if shorter > self._useful:
                scale = self._useful / shorter
                height, width = (math.ceil(side * scale) for side in image.shape[:2])
                image = resize(image, (height, width))
            self.cache.put(key, image)
        return image

    @functools.cached_property
    def _useful(self) -> float:
        """Shorter side of an image that has all pixels which the views can show."""
        if not self._draws_first:
            return math.inf
        return max(recipe.largest_useful(self.size) for recipe in self.recipes)

    @functools.cached_property
    def _draws_first(self) -> bool:
        return all(isinstance(recipe, ViewRecipe) for recipe in self.recipes)

    def _choose_reduction(
        self, data: bytes, draws: list[np.random.Generator]
    ) -> tuple[int, list[tuple[ViewRecipe, tuple]]]:
        """Choose the smallest size at which a JPEG still has more pixels than each of its views.

        Returns:
            factor of :func:`decode_image`, and recipes with what they drew for an image of that
            size. Nothing is drawn for a file that is decoded in full.
        """
        if self.pixels.channels not in (1, 3) or not self._draws_first:
            return 1, []
        stored = stored_shape(data)
        if stored is None or min(stored) < 2 * self.size:
            return 1, []
        shape = upright_jpeg_shape(data)
        if shape is None:
            return 1, []
        drawn = [
            (recipe, recipe.draw(rng, shape, self.size))
            for recipe, rng in zip(self.recipes, draws, strict=True)
        ]
        for factor in REDUCTIONS:
            reduced_shape = tuple(-(-side // factor) for side in shape)
            reduced = [(recipe, recipe.for_reduced(params, factor)) for recipe, params in drawn]
            if all(
                recipe.shrinkage(params, reduced_shape) >= _RESERVE for recipe, params in reduced
            ):
                return factor, reduced
        return 1, drawn

    def _substitute(self, position: int, attempt: int) -> int:
        rng = generator(Stream.SUBSTITUTE, self.seed, position, attempt)
        return int(rng.integers(len(self.images)))
