"""Features of images on disk, so that no image is read twice for the same weights.

A store is a folder of files, each with the features of some images. A file is written aside and
renamed, so that a run that was killed loses no more than the images of its last file, and the next
one goes on from there, also for a larger part of the same data set.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from moco_d2.checkpoint.files import replaced_file
from moco_d2.data.index import ImageIndex
from moco_d2.errors import UserError

_ABOUT = "about.json"


class FeatureStore:
    """The features of one data set's images under one set of weights."""

    def __init__(self, root: str | Path, about: dict):
        """
        Args:
            root: folder of all stores.
            about: all that the features depend on, as plain Python; it names the store.
        """
        key = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:32]
        self.folder = Path(root, key)
        self._about = about

    def missing(self, wanted: np.ndarray) -> np.ndarray:
        """Those of the numbers of images, int64 (M,), of which nothing is known yet."""
        known = [np.concatenate([f["numbers"], f["unreadable"]]) for f in self._files()]
        return wanted[~np.isin(wanted, np.concatenate(known))] if known else wanted

    def add(self, numbers: np.ndarray, features: np.ndarray, unreadable: np.ndarray) -> None:
        """Keep the features of some images.

        Args:
            numbers: int64 (n,) of images.
            features: float32 (n, C), theirs.
            unreadable: int64, numbers of those that have none, since they cannot be read.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        about = self.folder / _ABOUT
        if not about.exists():
            with replaced_file(str(about)) as aside:
                Path(aside).write_text(json.dumps(self._about, indent=1, sort_keys=True))
        name = hashlib.sha256(numbers.tobytes() + unreadable.tobytes()).hexdigest()[:32]
        with replaced_file(str(self.folder / f"{name}.npz")) as aside:
            np.savez(aside, numbers=numbers, features=features, unreadable=unreadable)

    def load(self, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Read the features of images.

        Args:
            wanted: rising numbers of images, int64 (M,), all known.

        Returns:
            int64 (R,), those that can be read, and float32 (R, C).

        Raises:
            UserError: none can.
        """
        known = [np.empty(0, np.int64), *(file["numbers"] for file in self._files())]
        numbers = np.unique(np.concatenate(known))
        numbers = numbers[np.isin(numbers, wanted)]
        if not len(numbers):
            raise UserError("none of the images can be read; the log says why")
        features = np.empty(0)
        for file in self._files():
            chosen = np.isin(file["numbers"], numbers)
            if chosen.any():
                found = file["features"][chosen]
                if not len(features):
                    features = np.empty((len(numbers), found.shape[1]), np.float32)
                features[np.searchsorted(numbers, file["numbers"][chosen])] = found
        return numbers, features

    def _files(self) -> Iterator[Mapping[str, np.ndarray]]:
        for path in sorted(self.folder.glob("[!.]*.npz")):
            with np.load(path, allow_pickle=False) as file:
                yield file


def fingerprint(index: ImageIndex) -> str:
    """SHA-256 over an index's files: paths, places in shards, sizes and times of change.

    Of paths that are no local files, only the path counts.
    """
    digest, last, state = hashlib.sha256(), "", None
    for i in range(len(index)):
        file, offset = index.place(i)
        if file != last:  # a shard holds many images
            last, state = file, _state(file)
        digest.update(os.fsencode(f"{index.path(i)}\0{offset}\0{state}\0"))
    return digest.hexdigest()


def _state(file: str) -> tuple[int, int] | None:
    try:
        status = os.stat(file)
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns
