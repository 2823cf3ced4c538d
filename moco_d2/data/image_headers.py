"""What the first bytes of an image file tell: whether OpenCV decodes it right, and its size."""

import io
import struct
from collections.abc import Iterator

from PIL import ExifTags, Image

Shape = tuple[int, int]  # height, width

# JPEG markers that start a frame header. The others of 0xC0 to 0xCF are tables.
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_SCAN = 0xDA
_MARKER = struct.Struct(">BBH")
_FRAME_HEADER = struct.Struct(">xHHB")  # height, width, number of channels
_SIDEWAYS = (5, 6, 7, 8)  # EXIF orientations that swap height and width


def is_plain(data: bytes) -> bool:
    """Tell whether a file is complete and holds only what OpenCV decodes right and quietly.

    Some versions of OpenCV fill what is missing with grey and say nothing.
    """
    return any(data.startswith(magic) and check(data) for magic, check in _PLAIN.items())


def stored_shape(data: bytes) -> Shape | None:
    """Return the height and width in the header of a JPEG or PNG, before any rotation; None where
    only a decoder can tell."""
    if data.startswith(b"\x89PNG") and len(data) >= 24:
        width, height = struct.unpack_from(">II", data, 16)
        return height, width
    frame, _ = _jpeg_layout(data)
    return frame[:2] if frame else None


def upright_jpeg_shape(data: bytes) -> Shape | None:
    """Return the height and width that decoding a JPEG gives, turned by its EXIF orientation; None
    if it is no JPEG."""
    frame, _ = _jpeg_layout(data)
    if frame is None:
        return None
    height, width, _ = frame
    if b"Exif" in data[: 1 << 16]:
        with Image.open(io.BytesIO(data)) as image:
            if image.getexif().get(ExifTags.Base.Orientation) in _SIDEWAYS:
                return width, height
    return height, width


def _jpeg_segments(data: bytes) -> Iterator[tuple[int, int]]:
    """Yield (marker, place of its content) up to the first scan."""
    at = 2
    while at + 4 <= len(data):
        prefix, marker, length = _MARKER.unpack_from(data, at)
        if prefix != 0xFF:
            return
        yield marker, at + 4
        if marker == _SCAN:
            return
        at += 2 + length


def _jpeg_layout(data: bytes) -> tuple[tuple[int, int, int] | None, int]:
    """Return the frame header (height, width, channels), and where the first scan begins or -1."""
    frame = None
    if not data.startswith(b"\xff\xd8\xff"):
        return frame, -1
    for marker, at in _jpeg_segments(data):
        if marker in _FRAMES and at + _FRAME_HEADER.size <= len(data):
            frame = _FRAME_HEADER.unpack_from(data, at)
        elif marker == _SCAN:
            return frame, at
    return frame, -1


def _is_plain_jpeg(data: bytes) -> bool:
    """Tell whether the scans are closed by an end marker, and colours are not CMYK.

    0xFF bytes of the scans themselves are escaped, so that the marker found is a marker.
    """
    frame, scan = _jpeg_layout(data)
    return frame is not None and frame[2] != 4 and scan > 0 and data.rfind(b"\xff\xd9", scan) > 0


def _is_plain_png(data: bytes) -> bool:
    """Tell whether a PNG is complete, of 8 bits at most, opaque, and needs no rotation."""
    opaque = data[25:26] in (b"\x00", b"\x02", b"\x03") and b"tRNS" not in data
    eight_bits = data[24:25] != b"\x10"
    return opaque and eight_bits and b"IEND" in data[-64:] and b"eXIf" not in data


def _is_plain_webp(data: bytes) -> bool:
    """Tell whether a WebP is complete and of the simple kinds, lossy or lossless, opaque."""
    size = int.from_bytes(data[4:8], "little")
    if data[8:12] != b"WEBP" or len(data) < size + 8:
        return False
    # Lossless data flag their alpha in bit 28 after the signature byte.
    return data[12:16] == b"VP8 " or (data[12:16] == b"VP8L" and not data[24] & 0x10)


# First bytes of a format -> whether OpenCV can be trusted with the file. No WebP exceeds 16383
# pixels a side, so that its size needs no look.
_PLAIN = {
    b"\xff\xd8\xff": _is_plain_jpeg,
    b"\x89PNG": _is_plain_png,
    b"RIFF": _is_plain_webp,
}
