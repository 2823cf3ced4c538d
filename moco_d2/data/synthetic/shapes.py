"""What the classes of the built-in data set are: shapes, textures and the pairs of them."""

import math
from collections.abc import Callable

import numpy as np

# Points of a star's outline: a tip, and the notch between two tips.
_STAR_HALF_ANGLE = math.pi / 5
_STAR_TIP = np.array([1.0, 0.0])
_STAR_NOTCH = 0.45 * np.array([math.cos(_STAR_HALF_ANGLE), math.sin(_STAR_HALF_ANGLE)])

# How steeply a wave turns into two colours: 0.5 is a soft sine, large values are hard edges.
_SHARPNESS = 2.0


def _length(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    return np.sqrt(u * u + v * v)


def _disk(u, v):
    return _length(u, v) - 0.85


def _square(u, v):
    return np.maximum(np.abs(u), np.abs(v)) - 0.75


def _triangle(u, v):
    # Three half planes whose normals are 120 degrees apart.
    slope = math.sqrt(0.75)
    sides = np.maximum(-0.5 * v + slope * u, -0.5 * v - slope * u)
    return np.maximum(v, sides) - 0.5


def _star(u, v):
    # Fold the plane onto one half of one arm, which is bounded by one straight edge.
    radius = _length(u, v)
    arm = 2 * _STAR_HALF_ANGLE
    angle = np.abs(np.mod(np.arctan2(v, u) + _STAR_HALF_ANGLE, arm) - _STAR_HALF_ANGLE)
    along = _STAR_NOTCH - _STAR_TIP
    normal_x, normal_y = (np.array([along[1], -along[0]]) / np.linalg.norm(along)).tolist()
    return (radius * np.cos(angle) - 1.0) * normal_x + radius * np.sin(angle) * normal_y


def _plus(u, v):
    u, v = np.abs(u), np.abs(v)
    return np.minimum(np.maximum(u - 0.92, v - 0.32), np.maximum(u - 0.32, v - 0.92))


def _crescent(u, v):
    return np.maximum(_length(u, v) - 0.92, 0.68 - _length(u - 0.45, v))


def _ring(u, v):
    return np.abs(_length(u, v) - 0.66) - 0.27


def _bar(u, v):
    return _length(np.maximum(np.abs(u) - 0.6, 0), v) - 0.37


# Each maps coordinates in units of the object's radius, float32 arrays of one shape, to the
# (approximate) distance to the outline in the same unit, negative inside.
SHAPES: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "disk": _disk,
    "square": _square,
    "triangle": _triangle,
    "star": _star,
    "plus": _plus,
    "crescent": _crescent,
    "ring": _ring,
    "bar": _bar,
}


def _two_tone(wave: np.ndarray) -> np.ndarray:
    return np.clip(0.5 + _SHARPNESS * wave, 0, 1)


def _stripes(u, v, frequency, phase):
    return _two_tone(np.sin(2 * math.pi * frequency * u + phase))


def _checker(u, v, frequency, phase):
    pitch = 1.5 * math.pi * frequency
    return _two_tone(2 * np.sin(pitch * u + phase) * np.sin(pitch * v + phase))


def _dots(u, v, frequency, phase):
    pitch = 1.9 * math.pi * frequency
    return _two_tone(np.cos(pitch * u + phase) + np.cos(pitch * v + phase) - 0.75)


def _plain(u, v, frequency, phase):
    return np.zeros_like(u)


def _radial(u, v, frequency, phase):
    return np.clip(1.1 * _length(u, v), 0, 1)


def _rings(u, v, frequency, phase):
    return _two_tone(np.sin(2.2 * math.pi * frequency * _length(u, v) + phase))


# Each maps coordinates as above, a frequency in cycles per radius and a phase in radians to the
# share of the object's first colour, in [0, 1].
TEXTURES: dict[str, Callable[[np.ndarray, np.ndarray, float, float], np.ndarray]] = {
    "stripes": _stripes,
    "checker": _checker,
    "dots": _dots,
    "plain": _plain,
    "radial": _radial,
    "rings": _rings,
}


def _pairs(step: int, num_shapes: int) -> list[str]:
    """Names of the classes that give shape i, i < num_shapes, the texture i + step."""
    shapes, textures = list(SHAPES), list(TEXTURES)
    return [f"{textures[(i + step) % len(textures)]}_{shapes[i]}" for i in range(num_shapes)]


# Class names are "texture_shape". They are sorted, so that a label is the same number whether it
# comes from our tables or from sorting the names of class folders.
PRETRAINING_CLASSES = tuple(sorted(_pairs(0, 8) + _pairs(2, 8)))
# Classes of the scenes: the pretraining classes of the first six shapes.
SCENE_CLASSES = tuple(sorted(_pairs(0, 6) + _pairs(2, 6)))
# Known shapes and known textures in pairs that pretraining never shows.
NOVEL_CLASSES = tuple(sorted(_pairs(1, 8) + _pairs(4, 4)))
