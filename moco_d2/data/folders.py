"""Folders of images, searched recursively."""

import logging
import os
import time
from collections.abc import Iterator

import numpy as np
from detectron2.utils.file_io import PathManager

from moco_d2.data.index import ImageIndex, IndexBuilder
from moco_d2.data.index_cache import Stamps, cached_scan, stamp

logger = logging.getLogger(__name__)

IMAGE_EXTENSIONS = (
    *(".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff"),
    ".npy",
)
PROGRESS = 10.0  # seconds between lines in the log


def is_image_name(name: str) -> bool:
    """Tell by its extension, in any case, whether a file should be an image."""
    return os.path.splitext(name)[1].lower() in IMAGE_EXTENSIONS


def read_folder(root: str) -> ImageIndex:
    """Index a folder; a big one is scanned once and kept, see :func:`cached_scan`.

    Args:
        root: a local folder, or one that detectron2's PathManager can list.

    Returns:
        Files that end in ``IMAGE_EXTENSIONS``, hidden ones ignored, sorted by their paths. The
        first level of sub-folders are the classes if every image lies in one.

    Raises:
        FileNotFoundError: it holds no image.
    """
    if "://" in root:
        index, _ = _scan(root)
    else:
        index = cached_scan(root, [root], lambda: _scan(root))
    if not len(index):
        raise FileNotFoundError(
            f"The folder {root!r} holds no image: files must end in "
            f"{', '.join(IMAGE_EXTENSIONS)} and may lie in sub-folders."
        )
    return index


def _scan(root: str) -> tuple[ImageIndex, Stamps]:
    builder, stamps = IndexBuilder(), []
    classes: dict[str, int] = {}
    flat = False
    shown = time.monotonic()
    for relative in _image_files(root, stamps):
        top, slash, _ = relative.partition(os.sep)
        flat = flat or not slash
        label = classes.setdefault(top, len(classes)) if slash else -1
        builder.add_path(os.path.join(root, relative), label)
        if len(builder) % 1000 == 0 and time.monotonic() - shown > PROGRESS:
            shown = time.monotonic()
            logger.info(f"Scanning {root}: {len(builder)} images so far, now in {relative}")
    names = [] if flat else sorted(classes)
    index = builder.finish(names)
    number = {name: i for i, name in enumerate(names)}
    sorted_ = np.array([*(number.get(name, -1) for name in classes), -1])  # the last for -1
    index.labels[:] = sorted_[index.labels]
    return index, stamps


def _image_files(
    root: str, stamps: Stamps, folder: str = "", above: tuple[str, ...] = ()
) -> Iterator[str]:
    """Yield image files below a folder, relative to root, in the order of their paths. Follows
    links, but not in circles."""
    path = os.path.join(root, folder)
    real = path if "://" in path else os.path.realpath(path)
    if real in above:
        return
    # A folder sorts as its files' paths do, with the separator after its name.
    for name, is_folder in sorted(_entries(path, stamps), key=lambda e: e[0] + os.sep * e[1]):
        if name.startswith("."):
            continue
        relative = os.path.join(folder, name)
        if is_folder:
            yield from _image_files(root, stamps, relative, (*above, real))
        elif is_image_name(name):
            yield relative


def _entries(path: str, stamps: Stamps) -> list[tuple[str, bool]]:
    """Names in a folder, and whether each is a folder itself."""
    if "://" in path:
        names = PathManager.ls(path)
        return [(name, PathManager.isdir(os.path.join(path, name))) for name in names]
    stamps.append(stamp(path))
    with os.scandir(path) as entries:
        return [(entry.name, entry.is_dir()) for entry in entries]
