"""Decoded images kept between epochs, in memory or on disk, shared by all processes of a machine.

One file per image, complete or not there, in a folder that a RAM cache has in shared memory. When
the cache is full nothing is evicted: in a random order over all images, the ones that stay serve as
well as any others.
"""

import errno
import fcntl
import hashlib
import logging
import os
import shutil
import struct
import tempfile
from multiprocessing.util import Finalize

import numpy as np

from moco_d2.data.index import ImageIndex
from moco_d2.data.index_cache import cache_root
from moco_d2.errors import UserError

logger = logging.getLogger(__name__)

_SHARED_MEMORY = "/dev/shm"
_USED, _USERS = "used", "users"
_HEADER = struct.Struct("<III")  # height, width, channels
_COUNTS = struct.Struct("<QQ")  # bytes, images


class ImageCache:
    """A bounded store of uint8 (H, W, C) arrays by key. Safe to use from many processes."""

    def __init__(self, folder: str, limit: int, *, temporary: bool = False):
        """
        Args:
            folder: where to; it is made.
            limit: bytes at most, for all processes together.
            temporary: remove it when the last process that opened it ends.
        """
        self.folder = folder
        self.limit = limit
        os.makedirs(folder, exist_ok=True)
        if temporary:
            self._users = open(os.path.join(folder, _USERS), "w")  # noqa: SIM115, held until exit
            fcntl.flock(self._users, fcntl.LOCK_SH)
            # Processes of a job end without atexit's functions, but not without these.
            Finalize(None, self._remove_if_last, args=(os.getpid(),), exitpriority=0)

    def __getstate__(self):
        return {"folder": self.folder, "limit": self.limit}

    def get(self, key: str) -> np.ndarray | None:
        """Return a stored image, read-only, or None."""
        path = self._path(key)
        try:
            stored = np.memmap(path, dtype=np.uint8, mode="r")
        except (OSError, ValueError):
            return None
        shape = _HEADER.unpack(stored[: _HEADER.size].tobytes())
        return np.asarray(stored[_HEADER.size :]).reshape(shape)

    def put(self, key: str, image: np.ndarray) -> bool:
        """Store an image unless the cache is full; tells whether it is stored."""
        if not self._reserve(image.nbytes + _HEADER.size):
            return False
        path = self._path(key)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        try:
            with tempfile.NamedTemporaryFile(dir=os.path.dirname(path), delete=False) as file:
                file.write(_HEADER.pack(*image.shape))
                file.write(np.ascontiguousarray(image).data)
            os.rename(file.name, path)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            os.unlink(file.name)
            return False
        return True

    def usage(self) -> tuple[int, int]:
        """Bytes and images stored."""
        try:
            with open(os.path.join(self.folder, _USED), "rb") as file:
                return _COUNTS.unpack(file.read())
        except (OSError, struct.error):
            return 0, 0

    def _reserve(self, size: int) -> bool:
        descriptor = os.open(os.path.join(self.folder, _USED), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            counts = os.pread(descriptor, _COUNTS.size, 0)
            used, images = _COUNTS.unpack(counts) if counts else (0, 0)
            if used + size > self.limit:
                return False
            os.pwrite(descriptor, _COUNTS.pack(used + size, images + 1), 0)
            return True
        finally:
            os.close(descriptor)

    def _path(self, key: str) -> str:
        return os.path.join(self.folder, key[:2], key[2:])

    def _remove_if_last(self, owner: int) -> None:
        if os.getpid() != owner:
            return
        try:
            fcntl.flock(self._users, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        shutil.rmtree(self.folder, ignore_errors=True)


def open_image_cache(kind: str, limit_gb: float) -> ImageCache | None:
    """Open the cache that DATALOADER.CACHE names, the same for all processes of a user.

    Args:
        kind: "none", "ram" or "disk".
        limit_gb: size at most, in 10^9 bytes.

    Raises:
        UserError: unknown kind, or no room.
    """
    if kind not in _FOLDERS:
        raise UserError(f"DATALOADER.CACHE is {kind!r}: it takes one of {', '.join(_FOLDERS)}.")
    folder = _FOLDERS[kind]()
    if folder is None:
        return None
    limit = int(limit_gb * 1e9)
    cache = ImageCache(folder, limit, temporary=kind == "ram")
    free = shutil.disk_usage(folder).free + cache.usage()[0]
    if not 0 < limit <= free:
        raise UserError(
            f"DATALOADER.CACHE_GB is {limit_gb:g}, and {folder} has room for {free / 1e9:.1f}: set "
            "it to less, and above 0."
        )
    logger.info(f"Images are cached in {folder}, up to {limit_gb:g} GB")
    return cache


def image_key(index: ImageIndex, i: int, how: object) -> str:
    """Name what image ``i`` becomes when it is read in the way ``how``; a file that is changed
    gets another name."""
    file, place = index.place(i)
    try:
        status = os.stat(file)
        version = (status.st_mtime_ns, status.st_size)
    except OSError:
        version = ()
    text = repr((os.path.abspath(file), place, version, how))
    return hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()


# DATALOADER.CACHE -> its folder.
_FOLDERS = {
    "none": lambda: None,
    "ram": lambda: os.path.join(_SHARED_MEMORY, f"moco_d2_images_{os.getuid()}"),
    "disk": lambda: os.path.join(cache_root(), "images"),
}
