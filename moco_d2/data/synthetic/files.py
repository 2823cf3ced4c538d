"""Writes the files of a data set; folders are made when they are first needed."""

import io
from pathlib import Path

import cv2
import numpy as np
from PIL import Image

# VOC wants JPEG. With full colour resolution, since the textures are a few pixels fine.
_JPEG_SETTINGS = [
    cv2.IMWRITE_JPEG_QUALITY,
    98,
    cv2.IMWRITE_JPEG_SAMPLING_FACTOR,
    cv2.IMWRITE_JPEG_SAMPLING_FACTOR_444,
]


def write_image(path: Path, image: np.ndarray) -> None:
    """Encode labels, uint8 or uint16 (H, W), or colours, uint8 (H, W, 3), RGB, as the name says."""
    stored = image[..., ::-1] if image.ndim == 3 else image  # OpenCV takes BGR
    settings = _JPEG_SETTINGS if path.suffix == ".jpg" else []
    _, code = cv2.imencode(path.suffix, stored, settings)
    write_bytes(path, code.tobytes())


def write_palette_image(path: Path, labels: np.ndarray, palette: np.ndarray) -> None:
    """Encode labels, uint8 (H, W), as a PNG that shows them in colours, uint8 (256, 3), RGB."""
    image = Image.fromarray(labels, "L")
    image.putpalette(palette.tobytes())
    code = io.BytesIO()
    image.save(code, "PNG")
    write_bytes(path, code.getvalue())


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
