"""The pictures of the built-in data set with their exact annotations: objects and scenes."""

import math
from dataclasses import dataclass

import numpy as np

from moco_d2.data.synthetic.drawing import (
    draw_background,
    draw_clutter_,
    draw_object_,
    finish_image,
)

OBJECT_SIDE = 64  # pixels
SCENE_SIDE = 128  # pixels

# Label of pixels that no class is scored on: objects of which too little can be seen.
IGNORE_LABEL = 255
# An object with fewer visible pixels is not annotated.
MIN_VISIBLE_PIXELS = 40
_MAX_OBJECTS = 5


@dataclass(frozen=True)
class Instance:
    """One annotated thing.

    Attributes:
        label: index into the set's classes.
        mask: bool (H, W), the pixels where it is seen; masks of a picture never overlap.
        keypoints: int64 (num_keypoints, 3) of x, y and COCO's visibility, or None.
    """

    label: int
    mask: np.ndarray
    keypoints: np.ndarray | None = None


@dataclass(frozen=True)
class Picture:
    """An image and all that is known of it.

    Attributes:
        image: uint8 (H, W, 3), RGB.
        label: class of the picture as a whole, for object-centric pictures; else None.
        instances: what is annotated in it.
        semantic: uint8 (H, W); 0 is background, 1 + label the things, 255 is ignored. None for
            object-centric pictures.
    """

    image: np.ndarray
    label: int | None = None
    instances: tuple[Instance, ...] = ()
    semantic: np.ndarray | None = None


def render_object(number: int, classes: tuple[str, ...], rng: np.random.Generator) -> Picture:
    """One object near the middle of a 64 px image; classes take turns with the number."""
    side, label = OBJECT_SIDE, (number - 1) % len(classes)
    image = draw_background(side, (4, 18), rng)
    draw_clutter_(image, int(rng.integers(0, 3)), rng)
    radius = rng.uniform(0.34, 0.48) * side
    shift = 0.8 * max(2.0, side / 2 - 0.9 * radius)
    x, y = (side / 2 + rng.uniform(-shift, shift, 2)).tolist()
    draw_object_(image, classes[label], (x, y), radius, rng)
    return Picture(finish_image(image, rng), label=label)


def render_scene(number: int, classes: tuple[str, ...], rng: np.random.Generator) -> Picture:
    """One to five objects, which may cover each other a little, in a cluttered 128 px image.

    The first object's class takes turns with the number, so that a set of few pictures shows
    every class; the others are random.
    """
    side = SCENE_SIDE
    image = draw_background(side, (8, 35), rng)
    draw_clutter_(image, int(rng.integers(3, 10)), rng)
    count = int(rng.integers(1, _MAX_OBJECTS + 1))
    labels = rng.integers(len(classes), size=count)
    labels[0] = (number - 1) % len(classes)

    owner = np.full((side, side), -1)  # the object seen at each pixel, -1 background
    circles = _scatter_circles(count, rng)
    for i, (x, y, radius) in enumerate(circles):
        window, inside = draw_object_(image, classes[labels[i]], (x, y), radius, rng)
        owner[window][inside] = i
    instances = [Instance(int(labels[i]), owner == i) for i in range(len(circles))]
    return annotate(finish_image(image, rng), instances)


def annotate(image: np.ndarray, instances: list[Instance]) -> Picture:
    """Keep the instances of which enough is seen, and derive the semantic labels of all."""
    semantic = np.zeros(image.shape[:2], np.uint8)
    kept = []
    for instance in instances:
        if np.count_nonzero(instance.mask) >= MIN_VISIBLE_PIXELS:
            kept.append(instance)
            semantic[instance.mask] = 1 + instance.label
        else:
            semantic[instance.mask] = IGNORE_LABEL
    return Picture(image, instances=tuple(kept), semantic=semantic)


def _scatter_circles(count: int, rng: np.random.Generator) -> list[tuple[float, float, float]]:
    """Up to ``count`` circles (x, y, radius) that overlap by a fifth of their radii at most."""
    circles: list[tuple[float, float, float]] = []
    for _ in range(count):
        for _attempt in range(30):
            radius = rng.uniform(12, 30)
            x, y = rng.uniform(0.8 * radius, SCENE_SIDE - 0.8 * radius, 2).tolist()
            if all(math.hypot(x - a, y - b) > 0.8 * (radius + r) for a, b, r in circles):
                circles.append((x, y, radius))
                break
    return circles
