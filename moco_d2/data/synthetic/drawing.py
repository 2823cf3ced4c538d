"""Draws on a float32 image: soft noise, clutter, textured shapes; then light and sensor noise."""

import math

import cv2
import numpy as np

from moco_d2.data.synthetic.shapes import SHAPES, TEXTURES

_LUMINANCE = np.array([0.3, 0.59, 0.11])
# Two colours of one object differ by at least so many levels of luminance.
_MIN_CONTRAST = 70.0
# The channels of the background's noise: 0.4 parts of their own, 0.6 parts of a common grey, which
# is their mean with its loss of spread made up for.
_NOISE_MIXING = 0.4 * np.eye(3) + 0.6 * 1.7 * np.full((3, 3), 1 / 3)


def draw_background(side: int, amplitude: tuple[float, float], rng: np.random.Generator):
    """Soft coloured noise: octaves of random grids, each finer and weaker than the one before.

    Args:
        side: height and width of the image in pixels.
        amplitude: range that the strength of the coarsest octave is drawn from, in grey levels.
        rng: source of all random numbers.

    Returns:
        float32 (side, side, 3), RGB, about 0 to 255 (values outside are clipped at the end).
    """
    image = np.empty((side, side, 3), np.float32)
    image[:] = rng.uniform(40, 215, 3)
    strength, decay = rng.uniform(*amplitude), rng.uniform(0.45, 0.75)
    cells = 2
    while cells <= side // 2:
        noise = rng.standard_normal((cells + 1, cells + 1, 3), np.float32)
        octave = cv2.transform(noise, strength * _NOISE_MIXING)
        image += cv2.resize(octave, (side, side), interpolation=cv2.INTER_CUBIC)
        strength, cells = strength * decay, cells * 2
    return image


def _draw_line(layer, position, colour, rng):
    direction = rng.normal(0, 1, 2)
    direction /= np.linalg.norm(direction) + 1e-6
    end = position + rng.uniform(8, 40) * direction
    thickness = int(rng.integers(1, 4))
    cv2.line(layer, position.astype(int).tolist(), end.astype(int).tolist(), colour, thickness)


def _draw_ellipse(layer, position, colour, rng):
    axes = (int(rng.integers(3, 12)), int(rng.integers(2, 6)))
    angle = rng.uniform(0, 180)
    cv2.ellipse(layer, position.astype(int).tolist(), axes, angle, 0, 360, colour, cv2.FILLED)


def _draw_polygon(layer, position, colour, rng):
    corners = position + rng.normal(0, 7, (int(rng.integers(3, 6)), 2))
    cv2.fillPoly(layer, [corners.astype(np.int32)], colour)


_CLUTTER = (_draw_line, _draw_ellipse, _draw_polygon)


def draw_clutter_(image: np.ndarray, count: int, rng: np.random.Generator) -> None:
    """Blend ``count`` small translucent lines, ellipses and polygons into ``image``, in place."""
    height, width = image.shape[:2]
    for _ in range(count):
        layer = image.copy()
        colour = rng.uniform(0, 255, 3).tolist()
        draw = _CLUTTER[rng.integers(len(_CLUTTER))]
        draw(layer, rng.uniform(0, 1, 2) * (width, height), colour, rng)
        opacity = rng.uniform(0.3, 0.8)
        cv2.addWeighted(layer, opacity, image, 1 - opacity, 0, dst=image)


def contrasting_colours(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Two random colours, float32 (3,), whose luminances differ clearly."""
    while True:
        first, second = rng.uniform(0, 255, (2, 3))
        if abs((first - second) @ _LUMINANCE) > _MIN_CONTRAST:
            return first.astype(np.float32), second.astype(np.float32)


def light_gradient(x: np.ndarray, y: np.ndarray, strongest: float, rng: np.random.Generator):
    """Light that grows linearly in a random direction: a factor per pixel, float32 (H, W, 1).

    Args:
        x, y: coordinates that broadcast to (H, W); the factor is 1 where both are 0.
        strongest: the change of the factor over one unit of length is drawn from [0, strongest].
    """
    angle, slope = rng.uniform(0, 2 * math.pi), rng.uniform(0, strongest)
    return (1 + slope * (x * math.cos(angle) + y * math.sin(angle)))[..., None]


def blend_(image: np.ndarray, colour: np.ndarray, alpha: np.ndarray) -> None:
    """Cover ``image`` with ``colour`` by the shares ``alpha``, float32 (H, W, 1), in place."""
    image += alpha * (colour - image)


def pixel_grid(x: slice, y: slice, centre: tuple[float, float]) -> tuple[np.ndarray, np.ndarray]:
    """Offsets of the pixels in two slices from a centre: float32 (1, W) and (H, 1)."""
    columns = np.arange(x.start, x.stop, dtype=np.float32) - np.float32(centre[0])
    rows = np.arange(y.start, y.stop, dtype=np.float32) - np.float32(centre[1])
    return columns[None, :], rows[:, None]


def draw_object_(
    image: np.ndarray,
    class_name: str,
    centre: tuple[float, float],
    radius: float,
    rng: np.random.Generator,
) -> tuple[tuple[slice, slice], np.ndarray]:
    """Draw one object with random colours, rotation, aspect, texture phase and light, in place.

    Args:
        image: float32 (H, W, 3).
        class_name: "texture_shape".
        centre: x and y in pixels, where whole numbers are the centres of pixels; the object may
            leave the image, even wholly.
        radius: in pixels; the shapes fill most of the circle.
        rng: source of all random numbers.

    Returns:
        The window (rows, columns) of the image that was drawn on, and the object's mask in it,
        bool of the window's size.
    """
    texture, shape = class_name.split("_")
    reach = int(1.35 * radius) + 2
    rows, columns = (
        slice(*np.clip([int(at) - reach, int(at) + reach + 1], 0, size).tolist())
        for at, size in zip(centre[::-1], image.shape[:2], strict=True)
    )
    x, y = pixel_grid(columns, rows, centre)
    angle, aspect = rng.uniform(0, 2 * math.pi), math.exp(rng.uniform(-0.18, 0.18))
    cos, sin = math.cos(angle), math.sin(angle)
    u = (x * cos + y * sin) / (radius * aspect)
    v = (y * cos - x * sin) / (radius / aspect)

    distance = SHAPES[shape](u, v) * radius
    coverage = np.clip(0.5 - distance, 0, 1)  # antialiased over one pixel
    frequency, phase = rng.uniform(1.3, 2.1), rng.uniform(0, 2 * math.pi)
    share = TEXTURES[texture](u, v, frequency, phase)[..., None]
    first, second = contrasting_colours(rng)
    colour = first * share + second * (1 - share)
    colour *= light_gradient(x / radius, y / radius, 0.35, rng)
    opacity = rng.uniform(0.9, 1.0)
    blend_(image[rows, columns], colour, (opacity * coverage)[..., None])
    return (rows, columns), coverage > 0.5


def finish_image(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Light, exposure and noise over the whole image; float32 in, uint8 (H, W, 3) out."""
    height, width = image.shape[:2]
    if rng.random() < 0.5:
        x = np.linspace(-1, 1, width, dtype=np.float32)[None, :]
        y = np.linspace(-1, 1, height, dtype=np.float32)[:, None]
        image = image * light_gradient(x, y, 0.25, rng)
    image = image * rng.uniform(0.75, 1.15)
    image += rng.uniform(1, 8) * rng.standard_normal(image.shape, np.float32)
    return np.clip(image, 0, 255).astype(np.uint8)
