"""What images are read as: channels, bits, size; and making that of what a file holds."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import cv2
import numpy as np


class UnreadableImage(Exception):
    """An image file that cannot be read.

    Attributes:
        path: the file.
        reason: why, in a few words.
    """

    def __init__(self, path: str, reason: str):
        super().__init__(path, reason)
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


class Unsuitable(ValueError):
    """The file is whole, but its pixels are not of the kind that is wanted."""


@dataclass(frozen=True)
class PixelFormat:
    """What images are read as.

    Attributes:
        mean: a value for each channel, RGB where there are three, 0 to 255. It shows through
            transparent pixels. Its length is the number of channels.
        deep_range: the values of 16-bit images that become 0 and 255; what lies outside is cut.
        max_pixels: larger images are not decoded: a file of some kilobytes can hold gigabytes.
    """

    mean: tuple[float, ...]
    deep_range: tuple[int, int] = (0, 65535)
    max_pixels: int = 200_000_000

    @property
    def channels(self) -> int:
        return len(self.mean)

    @property
    def deep_table(self) -> np.ndarray:
        """uint8 (65536,): the eight bits of each value of 16 bits."""
        return _deep_table(self.deep_range)


def check_size(path: str, shape: tuple[int, int], pixels: PixelFormat) -> None:
    """Raise UnreadableImage where (H, W) is more than is allowed."""
    if shape[0] * shape[1] > pixels.max_pixels:
        raise UnreadableImage(
            path, f"{shape[1]} x {shape[0]} is more than INPUT.MAX_PIXELS {pixels.max_pixels}"
        )


def to_pixel_format(array: np.ndarray, path: str, pixels: PixelFormat) -> np.ndarray:
    """Make uint8 (H, W, C) of what a file holds, or say why that is not possible."""
    array = to_bytes_or_words(array, path, pixels)
    if array.dtype == np.uint16:
        deep, array = array, pixels.deep_table[array]
        if pixels.channels in (1, 3) and deep.shape[2] in (2, 4):
            array[..., -1] = deep[..., -1] >> 8  # opacity is no value of the picture
    return to_channel_count(array, path, pixels.channels, pixels.mean)


def to_bytes_or_words(array: np.ndarray, path: str, pixels: PixelFormat) -> np.ndarray:
    """Make uint8 or uint16 (H, W, K) of any array that holds an image of such values.

    Raises:
        Unsuitable: other values or dimensions.
        UnreadableImage: too many pixels.
    """
    if array.ndim == 2:
        array = array[..., None]
    if array.ndim != 3:
        raise Unsuitable(f"it has {array.ndim} dimensions, an image has 2 or 3")
    check_size(path, array.shape[:2], pixels)
    if array.dtype in (np.uint8, np.uint16):
        return array
    if array.dtype == bool:
        return array.astype(np.uint8) * 255
    if array.dtype.kind not in "iu":
        raise Unsuitable("its pixels are floating point numbers")
    if array.min() < 0 or array.max() > 0xFFFF:
        raise Unsuitable("its pixels have more than 16 bits")
    return array.astype(np.uint16)


def to_channel_count(
    array: np.ndarray, path: str, wanted: int, mean: Sequence[float] = (0.0,)
) -> np.ndarray:
    """Change the number of channels, of 8 or 16 bits, where that has one meaning.

    Args:
        array: uint8 or uint16 (H, W, K).
        path: what to call it in errors.
        wanted: C.
        mean: shown through transparent pixels.

    Returns:
        (H, W, C), contiguous.

    Raises:
        UnreadableImage: K and C do not go together.
    """
    stored = array.shape[2]
    if stored == wanted:
        return np.ascontiguousarray(array)
    if wanted in (1, 3) and stored in (2, 4):
        alpha = array[..., -1:].astype(np.float32) / np.iinfo(array.dtype).max
        colour = _to_colours(array[..., :-1], wanted)
        return np.rint(colour * alpha + (1 - alpha) * np.float32(mean)).astype(array.dtype)
    if wanted in (1, 3) and stored in (1, 3):
        return _to_colours(array, wanted)
    raise UnreadableImage(path, f"it has {stored} channels and MODEL.PIXEL_MEAN has {wanted}")


def _to_colours(array: np.ndarray, wanted: int) -> np.ndarray:
    """Turn grey into RGB or the other way round, where they differ."""
    if array.shape[2] == wanted:
        return array
    if wanted == 3:
        return np.repeat(array, 3, axis=2)
    return cv2.cvtColor(np.ascontiguousarray(array), cv2.COLOR_RGB2GRAY)[..., None]


@functools.lru_cache(maxsize=8)
def _deep_table(deep_range: tuple[int, int]) -> np.ndarray:
    low, high = deep_range
    values = (np.arange(65536, dtype=np.int64) - low) * 256 // (high - low + 1)
    return np.clip(values, 0, 255).astype(np.uint8)
