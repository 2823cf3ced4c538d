"""Image files of any common kind to upright uint8 arrays; what cannot be read says why."""

import io
import warnings
from collections.abc import Callable, Sequence

import cv2
import numpy as np
from detectron2.utils.file_io import PathManager
from PIL import Image, ImageOps, UnidentifiedImageError

from moco_d2.data.image_headers import is_plain, stored_shape
from moco_d2.data.pixels import (
    PixelFormat,
    UnreadableImage,
    Unsuitable,
    check_size,
    to_bytes_or_words,
    to_pixel_format,
)

_SILENT = 0  # OpenCV's log level
_ALPHA_MODES = ("RGBA", "RGBa", "LA", "La", "PA")
_TIFF_BITS, _TIFF_PHOTOMETRIC, _TIFF_RGB = 258, 262, 2
_CAN_BE_DEEP = (b"\x89PNG", b"II*\0", b"MM\0*", b"\x93NUMPY")
_DEEP_PNG = b"\x10"  # 16 in the byte for the bit depth

_DECODES_TO_RGB = hasattr(cv2, "IMREAD_COLOR_RGB")  # since OpenCV 4.11
_RGB = cv2.IMREAD_COLOR_RGB if _DECODES_TO_RGB else cv2.IMREAD_COLOR

# 1 / factor of the size -> how OpenCV decodes to it, in colour and in grey. A JPEG takes less
# time the smaller it is decoded.
_REDUCED = {
    1: (_RGB, cv2.IMREAD_GRAYSCALE),
    2: (_RGB | cv2.IMREAD_REDUCED_COLOR_2, cv2.IMREAD_REDUCED_GRAYSCALE_2),
    4: (_RGB | cv2.IMREAD_REDUCED_COLOR_4, cv2.IMREAD_REDUCED_GRAYSCALE_4),
    8: (_RGB | cv2.IMREAD_REDUCED_COLOR_8, cv2.IMREAD_REDUCED_GRAYSCALE_8),
}
REDUCTIONS = tuple(sorted(_REDUCED, reverse=True))


def read_bytes(path: str) -> bytes:
    """Return the content of a local file, or of whatever detectron2's PathManager opens.

    Raises:
        UnreadableImage: missing or not permitted.
    """
    try:
        if "://" in path:
            with PathManager.open(path, "rb") as file:
                return file.read()
        with open(path, "rb", buffering=0) as file:  # PathManager takes longer than reading does
            return file.read()
    except OSError as error:
        raise UnreadableImage(path, (error.strerror or str(error)).lower()) from error


def read_image(path: str, pixels: PixelFormat | Sequence[float]) -> np.ndarray:
    """Read and decode an image file; see :func:`decode_image`.

    Args:
        pixels: the format, or its mean alone.
    """
    if not isinstance(pixels, PixelFormat):
        pixels = PixelFormat(tuple(pixels))
    return decode_image(read_bytes(path), path, pixels)


def decode_image(data: bytes, path: str, pixels: PixelFormat, factor: int = 1) -> np.ndarray:
    """Decode an image file, upright by its EXIF orientation.

    Grayscale, palette, 1 bit and CMYK become RGB, or grey where ``pixels`` has one channel, and
    16 bits become 8. Other numbers of channels must be those of the file.

    Args:
        data: JPEG, PNG, WebP, BMP, GIF (its first frame), TIFF or NumPy's ``.npy``, told by
            content, not by name.
        path: what to call it in errors.
        pixels: what is wanted.
        factor: one of ``REDUCTIONS``: the image at 1 / factor of its size, rounded up. For JPEG
            in colour or grey only.

    Returns:
        uint8 (H, W, C), RGB where C = 3, contiguous.

    Raises:
        UnreadableImage: empty, truncated, not an image, too large, or of other channels.
    """
    if not data:
        raise UnreadableImage(path, "the file is empty")
    shape = stored_shape(data)
    if shape is not None:
        check_size(path, shape, pixels)
    if pixels.channels in (1, 3) and is_plain(data):
        image = _decode_plain(data, pixels.channels, factor)
        if image is not None:
            return image
    image = _explained(path, lambda: to_pixel_format(_decode_any(data, path, pixels), path, pixels))
    return image if factor == 1 else _reduce(image, factor)


