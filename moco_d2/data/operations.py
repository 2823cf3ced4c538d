"""The single steps of a view, crop, colour, blur, flip, on uint8 images with OpenCV.

An operation draws its parameters and applies them apart from each other, so that distributions
and pixels can each be compared with torchvision and Pillow, whose semantics these are.
"""

import itertools
import math
import threading
from dataclasses import dataclass, replace
from typing import Any

import cv2
import numpy as np
import torch
from torch.nn.functional import interpolate

from moco_d2.data.colour import ColourStep, apply_colour

Shape = tuple[int, int]  # height, width
Generator = np.random.Generator

_VISIBLE_SIGMA = 0.25  # below, a blur changes no pixel by more than a level
_SHRINKS = 1.25  # areas of image and result, from where on filters differ by a level
_KEPT_BYTES = 4 << 20  # for the crop that is being resized
_memory = threading.local()
_FACTORS = ("brightness", "contrast", "saturation")
_ORDERS = tuple(itertools.permutations(range(4)))


def _between(low: float, high: float, share: float) -> float:
    return low + (high - low) * share


class Operation:
    """One step of a view recipe."""

    def draw(self, rng: Generator, shape: Shape, size: int) -> Any:
        """Draw parameters for an image of ``shape`` (H, W) that becomes a view of side ``size``."""
        raise NotImplementedError

    def apply(self, image: np.ndarray, params: Any) -> np.ndarray:
        """Return the image, uint8 (H, W, C), changed by what was drawn; the input is kept."""
        raise NotImplementedError

    def colour_steps(self, params: Any) -> tuple[ColourStep, ...] | None:
        """What was drawn as steps of :func:`apply_colour`, to be fused with those of neighbours;
        None: it is not of that kind."""
        return None

    def shrinkage(self, params: Any, shape: Shape) -> float:
        """How many pixels of an image of ``shape`` become one of the view, along the side that
        shrinks less."""
        return 1.0

    def for_reduced(self, params: Any, factor: int) -> Any:
        """What was drawn, for the same image at 1 / ``factor`` of its size."""
        return params

    def largest_useful(self, size: int) -> float:
        """Shorter side above which an image has more pixels than any view of side ``size`` can
        show; infinite if there is none."""
        return math.inf

    def for_channels(self, channels: int) -> tuple["Operation | None", tuple[str, ...]]:
        """The operation for images of so many channels, None if nothing of it makes sense for
        them, and the names of what was dropped."""
        return self, ()


@dataclass(frozen=True)
class Sometimes(Operation):
    """Apply an operation with probability p. Its parameters are None where it is left out."""

    p: float
    operation: Operation

    def draw(self, rng: Generator, shape: Shape, size: int) -> Any:
        return self.operation.draw(rng, shape, size) if rng.random() < self.p else None

    def apply(self, image: np.ndarray, params: Any) -> np.ndarray:
        return image if params is None else self.operation.apply(image, params)

    def colour_steps(self, params: Any) -> tuple[ColourStep, ...] | None:
        return () if params is None else self.operation.colour_steps(params)

    def for_channels(self, channels: int) -> tuple[Operation | None, tuple[str, ...]]:
        operation, dropped = self.operation.for_channels(channels)
        return (None if operation is None else replace(self, operation=operation)), dropped


@dataclass(frozen=True)
class Crop:
    """A rectangle of the image, in pixels, and the side of the square it is resized to."""

    top: int
    left: int
    height: int
    width: int
    size: int

    def reduced(self, factor: int) -> "Crop":
        """The rectangle of whole pixels in the image at 1 / ``factor`` of its size."""
        top, left = round(self.top / factor), round(self.left / factor)
        bottom = round((self.top + self.height) / factor)
        right = round((self.left + self.width) / factor)
        return Crop(top, left, bottom - top, right - left, self.size)


