"""One place of the sample stream to its views: read, replace what is unreadable, augment."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from moco_d2.data.datasets import ImageIndex
from moco_d2.data.image_io import UnreadableImage, read_image
from moco_d2.data.streams import Stream, generator
from moco_d2.errors import UserError

_ATTEMPTS = 32  # others tried in place of an unreadable image


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
        images: uint8 (size, size, 3) each, RGB.
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
        pixel_mean: 3 floats, RGB, shown through transparent pixels.
        attempts: other images to try in place of an unreadable one.
    """

    images: ImageIndex
    recipes: tuple[Callable[[np.ndarray, np.random.Generator, int], np.ndarray], ...]
    size: int
    seed: int
    pixel_mean: Sequence[float]
    attempts: int = _ATTEMPTS

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
                image = read_image(self.images.path(index), self.pixel_mean)
            except UnreadableImage as error:
                unreadable.append((index, error.path, error.reason))
                index = self._substitute(position, attempt)
                continue
            views = tuple(self._view(image, position, view) for view in range(len(self.recipes)))
            label = int(self.images.labels[index])
            return Sample(views, position, index, label, tuple(unreadable))
        return NoReadableImages(unreadable)

    def _view(self, image: np.ndarray, position: int, view: int) -> np.ndarray:
        recipe = self.recipes[view]
        result = recipe(image, generator(Stream.VIEW, self.seed, position, view), self.size)
        if result.shape != (self.size, self.size, 3) or result.dtype != np.uint8:
            raise ValueError(
                f"The view recipe {recipe} returned {result.dtype} {result.shape}: it must return "
                f"uint8 {(self.size, self.size, 3)}."
            )
        return result

    def _substitute(self, position: int, attempt: int) -> int:
        rng = generator(Stream.SUBSTITUTE, self.seed, position, attempt)
        return int(rng.integers(len(self.images)))
