"""Colour changes of a view, fused: brightness, contrast, saturation and grey become one blend.

All four map a pixel x of luma g(x) to a x + b g(x) + c, and so do any of them in a row. Only a
turn of the hue is not of that kind. What Pillow clips between two of them is not clipped here
unless that would show.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import cv2
import numpy as np

ColourStep = tuple[str, float]  # a name of COLOUR_STEPS, and its factor

# Pillow cuts the fractions off after each step, which costs half a level on average.
_CUT_OFF = -0.5

# Mean of what may go beyond 0 or 255 between two steps before it is clipped as Pillow does.
_VISIBLE_EXCESS = 0.5


@dataclass(frozen=True)
class Blend:
    """The map x -> image * x + luma * g(x) + offset, where g(x) is the luma of pixel x."""

    image: float = 1.0
    luma: float = 0.0
    offset: float = 0.0

    def scaled(self, factor: float, offset: float) -> "Blend":
        """This map, then y -> factor * y + offset."""
        return Blend(self.image * factor, self.luma * factor, self.offset * factor + offset)

    def desaturated(self, factor: float, offset: float) -> "Blend":
        """This map, then y -> factor * y + (1 - factor) * g(y) + offset."""
        luma = self.luma * factor + (self.image + self.luma) * (1 - factor)
        return Blend(self.image * factor, luma, self.offset + offset)

    def of_luma(self, luma):
        """The luma of the result where that of the image is ``luma``."""
        return (self.image + self.luma) * luma + self.offset


class _Canvas:
    """An image and the blend that is still to be applied to it."""

    def __init__(self, image: np.ndarray):
        self._image = image
        self._blend = Blend()
        self._luma: np.ndarray | None = None

    def luma(self) -> np.ndarray:
        """The luma of the stored image; where there are no three colours, all of its channels."""
        if self._luma is None:
            colour = self._image.shape[2] == 3
            self._luma = cv2.cvtColor(self._image, cv2.COLOR_RGB2GRAY) if colour else self._image
        return self._luma

    def change_brightness(self, factor: float) -> None:
        self._clip_if_seen()
        self._blend = self._blend.scaled(factor, _CUT_OFF)

    def change_contrast(self, factor: float) -> None:
        self._clip_if_seen()
        luma = self.luma()
        mean = cv2.sumElems(luma.reshape(len(luma), -1))[0] / luma.size
        mean = int(self._blend.of_luma(mean) + 0.5)  # a whole number in Pillow
        self._blend = self._blend.scaled(factor, (1 - factor) * mean + _CUT_OFF)

    def change_saturation(self, factor: float) -> None:
        self._clip_if_seen()
        self._blend = self._blend.desaturated(factor, _CUT_OFF if factor else 0.0)

    def turn_hue(self, turns: float) -> None:
        shift = int(turns * 255) % 256  # torchvision's rounding
        if shift:
            self._image, self._blend, self._luma = turn_hue(self.result(), shift), Blend(), None

    def result(self) -> np.ndarray:
        """The image with the blend applied and clipped to 0 to 255."""
        image, blend = self._image, self._blend
        if blend == Blend():
            return image
        other = image
        if blend.luma:
            other = cv2.cvtColor(self.luma(), cv2.COLOR_GRAY2RGB)
        result = cv2.addWeighted(image, blend.image, other, blend.luma, blend.offset)
        return result.reshape(image.shape)  # OpenCV drops a single channel

    def _clip_if_seen(self) -> None:
        black, white = self._blend.of_luma(0.0), self._blend.of_luma(255.0)
        if min(black, white) >= -1 and max(black, white) <= 256:
            return
        values = self._blend.of_luma(self.luma()[4::8, 4::8].astype(np.float32))
        if cv2.norm(values, np.clip(values, 0, 255), cv2.NORM_L1) > _VISIBLE_EXCESS * values.size:
            self._image, self._blend, self._luma = self.result(), Blend(), None


# What a step does. All but brightness and contrast need three colours.
COLOUR_STEPS: dict[str, Callable[[_Canvas, float], None]] = {
    "brightness": _Canvas.change_brightness,
    "contrast": _Canvas.change_contrast,
    "saturation": _Canvas.change_saturation,
    "hue": _Canvas.turn_hue,
}

# The factor with which a step changes nothing.
UNCHANGED = {"brightness": 1.0, "contrast": 1.0, "saturation": 1.0, "hue": 0.0}


def apply_colour(image: np.ndarray, steps: Iterable[ColourStep]) -> np.ndarray:
    """Apply colour steps in their order, with the meaning they have in torchvision on Pillow.

    Args:
        image: uint8 (H, W, C), RGB where C = 3. It is not changed.
        steps: names of ``COLOUR_STEPS`` with factors: 1 keeps brightness, contrast and
            saturation, 0 keeps the hue, whose factor is in turns of the colour circle.
            Saturation and hue need C = 3.

    Returns:
        uint8 (H, W, C).
    """
    canvas = _Canvas(image)
    for name, factor in steps:
        if factor != UNCHANGED[name]:
            COLOUR_STEPS[name](canvas, factor)
    return canvas.result()


def _hue_weights() -> np.ndarray:
    """uint8 (3, 512): how much of the chroma R, G and B lack at each hue, twice around.

    The HSV model: channel = V - C max(0, min(k, 4 - k, 1)) with k = (n + hue in sixths) mod 6
    and n = 5, 3, 1 for red, green, blue.
    """
    sixths = np.arange(512) * (6 / 256)
    k = (np.array([[5], [3], [1]]) + sixths) % 6
    return np.rint(np.clip(np.minimum(k, 4 - k), 0, 1) * 255).astype(np.uint8)


_HUE_WEIGHTS = _hue_weights()


def turn_hue(image: np.ndarray, shift: int) -> np.ndarray:
    """Turn the hue, HSV's value and saturation kept; faster than OpenCV's way back from HSV.

    Args:
        image: uint8 (H, W, 3), RGB.
        shift: 0 to 255, in 256ths of a turn.

    Returns:
        uint8 (H, W, 3), RGB.
    """
    hue, saturation, value = cv2.split(cv2.cvtColor(image, cv2.COLOR_RGB2HSV_FULL))
    chroma = cv2.multiply(saturation, value, scale=1 / 255)
    lacking = (cv2.LUT(hue, weights[shift : shift + 256]) for weights in _HUE_WEIGHTS)
    return cv2.merge(
        [cv2.subtract(value, cv2.multiply(chroma, share, scale=1 / 255)) for share in lacking]
    )
