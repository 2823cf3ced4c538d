"""The single steps of a view, crop, colour, blur, flip, on uint8 RGB images with OpenCV.

An operation draws its parameters and applies them apart from each other, so that distributions
and pixels can each be compared with torchvision and Pillow, whose semantics these are.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import cv2
import numpy as np

Shape = tuple[int, int]  # height, width
Generator = np.random.Generator

_LUMA = np.array([0.299, 0.587, 0.114], dtype=np.float32)  # ITU-R 601, as Pillow's mode "L"
_LEVELS = np.arange(256, dtype=np.float32)


class Operation(Protocol):
    """One step of a view recipe."""

    def draw(self, rng: Generator, shape: Shape, size: int) -> Any:
        """Draw parameters for an image of ``shape`` (H, W) that becomes a view of side ``size``."""

    def apply(self, image: np.ndarray, params: Any) -> np.ndarray:
        """Return the image, uint8 (H, W, 3) RGB, changed by what was drawn; the input is kept."""


@dataclass(frozen=True)
class Sometimes:
    """Apply an operation with probability p. Its parameters are None where it is left out."""

    p: float
    operation: Operation

    def draw(self, rng: Generator, shape: Shape, size: int) -> Any:
        return self.operation.draw(rng, shape, size) if rng.random() < self.p else None

    def apply(self, image: np.ndarray, params: Any) -> np.ndarray:
        return image if params is None else self.operation.apply(image, params)


@dataclass(frozen=True)
class Crop:
    """A rectangle of the image, in pixels, and the side of the square it is resized to."""

    top: int
    left: int
    height: int
    width: int
    size: int


@dataclass(frozen=True)
class RandomResizedCrop:
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
            area = image_height * image_width * rng.uniform(*self.scale)
            ratio = math.exp(rng.uniform(*log_ratio))
            height, width = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
            if 0 < height <= image_height and 0 < width <= image_width:
                top = int(rng.integers(image_height - height + 1))
                left = int(rng.integers(image_width - width + 1))
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


@dataclass(frozen=True)
class CenterCrop:
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


@dataclass(frozen=True)
class ColorJitter:
    """Change brightness, contrast, saturation and hue, in random order.

    Args:
        brightness, contrast, saturation: factors are uniform in 1 - value to 1 + value.
        hue: the shift is uniform in -hue to hue, in turns of the colour circle.
    """

    brightness: float
    contrast: float
    saturation: float
    hue: float

    def draw(self, rng: Generator, shape: Shape, size: int) -> tuple[tuple[str, float], ...]:
        factors = [
            ("brightness", rng.uniform(max(0, 1 - self.brightness), 1 + self.brightness)),
            ("contrast", rng.uniform(max(0, 1 - self.contrast), 1 + self.contrast)),
            ("saturation", rng.uniform(max(0, 1 - self.saturation), 1 + self.saturation)),
            ("hue", rng.uniform(-self.hue, self.hue)),
        ]
        return tuple(factors[i] for i in rng.permutation(4))

    def apply(self, image: np.ndarray, params: tuple[tuple[str, float], ...]) -> np.ndarray:
        for name, factor in params:
            image = _ADJUST[name](image, factor)
        return image


@dataclass(frozen=True)
class Grayscale:
    """Replace the colours by their luma in all three channels."""

    def draw(self, rng: Generator, shape: Shape, size: int) -> tuple[()]:
        return ()

    def apply(self, image: np.ndarray, params: tuple[()]) -> np.ndarray:
        return cv2.cvtColor(cv2.cvtColor(image, cv2.COLOR_RGB2GRAY), cv2.COLOR_GRAY2RGB)


@dataclass(frozen=True)
class GaussianBlur:
    """Blur with a Gaussian.

    Args:
        sigma: range of the standard deviation in pixels, uniform.
        kernel_share: width of the kernel as a share of the view's side, the rest of the Gaussian
            is cut off; None: three standard deviations to each side.
    """

    sigma: tuple[float, float]
    kernel_share: float | None = None

    def draw(self, rng: Generator, shape: Shape, size: int) -> tuple[float, int]:
        sigma = rng.uniform(*self.sigma)
        if self.kernel_share is None:
            return sigma, 2 * math.ceil(3 * sigma) + 1
        return sigma, int(self.kernel_share * size) | 1

    def apply(self, image: np.ndarray, params: tuple[float, int]) -> np.ndarray:
        sigma, kernel = params
        return cv2.GaussianBlur(image, (kernel, kernel), sigma, borderType=cv2.BORDER_REPLICATE)


@dataclass(frozen=True)
class HorizontalFlip:
    """Mirror left and right."""

    def draw(self, rng: Generator, shape: Shape, size: int) -> tuple[()]:
        return ()

    def apply(self, image: np.ndarray, params: tuple[()]) -> np.ndarray:
        return cv2.flip(image, 1)


@dataclass(frozen=True)
class QuarterTurn:
    """Rotate by 0, 90, 180 or 270 degrees anticlockwise, each as likely."""

    def draw(self, rng: Generator, shape: Shape, size: int) -> int:
        return int(rng.integers(4))

    def apply(self, image: np.ndarray, params: int) -> np.ndarray:
        return np.ascontiguousarray(np.rot90(image, params))


def resize(image: np.ndarray, shape: Shape) -> np.ndarray:
    """Resize like Pillow's antialiased bilinear filter, a triangle as wide as two result pixels.

    The triangle is made of cheap parts where the image shrinks: an image of twice the size, a
    little smoothing where its pixels need it, and the mean of 2 x 2. That is nearer to Pillow than
    INTER_AREA, which is a box, and takes no longer.

    Args:
        image: uint8 (H, W, 3).
        shape: height and width wanted.

    Returns:
        uint8 (*shape, 3).
    """
    height, width = shape
    shrinkage = image.shape[0] * image.shape[1] / (height * width)
    if shrinkage < 1.25:
        return cv2.resize(image, (width, height), interpolation=cv2.INTER_LINEAR)
    sampling = cv2.INTER_LINEAR if shrinkage < 4 else cv2.INTER_AREA
    image = cv2.resize(image, (2 * width, 2 * height), interpolation=sampling)
    if shrinkage > 3:
        image = cv2.GaussianBlur(image, (3, 3), 0.6)  # [1 4 1] / 6
    return cv2.resize(image, (width, height), interpolation=cv2.INTER_AREA)


def _adjust_brightness(image: np.ndarray, factor: float) -> np.ndarray:
    return cv2.LUT(image, _table(_LEVELS * factor))


def _adjust_contrast(image: np.ndarray, factor: float) -> np.ndarray:
    mean = int(np.dot(cv2.mean(image)[:3], _LUMA) + 0.5)
    return cv2.LUT(image, _table(mean + (_LEVELS - mean) * factor))


def _adjust_saturation(image: np.ndarray, factor: float) -> np.ndarray:
    # Each channel moves along its distance from the luma, which is one 3 x 3 matrix.
    matrix = np.eye(3, dtype=np.float32) * factor + (1 - factor) * _LUMA
    return cv2.transform(image, matrix.astype(np.float32))


def _adjust_hue(image: np.ndarray, turns: float) -> np.ndarray:
    hsv = cv2.cvtColor(image, cv2.COLOR_RGB2HSV_FULL)  # hue in 256 steps of a turn
    hue = hsv[..., 0]
    hue += np.uint8(int(turns * 255) % 256)  # wraps around, as it should
    return cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB_FULL, dst=hsv)


def _table(levels: np.ndarray) -> np.ndarray:
    return np.clip(levels, 0, 255).astype(np.uint8)


_ADJUST: dict[str, Callable[[np.ndarray, float], np.ndarray]] = {
    "brightness": _adjust_brightness,
    "contrast": _adjust_contrast,
    "saturation": _adjust_saturation,
    "hue": _adjust_hue,
}
