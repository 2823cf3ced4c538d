"""Photographs to measure on: those of scikit-image, cut and scaled to ImageNet's usual size."""

import os

import numpy as np
from PIL import Image

from moco_d2.errors import UserError

PHOTOS = (
    *("astronaut.png", "chelsea.png", "coffee.png", "rocket.jpg"),
    *("motorcycle_left.png", "motorcycle_right.png", "ihc.png", "hubble_deep_field.jpg"),
)
_QUALITY = 92


def write_photographs(folder: str, *, count: int, size: tuple[int, int] = (500, 375)) -> list[str]:
    """Write JPEGs of real photographs.

    Args:
        folder: where to.
        count: how many; parts of the photographs at several scales, none twice.
        size: width and height.

    Returns:
        their paths.

    Raises:
        UserError: scikit-image, which brings the photographs, is not installed.
    """
    try:
        import skimage.data
    except ImportError:
        raise UserError(
            "Photographs to measure on come with scikit-image: pip install scikit-image, or name "
            "a folder of your own with --images."
        ) from None
    rng = np.random.default_rng(0)
    root = os.path.dirname(skimage.data.__file__)
    paths = []
    for number in range(count):
        with Image.open(os.path.join(root, PHOTOS[number % len(PHOTOS)])) as photo:
            photo = photo.convert("RGB")
        scale = min(photo.width / size[0], photo.height / size[1]) * rng.uniform(0.7, 1.0)
        width, height = size[0] * scale, size[1] * scale
        left, top = rng.uniform(0, photo.width - width), rng.uniform(0, photo.height - height)
        box = (left, top, left + width, top + height)
        part = photo.resize(size, Image.Resampling.LANCZOS, box)
        paths.append(os.path.join(folder, f"{number:04d}.jpg"))
        part.save(paths[-1], quality=_QUALITY)
    return paths