@dataclass(frozen=True)
class RandomResizedCrop(Operation):
    """Crop a random rectangle and resize it to the view (Szegedy et al., 2015).

    Args:
        scale: range of the rectangle's share of the image's area, uniform.
        ratio: range of its width / height, uniform in the logarithm.
    """

    scale: tuple[float, float]
    ratio: tuple[float, float] = (3 / 4, 4 / 3)

    def draw(self, rng: Generator, shape: Shape, size: int) -> Crop:
        image_height, image_width = shape
        log_ratio = math.log(self.ratio[0]), math.log(self.ratio[1])
        for _ in range(10):
            share, shape_share, down, right = rng.random(4).tolist()
            area = image_height * image_width * _between(*self.scale, share)
            ratio = math.exp(_between(*log_ratio, shape_share))
            height, width = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
            if 0 < height <= image_height and 0 < width <= image_width:
                top = int(down * (image_height - height + 1))
                left = int(right * (image_width - width + 1))
                return Crop(top, left, height, width, size)
        # The largest centred rectangle whose ratio is in range.
        height = min(image_height, max(1, round(image_width / self.ratio[0])))
        width = min(image_width, max(1, round(image_height * self.ratio[1])))
        top, left = (image_height - height) // 2, (image_width - width) // 2
        return Crop(top, left, height, width, size)

    def apply(self, image: np.ndarray, params: Crop) -> np.ndarray:
        rows = slice(params.top, params.top + params.height)
        columns = slice(params.left, params.left + params.width)
        return resize(image[rows, columns], (params.size, params.size))

    def shrinkage(self, params: Crop, shape: Shape) -> float:
        return min(params.height, params.width) / params.size

    def for_reduced(self, params: Crop, factor: int) -> Crop:
        return params.reduced(factor)

    def largest_useful(self, size: int) -> float:
        # Of a square image, which has the fewest pixels for its shorter side, the smallest crop.
        return size * math.sqrt(max(self.ratio[1], 1 / self.ratio[0]) / self.scale[0])


@dataclass(frozen=True)
class CenterCrop(Operation):
    """Resize the shorter side to the view divided by ``share``, and crop the view at the centre."""

    share: float

    def draw(self, rng: Generator, shape: Shape, size: int) -> tuple[Shape, Crop]:
        shorter = round(size / self.share)
        height, width = (max(shorter, int(shorter * side / min(shape))) for side in shape)
        top, left = round((height - size) / 2), round((width - size) / 2)
        return (height, width), Crop(top, left, size, size, size)

    def apply(self, image: np.ndarray, params: tuple[Shape, Crop]) -> np.ndarray:
        shape, crop = params
        image = resize(image, shape)
        return image[crop.top : crop.top + crop.size, crop.left : crop.left + crop.size]

    def shrinkage(self, params: tuple[Shape, Crop], shape: Shape) -> float:
        return min(side / resized for side, resized in zip(shape, params[0], strict=True))

    def largest_useful(self, size: int) -> float:
        return round(size / self.share)


@dataclass(frozen=True)
class ColorJitter(Operation):
    """Change brightness, contrast, saturation and hue, in random order.

    Args:
        brightness, contrast, saturation: factors are uniform in 1 - value to 1 + value.
        hue: the shift is uniform in -hue to hue, in turns of the colour circle.
    """

    brightness: float
    contrast: float
    saturation: float
    hue: float

    def draw(self, rng: Generator, shape: Shape, size: int) -> tuple[ColourStep, ...]:
        spreads = (self.brightness, self.contrast, self.saturation)
        *shares, turn, order = rng.random(5).tolist()
        factors = [
            _between(max(0.0, 1 - s), 1 + s, u) for s, u in zip(spreads, shares, strict=True)
        ]
        steps = (*zip(_FACTORS, factors, strict=True), ("hue", _between(-self.hue, self.hue, turn)))
        return tuple(steps[i] for i in _ORDERS[int(order * len(_ORDERS))])

    def apply(self, image: np.ndarray, params: tuple[ColourStep, ...]) -> np.ndarray:
        return apply_colour(image, params)

    def colour_steps(self, params: tuple[ColourStep, ...]) -> tuple[ColourStep, ...]:
        return params

    def for_channels(self, channels: int) -> tuple[Operation | None, tuple[str, ...]]:
        if channels == 3:
            return self, ()
        kept = replace(self, saturation=0.0, hue=0.0)
        dropped = tuple(name for name in ("saturation", "hue") if getattr(self, name))
        return (kept if kept.brightness or kept.contrast else None), dropped


@dataclass(frozen=True)
class Grayscale(Operation):
    """Replace the colours by their luma in all three channels."""

    def draw(self, rng: Generator, shape: Shape, size: int) -> tuple[()]:
        return ()

    def apply(self, image: np.ndarray, params: tuple[()]) -> np.ndarray:
        return apply_colour(image, self.colour_steps(params))

    def colour_steps(self, params: tuple[()]) -> tuple[ColourStep, ...]:
        return (("saturation", 0.0),)

    def for_channels(self, channels: int) -> tuple[Operation | None, tuple[str, ...]]:
        return (self, ()) if channels == 3 else (None, ("grayscale",))


