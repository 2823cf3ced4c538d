"""Scans of big folders and shards, kept on disk for the next start."""

import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence

from moco_d2.data.index import ImageIndex

logger = logging.getLogger(__name__)

# Stamps: the folders and files a scan depends on, each with its time of change and size.
Stamps = list[tuple[str, int, int]]

_SMALLEST = 10_000  # images; a smaller scan takes no time
_STAMPS = "stamps.json"
_SETTLED = 2.0  # seconds; a change as young as the scan could go unnoticed in a stamp's resolution


def cache_root() -> str:
    """Where scans are kept: ``$MOCO_D2_CACHE``, or ``moco_d2`` in the user's cache folder."""
    user = os.getenv("XDG_CACHE_HOME") or os.path.join("~", ".cache")
    return os.path.expanduser(os.getenv("MOCO_D2_CACHE") or os.path.join(user, "moco_d2"))


def stamp(path: str) -> tuple[str, int, int]:
    """The stamp of a folder or file as it is now."""
    status = os.stat(path)
    return path, status.st_mtime_ns, status.st_size


def cached_scan(
    source: str, paths: Sequence[str], scan: Callable[[], tuple[ImageIndex, Stamps]]
) -> ImageIndex:
    """Return the kept scan of a source if nothing it depends on has changed, else scan.

    A folder's time of change tells of files that were added, removed or renamed in it.

    Args:
        source: what to call it in the log.
        paths: what is scanned.
        scan: does it; it takes the stamps before it looks.
    """
    joined = "\0".join(map(os.path.abspath, paths))
    key = hashlib.sha256(os.fsencode(joined)).hexdigest()[:32]
    folder = os.path.join(cache_root(), key)
    kept = _load(folder)
    if kept is not None:
        logger.info(f"{source}: {len(kept)} images, from the scan kept in {folder}")
        return kept
    started = time.time()
    index, stamps = scan()
    youngest = max((changed for _, changed, _ in stamps), default=0) / 1e9
    if len(index) < _SMALLEST or youngest > started - _SETTLED:
        return index
    return _save(index, stamps, folder)


def _load(folder: str) -> ImageIndex | None:
    try:
        with open(os.path.join(folder, _STAMPS)) as file:
            stamps = json.load(file)
        if any(list(stamp(path)) != [path, *known] for path, *known in stamps):
            return None
        return ImageIndex.load(folder)
    except (OSError, ValueError, KeyError):
        return None


def _save(index: ImageIndex, stamps: Stamps, folder: str) -> ImageIndex:
    """Write aside and rename, so that what is there is complete. Failing costs only time."""
    try:
        os.makedirs(os.path.dirname(folder), exist_ok=True)
        aside = tempfile.mkdtemp(dir=os.path.dirname(folder))
        try:
            index.save(os.path.join(aside, "new"))
            with open(os.path.join(aside, "new", _STAMPS), "w") as file:
                json.dump(stamps, file)
            if os.path.isdir(folder):
                os.rename(folder, os.path.join(aside, "old"))
            os.rename(os.path.join(aside, "new"), folder)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
        return ImageIndex.load(folder)
    except OSError as error:
        logger.warning(
            f"The scan could not be kept in {folder} ({error}): set MOCO_D2_CACHE to a folder "
            "that can be written to."
        )
        return index
