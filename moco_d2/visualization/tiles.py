"""Images of a data set as small RGB pictures side by side."""

from collections.abc import Sequence

import cv2
import numpy as np
from torch import Tensor

from moco_d2.data.image_io import decode_image
from moco_d2.data.index import ImageIndex
from moco_d2.data.pixels import PixelFormat

WHITE = 255


def original(index: ImageIndex, number: int, pixels: PixelFormat) -> np.ndarray:
    """Image `number` as it is stored, uint8 (H, W, 3), RGB.

    Raises:
        UnreadableImage: it cannot be read.
    """
    return _in_colour(decode_image(index.read(number), index.path(number), pixels))


def shown_view(view: Tensor, channels: str) -> np.ndarray:
    """A view, uint8 (C, H, W) in the order of `channels`, as uint8 (H, W, 3), RGB."""
    image = view.permute(1, 2, 0).numpy()
    return _in_colour(image[..., ::-1] if channels == "BGR" else image)


def _in_colour(image: np.ndarray) -> np.ndarray:
    """Of other than three channels, the first one as grey."""
    return image if image.shape[2] == 3 else np.repeat(image[..., :1], 3, axis=2)


def tile(image: np.ndarray, side: int) -> np.ndarray:
    """Scale an image to fit a square, centred on white."""
    scale = side / max(image.shape[:2])
    size = [max(1, round(s * scale)) for s in image.shape[1::-1]]
    method = cv2.INTER_AREA if scale < 1 else cv2.INTER_LINEAR
    image = cv2.resize(np.ascontiguousarray(image), size, interpolation=method)
    square = np.full((side, side, 3), WHITE, np.uint8)
    top, left = (side - image.shape[0]) // 2, (side - image.shape[1]) // 2
    square[top : top + image.shape[0], left : left + image.shape[1]] = image
    return square


def framed(image: np.ndarray, border: int, colour: Sequence[int] = (WHITE,) * 3) -> np.ndarray:
    """An image with so many pixels of a colour around it."""
    return cv2.copyMakeBorder(
        image, border, border, border, border, cv2.BORDER_CONSTANT, value=tuple(colour)
    )


def grid(tiles: Sequence[np.ndarray], columns: int) -> np.ndarray:
    """Tiles of one size in rows, the last one filled up with white."""
    missing = -len(tiles) % columns
    tiles = [*tiles, *[np.full_like(tiles[0], WHITE)] * missing]
    rows = [np.hstack(tiles[i : i + columns]) for i in range(0, len(tiles), columns)]
    return np.vstack(rows)


def write_picture(path: str, image: np.ndarray) -> None:
    """Write uint8 (H, W, 3), RGB.

    Raises:
        OSError: it cannot be written.
    """
    ok, data = cv2.imencode(".png", image[..., ::-1])
    assert ok
    with open(path, "wb") as f:
        f.write(data)
