"""Colour changes of a view, fused: brightness, contrast, saturation and grey become one blend.

All four map a pixel x of luma g(x) to a x + b g(x) + c, and so do any of them in a row. Only a
turn of the hue is not of that kind. What Pillow clips between two of them is not clipped here
unless that would show.
"""

import functools
import threading
from collections.abc import Callable, Sequence

import cv2
import numpy as np

ColourStep = tuple[str, float]  # a name of COLOUR_STEPS, and its factor

# Pillow cuts the fractions off after each step, which costs half a level on average.
_CUT_OFF = -0.5

# Mean of what may go beyond 0 or 255 between two steps before it is clipped as Pillow does.
_VISIBLE_EXCESS = 0.5


class _Canvas:
    """An image, and the blend that is still to be applied to it.

    Attributes:
        image: uint8 (H, W, C).
        ours: whether it may be written to.
        a, b, c: the blend a x + b g(x) + c of pixels x with luma g(x).
    """

    def __init__(self, image: np.ndarray):
        self.replace(image, ours=False)

    def replace(self, image: np.ndarray, ours: bool = True) -> None:
        self.image, self.ours = image, ours
        self.a, self.b, self.c = 1.0, 0.0, 0.0
        self._luma: np.ndarray | None = None
        self._sample: np.ndarray | None = None

    def luma(self) -> np.ndarray:
        """The luma of ``image``; where there are no three colours, all of its channels."""
        if self._luma is None:
            colour = self.image.shape[2] == 3
            self._luma = cv2.cvtColor(self.image, cv2.COLOR_RGB2GRAY) if colour else self.image
        return self._luma

    def apply(self) -> np.ndarray:
        """Apply the blend, clipped to 0 to 255, and return the image."""
        if (self.a, self.b, self.c) != (1.0, 0.0, 0.0):
            other = cv2.cvtColor(self.luma(), cv2.COLOR_GRAY2RGB) if self.b else self.image
            target = self.image if self.ours else None
            result = cv2.addWeighted(self.image, self.a, other, self.b, self.c, dst=target)
            self.replace(result.reshape(self.image.shape))  # OpenCV drops a single channel
        return self.image

    def apply_if_clipping_shows(self) -> None:
        """Apply the blend if values beyond 0 and 255 would come back with another step."""
        gain = self.a + self.b
        if gain <= 0 or (self.c >= -1 and gain * 255 + self.c <= 256):
            return
        if self._sample is None:
            sample = self.luma()[::8, ::8]
            self._sample = sample.reshape(len(sample), -1)
        # OpenCV's differences of bytes end at 0: they are what lies beyond.
        above = cv2.sumElems(cv2.subtract(self._sample, (255 - self.c) / gain))[0]
        below = cv2.sumElems(cv2.subtract(-self.c / gain, self._sample))[0]
        if gain * (above + below) > _VISIBLE_EXCESS * self._sample.size:
            self.apply()


def _change_brightness(canvas: _Canvas, factor: float) -> None:
    """y -> factor * y"""
    canvas.a, canvas.b, canvas.c = (factor * v for v in (canvas.a, canvas.b, canvas.c))
    canvas.c += _CUT_OFF


def _change_contrast(canvas: _Canvas, factor: float) -> None:
    """y -> factor * y + (1 - factor) * mean luma"""
    luma = canvas.luma()
    mean = cv2.sumElems(luma.reshape(len(luma), -1))[0] / luma.size
    mean = int((canvas.a + canvas.b) * mean + canvas.c + 0.5)  # a whole number in Pillow
    canvas.a, canvas.b, canvas.c = (factor * v for v in (canvas.a, canvas.b, canvas.c))
    canvas.c += (1 - factor) * mean + _CUT_OFF


def _change_saturation(canvas: _Canvas, factor: float) -> None:
    """y -> factor * y + (1 - factor) * g(y), where g(y) = (a + b) g(x) + c"""
    canvas.b += (1 - factor) * canvas.a
    canvas.a *= factor
    canvas.c += _CUT_OFF if factor else 0.0  # Pillow's conversion to grey rounds


def _turn_hue(canvas: _Canvas, turns: float) -> None:
    shift = int(turns * 255) % 256  # torchvision's rounding
    if shift:
        image = canvas.apply()
        canvas.replace(turn_hue(image, shift, image if canvas.ours else None))


# What a step does. All but brightness and contrast need three colours.
COLOUR_STEPS: dict[str, Callable[[_Canvas, float], None]] = {
    "brightness": _change_brightness,
    "contrast": _change_contrast,
    "saturation": _change_saturation,
    "hue": _turn_hue,
}

# The factor with which a step changes nothing.
UNCHANGED = {"brightness": 1.0, "contrast": 1.0, "saturation": 1.0, "hue": 0.0}


def apply_colour(image: np.ndarray, steps: Sequence[ColourStep]) -> np.ndarray:
    """Apply colour steps in their order, with the meaning they have in torchvision on Pillow.

    Args:
        image: uint8 (H, W, C), RGB where C = 3. It is not changed.
        steps: names of ``COLOUR_STEPS`` with factors: 1 keeps brightness, contrast and
            saturation, 0 keeps the hue, whose factor is in turns of the colour circle.
            Saturation and hue need C = 3.

    Returns:
        uint8 (H, W, C).
    """
    if not steps:
        return image
    canvas = _Canvas(image)
    for name, factor in steps:
        if factor != UNCHANGED[name]:
            canvas.apply_if_clipping_shows()
            COLOUR_STEPS[name](canvas, factor)
    return canvas.apply()


def _hue_weights() -> np.ndarray:
    """uint8 (3, 512): how much of the chroma R, G and B lack at each hue, twice around.

    The HSV model: channel = V - C max(0, min(k, 4 - k, 1)) with k = (n + hue in sixths) mod 6
    and n = 5, 3, 1 for red, green, blue.
    """
    sixths = np.arange(512) * (6 / 256)
    k = (np.array([[5], [3], [1]]) + sixths) % 6
    return np.rint(np.clip(np.minimum(k, 4 - k), 0, 1) * 255).astype(np.uint8)


_HUE_WEIGHTS = _hue_weights()


def turn_hue(image: np.ndarray, shift: int, target: np.ndarray | None = None) -> np.ndarray:
    """Turn the hue, HSV's value and saturation kept; faster than OpenCV's way back from HSV.

    Args:
        image: uint8 (H, W, 3), RGB.
        shift: 0 to 255, in 256ths of a turn.
        target: where to write to, of the same shape; it may be ``image``.

    Returns:
        uint8 (H, W, 3), RGB.
    """
    pixels, planes = _scratch(threading.get_ident(), image.shape[:2])
    hue, saturation, value, *lacking = planes
    cv2.cvtColor(image, cv2.COLOR_RGB2HSV_FULL, dst=pixels)
    cv2.split(pixels, [hue, saturation, value])
    chroma = cv2.multiply(saturation, value, dst=saturation, scale=1 / 255)
    for plane, weights in zip(lacking, _HUE_WEIGHTS, strict=True):
        cv2.LUT(hue, weights[shift : shift + 256], dst=plane)
        cv2.multiply(chroma, plane, dst=plane, scale=1 / 255)
        cv2.subtract(value, plane, dst=plane)
    return cv2.merge(lacking, dst=target)


@functools.lru_cache(maxsize=8)
def _scratch(thread: int, shape: tuple[int, int]) -> tuple[np.ndarray, list[np.ndarray]]:
    """Memory for the steps in between: fetching it anew takes as long as filling it."""
    return np.empty((*shape, 3), np.uint8), list(np.empty((6, *shape), np.uint8))