@dataclass(frozen=True)
class GaussianBlur(Operation):
    """Blur with a Gaussian.

    Args:
        sigma: range of the standard deviation in pixels, uniform.
        kernel_share: width of the kernel as a share of the view's side, the rest of the Gaussian
            is cut off; None: two standard deviations to each side.
    """

    sigma: tuple[float, float]
    kernel_share: float | None = None

    def draw(self, rng: Generator, shape: Shape, size: int) -> tuple[float, int]:
        sigma = rng.uniform(*self.sigma)
        if self.kernel_share is None:
            return sigma, 2 * math.ceil(2 * sigma) + 1
        return sigma, int(self.kernel_share * size) | 1

    def apply(self, image: np.ndarray, params: tuple[float, int]) -> np.ndarray:
        sigma, width = params
        if sigma < _VISIBLE_SIGMA:
            return image
        # Faster than cv2.GaussianBlur, which is exact to the bit on every machine.
        kernel = cv2.getGaussianKernel(width, sigma, cv2.CV_32F)
        blurred = cv2.sepFilter2D(image, -1, kernel, kernel, borderType=cv2.BORDER_REPLICATE)
        return blurred.reshape(image.shape)


@dataclass(frozen=True)
class Solarize(Operation):
    """Invert the values from a threshold on (BYOL, arXiv 2006.07733, App. B)."""

    threshold: int = 128

    def draw(self, rng: Generator, shape: Shape, size: int) -> tuple[()]:
        return ()

    def apply(self, image: np.ndarray, params: tuple[()]) -> np.ndarray:
        levels = np.arange(256, dtype=np.uint8)
        table = np.where(levels < self.threshold, levels, 255 - levels).astype(np.uint8)
        return cv2.LUT(image, table).reshape(image.shape)


@dataclass(frozen=True)
class HorizontalFlip(Operation):
    """Mirror left and right."""

    def draw(self, rng: Generator, shape: Shape, size: int) -> tuple[()]:
        return ()

    def apply(self, image: np.ndarray, params: tuple[()]) -> np.ndarray:
        return cv2.flip(image, 1).reshape(image.shape)


@dataclass(frozen=True)
class QuarterTurn(Operation):
    """Rotate by 0, 90, 180 or 270 degrees anticlockwise, each as likely."""

    def draw(self, rng: Generator, shape: Shape, size: int) -> int:
        return int(rng.integers(4))

    def apply(self, image: np.ndarray, params: int) -> np.ndarray:
        return np.ascontiguousarray(np.rot90(image, params))


def resize(image: np.ndarray, shape: Shape) -> np.ndarray:
    """Resize like Pillow's antialiased bilinear filter.

    Torch's kernel for bytes is Pillow's filter to the last bit. Where the image hardly shrinks,
    plain bilinear interpolation is close enough and takes half the time.

    Args:
        image: uint8 (H, W, C).
        shape: height and width wanted.

    Returns:
        uint8 (*shape, C).
    """
    height, width = shape
    if image.shape[0] * image.shape[1] <= _SHRINKS * height * width:
        resized = cv2.resize(image, (width, height), interpolation=cv2.INTER_LINEAR)
        return resized.reshape(height, width, image.shape[2])
    return _shrink(image, shape)


def _shrink(image: np.ndarray, shape: Shape) -> np.ndarray:
    """Resize with torch's filter, whose fast path takes 3 or 4 channels, interleaved."""
    channels = image.shape[2]
    if channels not in (3, 4):
        padded = np.pad(image, ((0, 0), (0, 0), (0, -channels % 4)))
        fours = [_shrink(padded[..., i : i + 4], shape) for i in range(0, channels, 4)]
        return np.ascontiguousarray(np.dstack(fours)[..., :channels])
    image = _contiguous(image)
    # (H, W, C) -> (1, C, H, W) with the strides that torch knows as channels-last
    pixels = torch.from_numpy(image).unsqueeze(0).permute(0, 3, 1, 2)
    resized = interpolate(pixels, size=shape, mode="bilinear", antialias=True)
    return np.ascontiguousarray(resized[0].permute(1, 2, 0).numpy())


def _contiguous(image: np.ndarray) -> np.ndarray:
    """Copy a crop to memory that the thread keeps for the next: fetching it takes as long."""
    if image.size > _KEPT_BYTES:
        return image.copy()
    if not hasattr(_memory, "bytes"):
        _memory.bytes = np.empty(_KEPT_BYTES, np.uint8)
    copy = _memory.bytes[: image.size].reshape(image.shape)
    np.copyto(copy, image)
    return copy