def _reduce(image: np.ndarray, factor: int) -> np.ndarray:
    """Average squares of pixels as a JPEG decoder does; the last ones may reach beyond the edge."""
    height, width = (-(-side // factor) for side in image.shape[:2])
    below, right = height * factor - image.shape[0], width * factor - image.shape[1]
    padded = cv2.copyMakeBorder(image, 0, below, 0, right, cv2.BORDER_REPLICATE)
    reduced = cv2.resize(padded, (width, height), interpolation=cv2.INTER_AREA)
    return reduced.reshape(height, width, image.shape[2])


def decode_stored(data: bytes, path: str, pixels: PixelFormat) -> np.ndarray:
    """Decode an image file, but leave 16 bits as they are stored.

    Returns:
        of 16-bit files what they hold, uint16 (H, W, K); of others uint8 (H, W, K), where K is
        that of ``pixels`` or of the file.

    Raises:
        UnreadableImage: as :func:`decode_image`.
    """
    if not data:
        raise UnreadableImage(path, "the file is empty")
    if is_plain(data) or not data.startswith(_CAN_BE_DEEP):
        return decode_image(data, path, pixels)
    return _explained(
        path, lambda: to_bytes_or_words(_decode_any(data, path, pixels), path, pixels)
    )


def _explained(path: str, decode: Callable[[], np.ndarray]) -> np.ndarray:
    """Call a decoder, and turn whatever it raises into the reason."""
    try:
        return decode()
    except UnreadableImage:
        raise
    # Decoders of damaged data raise anything: SyntaxError, struct.error, IndexError, ...
    except Exception as error:
        raise UnreadableImage(path, _reason(error)) from error


def _decode_plain(data: bytes, channels: int, factor: int) -> np.ndarray | None:
    """Decode with OpenCV, several times faster than Pillow; None when it cannot."""
    level = cv2.getLogLevel()
    cv2.setLogLevel(_SILENT)
    try:
        image = cv2.imdecode(np.frombuffer(data, np.uint8), _REDUCED[factor][channels == 1])
    except cv2.error:
        return None
    finally:
        cv2.setLogLevel(level)
    if image is None:
        return None
    if channels == 1:
        return image[..., None]
    return image if _DECODES_TO_RGB else cv2.cvtColor(image, cv2.COLOR_BGR2RGB, dst=image)


def _decode_any(data: bytes, path: str, pixels: PixelFormat) -> np.ndarray:
    """Decode to what is stored, where only :func:`to_pixel_format` makes of it what is wanted."""
    if data.startswith(b"\x93NUMPY"):
        array = np.load(io.BytesIO(data), allow_pickle=False)
        if array.ndim == 3 and array.shape[2] != pixels.channels == array.shape[0]:
            array = array.transpose(1, 2, 0)
        return array
    if data.startswith(b"\x89PNG") and data[24:25] == _DEEP_PNG:
        return _decode_unchanged(data)
    if data[:4] in (b"II*\0", b"MM\0*"):
        return _decode_tiff(data, path, pixels)
    return _decode_with_pillow(data, path, pixels)


def _decode_tiff(data: bytes, path: str, pixels: PixelFormat) -> np.ndarray:
    """Pillow knows neither 16 bits in colour nor bands that are no colours; OpenCV knows the
    former, tifffile both."""
    try:
        with Image.open(io.BytesIO(data)) as image:
            check_size(path, (image.height, image.width), pixels)
            bits = image.tag_v2.get(_TIFF_BITS, (1,))
            colour = image.tag_v2.get(_TIFF_PHOTOMETRIC) == _TIFF_RGB
    except UnidentifiedImageError:
        return _read_with_tifffile(data, path, pixels)
    if len(bits) == 1 or (max(bits) <= 8 and pixels.channels in (1, 3)):
        return _decode_with_pillow(data, path, pixels)
    if colour and len(bits) in (3, 4):
        return _decode_unchanged(data)
    return _read_with_tifffile(data, path, pixels)


def _decode_unchanged(data: bytes) -> np.ndarray:
    """Decode with OpenCV to what is stored, (H, W) or (H, W, C), in RGB order."""
    image = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_UNCHANGED)
    if image is None:
        raise cv2.error("OpenCV cannot decode it: damaged or truncated")
    order = {3: [2, 1, 0], 4: [2, 1, 0, 3]}.get(image.shape[2] if image.ndim == 3 else 1)
    return image if order is None else image[..., order]


def _read_with_tifffile(data: bytes, path: str, pixels: PixelFormat) -> np.ndarray:
    try:
        import tifffile
    except ImportError:
        raise Unsuitable("a TIFF of this kind needs the package tifffile") from None
    try:
        with tifffile.TiffFile(io.BytesIO(data)) as file:
            page = file.pages.first
            check_size(path, (page.imagelength, page.imagewidth), pixels)
            image = page.asarray()
            planes = page.planarconfig == tifffile.PLANARCONFIG.SEPARATE
    except tifffile.TiffFileError as error:
        raise UnidentifiedImageError from error
    return np.moveaxis(image, 0, -1) if planes and image.ndim == 3 else image


def _decode_with_pillow(data: bytes, path: str, pixels: PixelFormat) -> np.ndarray:
    """Decode with Pillow, which handles every common kind and raises on what is damaged."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None  # ours is checked below
        try:
            image = Image.open(io.BytesIO(data))
        finally:
            Image.MAX_IMAGE_PIXELS = limit
        with image:
            check_size(path, (image.height, image.width), pixels)
            image.load()
            image = ImageOps.exif_transpose(image)
            if image.mode == "F":
                raise Unsuitable("its pixels are floating point numbers")
            if image.mode.startswith("I") or pixels.channels not in (1, 3):
                return np.asarray(image)
            if "transparency" in image.info or image.mode in _ALPHA_MODES:
                mean = (pixels.mean * 3)[:3]
                ground = Image.new("RGBA", image.size, (*map(round, mean), 255))
                image = Image.alpha_composite(ground, image.convert("RGBA"))
            image = np.array(image.convert("RGB" if pixels.channels == 3 else "L"))
            return image.reshape(*image.shape[:2], pixels.channels)


def _reason(error: Exception) -> str:
    if isinstance(error, UnidentifiedImageError):
        return "not an image, or of an unknown format"
    if isinstance(error, Unsuitable):
        return str(error)
    text = str(error) or type(error).__name__
    return f"damaged or truncated ({text})" if "truncat" not in text else text
