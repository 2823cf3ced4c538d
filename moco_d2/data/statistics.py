"""What a data set is like: mean and std, sizes, what cannot be read, what is there twice."""

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import cv2
import numpy as np
from torch.utils.data import DataLoader

from moco_d2.data.image_io import decode_stored
from moco_d2.data.index import ImageIndex
from moco_d2.data.pixels import PixelFormat, UnreadableImage, to_channel_count
from moco_d2.errors import UserError

_CHUNK = 16  # images that a worker sums up before it sends anything
_TAILS = (0.001, 0.999)  # shares of 16-bit pixels that may lie below and above the range


@dataclass
class Statistics:
    """Sums over images, each of which counts the same, whatever its size.

    Attributes:
        levels: bits -> float (C, 2**bits): shares of the pixels of each value.
        shapes: (height, width) of each image read.
        unreadable: path -> reason.
        digests: hash of the file -> paths.
    """

    levels: dict[int, np.ndarray] = field(default_factory=dict)
    shapes: list[tuple[int, int]] = field(default_factory=list)
    unreadable: dict[str, str] = field(default_factory=dict)
    digests: dict[bytes, list[str]] = field(default_factory=lambda: defaultdict(list))

    def add(self, other: "Statistics") -> None:
        for bits, levels in other.levels.items():
            self.levels[bits] = self.levels.get(bits, 0) + levels
        self.shapes += other.shapes
        self.unreadable |= other.unreadable
        for digest, paths in other.digests.items():
            self.digests[digest] += paths

    @property
    def duplicates(self) -> list[list[str]]:
        """Groups of files of the same content."""
        return [paths for paths in self.digests.values() if len(paths) > 1]

    def deep_range(self) -> tuple[int, int] | None:
        """Values of 16-bit images below and above which 0.1 % of the pixels lie; None without
        such images."""
        if 16 not in self.levels:
            return None
        shares = self.levels[16].sum(axis=0).cumsum()
        low, high = np.searchsorted(shares, np.array(_TAILS) * shares[-1]).tolist()
        return low, max(high, low + 1)

    def mean_and_std(self) -> tuple[np.ndarray, np.ndarray]:
        """Of the pixels as the loader reads them, float (C,) each, 0 to 255."""
        total = np.zeros((len(next(iter(self.levels.values()))), 256))
        for bits, levels in self.levels.items():
            table = np.arange(256)
            if bits == 16:
                table = PixelFormat((0.0,), self.deep_range()).deep_table
            for shares, summed in zip(levels, total, strict=True):
                summed += np.bincount(table, weights=shares, minlength=256)
        total /= total.sum(axis=1, keepdims=True)
        mean = total @ np.arange(256)
        return mean, np.sqrt(total @ np.arange(256) ** 2 - mean**2)


class _Chunks:
    """The images of an index in chunks, as a data set of a DataLoader."""

    def __init__(self, index: ImageIndex, images: np.ndarray, pixels: PixelFormat):
        self._index = index
        self._chunks = [images[i : i + _CHUNK] for i in range(0, len(images), _CHUNK)]
        self._pixels = pixels

    def __len__(self) -> int:
        return len(self._chunks)

    def __getitem__(self, number: int) -> Statistics:
        result = Statistics()
        for i in self._chunks[number].tolist():
            path = self._index.path(i)
            try:
                data = self._index.read(i)
                image = decode_stored(data, path, self._pixels)
                image = to_channel_count(image, path, self._pixels.channels)
            except UnreadableImage as error:
                result.unreadable[path] = error.reason
                continue
            result.shapes.append(image.shape[:2])
            result.digests[hashlib.blake2b(data, digest_size=16).digest()].append(path)
            bits = 16 if image.dtype == np.uint16 else 8
            planes = image.reshape(-1, image.shape[2]).T
            counts = [np.bincount(plane, minlength=2**bits) for plane in planes]
            levels = np.array(counts) / planes.shape[1]
            result.levels[bits] = result.levels.get(bits, 0) + levels
        return result


def measure_statistics(
    index: ImageIndex,
    *,
    channels: int = 3,
    sample: int = 0,
    max_pixels: int = 200_000_000,
    num_workers: int = 0,
) -> Iterator[Statistics]:
    """Read a data set and sum up; yields the statistics so far, again and again.

    Args:
        index: the images.
        channels: that images are read as.
        sample: how many images, evenly spaced; 0: all.
        max_pixels: larger images count as unreadable.
        num_workers: processes that read.

    Raises:
        UserError: none of the images can be read.
    """
    images = np.arange(len(index))
    if 0 < sample < len(index):
        images = np.linspace(0, len(index) - 1, sample).astype(np.int64)
    pixels = PixelFormat((0.0,) * channels, max_pixels=max_pixels)
    chunks = _Chunks(index, images, pixels)
    loader = DataLoader(
        chunks, batch_size=None, num_workers=num_workers, worker_init_fn=_use_one_thread
    )
    total = Statistics()
    for part in loader:
        total.add(part)
        yield total
    if not total.shapes:
        shown = "; ".join(f"{p} ({r})" for p, r in list(total.unreadable.items())[:3])
        raise UserError(f"None of {len(images)} images can be read: {shown}.")


def _use_one_thread(worker: int) -> None:
    cv2.setNumThreads(0)


def describe(statistics: Statistics) -> str:
    """What was found, and the lines of a config that follow from it."""
    heights, widths = np.array(statistics.shapes).T
    shorter = np.minimum(heights, widths)
    lines = [
        f"{len(heights)} images read, {len(statistics.unreadable)} unreadable",
        *(f"  {path}: {reason}" for path, reason in list(statistics.unreadable.items())[:10]),
        f"width {_spread(widths)}, height {_spread(heights)}, shorter side {_spread(shorter)}",
        f"{sum(len(group) - 1 for group in statistics.duplicates)} files are copies of others",
        *("  " + " = ".join(group[:4]) for group in statistics.duplicates[:10]),
        "",
        "MODEL:",
    ]
    mean, std = statistics.mean_and_std()
    lines.append(f"  PIXEL_MEAN: {_numbers(mean)}")
    lines.append(f"  PIXEL_STD: {_numbers(np.maximum(std, 1.0))}")
    deep_range = statistics.deep_range()
    if len(mean) == 3 or deep_range:
        lines.append("INPUT:")
    if len(mean) == 3:
        lines.append("  FORMAT: RGB")
    if deep_range:
        lines.append(f"  DEEP_RANGE: {list(deep_range)}")
    return "\n".join(lines)


def _spread(values: np.ndarray) -> str:
    return f"{values.min()} to {values.max()}, median {int(np.median(values))}"


def _numbers(values: Sequence[float]) -> str:
    return "[" + ", ".join(f"{value:.3f}" for value in values) + "]"
