"""Image files of any common kind to upright uint8 RGB; what cannot be read says why."""

import io
import struct
import warnings
from collections.abc import Sequence

import cv2
import numpy as np
from detectron2.utils.file_io import PathManager
from PIL import Image, ImageOps, UnidentifiedImageError

_SILENT = 0  # OpenCV's log level


class UnreadableImage(Exception):
    """An image file that cannot be read.

    Attributes:
        path: the file.
        reason: why, in a few words.
    """

    def __init__(self, path: str, reason: str):
        super().__init__(path, reason)
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


def read_image(path: str, pixel_mean: Sequence[float]) -> np.ndarray:
    """Read an image file as RGB, upright by its EXIF orientation.

    Grayscale, palette and CMYK become RGB, 16 bits become 8, and what is transparent shows the
    mean colour, which is zero once normalised.

    Args:
        path: JPEG, PNG, WebP, BMP or TIFF, told by content, not by name; a local file or whatever
            detectron2's PathManager opens.
        pixel_mean: 3 floats, RGB, 0 to 255.

    Returns:
        uint8 (H, W, 3), RGB, contiguous.

    Raises:
        UnreadableImage: missing, not permitted, empty, truncated or not an image.
    """
    try:
        with PathManager.open(path, "rb") as file:
            data = file.read()
    except OSError as error:
        raise UnreadableImage(path, (error.strerror or str(error)).lower()) from error
    if not data:
        raise UnreadableImage(path, "the file is empty")
    image = _decode_plain(data) if _is_plain(data) else None
    if image is not None:
        return image
    try:
        return _decode_any(data, pixel_mean)
    # Decoders of damaged data raise anything: SyntaxError, struct.error, IndexError, ...
    except Exception as error:
        raise UnreadableImage(path, _reason(error)) from error


def _is_plain_jpeg(data: bytes) -> bool:
    """Tell whether the scan data are closed by an end marker, and colours are not CMYK.

    Some versions of OpenCV fill what is missing with grey and say nothing. 0xFF bytes of the scan
    itself are escaped, so that the markers found are markers.
    """
    scan = data.rfind(b"\xff\xda")
    return data.rfind(b"\xff\xd9") > scan > 0 and not _has_four_channels(data)


def _has_four_channels(data: bytes) -> bool:
    """Read the number of channels from a JPEG's frame header."""
    at = 2
    while at + 9 < len(data) and data[at] == 0xFF:
        marker, length = struct.unpack_from(">BH", data, at + 1)
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            return data[at + 9] == 4
        at += 2 + length
    return False


def _is_plain_png(data: bytes) -> bool:
    """Tell whether a PNG is complete, opaque and needs no rotation."""
    opaque = data[25:26] in (b"\x00", b"\x02", b"\x03") and b"tRNS" not in data
    return opaque and b"IEND" in data[-64:] and b"eXIf" not in data


def _is_plain_webp(data: bytes) -> bool:
    """Tell whether a WebP is complete and of the simple kinds, lossy or lossless, opaque."""
    size = int.from_bytes(data[4:8], "little")
    if data[8:12] != b"WEBP" or len(data) < size + 8:
        return False
    # Lossless data flag their alpha in bit 28 after the signature byte.
    return data[12:16] == b"VP8 " or (data[12:16] == b"VP8L" and not data[24] & 0x10)


# First bytes of a format -> whether the file holds only what OpenCV decodes right and quietly.
_PLAIN = {
    b"\xff\xd8\xff": _is_plain_jpeg,
    b"\x89PNG": _is_plain_png,
    b"RIFF": _is_plain_webp,
}


def _is_plain(data: bytes) -> bool:
    return any(data.startswith(magic) and check(data) for magic, check in _PLAIN.items())


def _decode_plain(data: bytes) -> np.ndarray | None:
    """Decode with OpenCV, several times faster than Pillow; None when it cannot."""
    level = cv2.getLogLevel()
    cv2.setLogLevel(_SILENT)
    try:
        image = cv2.imdecode(np.frombuffer(data, dtype=np.uint8), cv2.IMREAD_COLOR)
    except cv2.error:
        return None
    finally:
        cv2.setLogLevel(level)
    return None if image is None else cv2.cvtColor(image, cv2.COLOR_BGR2RGB, dst=image)


def _decode_any(data: bytes, pixel_mean: Sequence[float]) -> np.ndarray:
    """Decode with Pillow, which handles every kind and raises on what is damaged."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Image.open(io.BytesIO(data)) as image:
            image.load()
            image = ImageOps.exif_transpose(image)
            if image.mode == "F":
                raise ValueError("its pixels are floating point numbers")
            if image.mode.startswith("I"):
                image = _sixteen_to_eight_bits(image)
            if "transparency" in image.info or image.mode in ("RGBA", "RGBa", "LA", "La", "PA"):
                mean = tuple(round(value) for value in pixel_mean)
                ground = Image.new("RGBA", image.size, (*mean, 255))
                image = Image.alpha_composite(ground, image.convert("RGBA"))
            return np.array(image.convert("RGB"))


def _sixteen_to_eight_bits(image: Image.Image) -> Image.Image:
    pixels = np.asarray(image)
    if pixels.min() < 0 or pixels.max() > 0xFFFF:
        raise ValueError("its pixels have more than 16 bits")
    return Image.fromarray((pixels >> 8).astype(np.uint8))


def _reason(error: Exception) -> str:
    if isinstance(error, UnidentifiedImageError):
        return "not an image, or of an unknown format"
    text = str(error) or type(error).__name__
    return f"damaged or truncated ({text})" if "truncat" not in text else text
