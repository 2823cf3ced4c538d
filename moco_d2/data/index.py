"""Where N images lie, as arrays: a million images cost bytes, not Python objects."""

import functools
import json
import os
from array import array
from collections.abc import Sequence

import numpy as np
from detectron2.utils.file_io import PathManager

from moco_d2.data.image_io import read_bytes
from moco_d2.data.pixels import UnreadableImage

_ARRAYS = ("labels", "folder", "name_bytes", "name_ends", "folder_bytes", "folder_ends")
_SHARD_ARRAYS = ("offsets", "sizes")
_META = "index.json"


class ImageIndex:
    """Places and labels of N images.

    Folders are stored once. An image lies in a file of its own, or in a tar shard, whose path then
    takes the place of the folder.

    Attributes:
        labels: int64 (N,), index into ``classes``, or -1 where the label is not known.
        classes: class names.
        nbytes: memory of all arrays, in bytes.
    """

    def __init__(self, paths: Sequence[str], labels: Sequence[int], classes: Sequence[str] = ()):
        """
        Args:
            paths: N paths.
            labels: N indices into ``classes``, -1 for unknown.
            classes: class names.
        """
        builder = IndexBuilder()
        for path, label in zip(paths, labels, strict=True):
            builder.add_path(path, label)
        self._set(builder.arrays(), classes)

    @classmethod
    def from_arrays(cls, arrays: dict[str, np.ndarray], classes: Sequence[str]) -> "ImageIndex":
        """Make an index of the arrays of :meth:`IndexBuilder.arrays`, which it keeps."""
        index = cls.__new__(cls)
        index._set(arrays, classes)
        return index

    def _set(self, arrays: dict[str, np.ndarray], classes: Sequence[str]) -> None:
        self._arrays = arrays
        self._stored_in: str | None = None
        self.labels = arrays["labels"]
        self.classes = tuple(classes)

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def nbytes(self) -> int:
        return sum(values.nbytes for values in self._arrays.values())

    @property
    def stored_in(self) -> str | None:
        """The folder whose files the arrays are mapped from, and so shared by processes."""
        return self._stored_in

    def path(self, i: int) -> str:
        """Return the path of image i, 0 <= i < N; in a shard, the shard's and the member's."""
        return os.fsdecode(self._folder(i) + self._text("name", i))

    def place(self, i: int) -> tuple[str, int]:
        """Return the file that holds image i, and where it begins in it."""
        offsets = self._arrays.get("offsets")
        if offsets is None or offsets[i] < 0:
            return self.path(i), 0
        return os.fsdecode(self._folder(i)).removesuffix("/"), int(offsets[i])

    def read(self, i: int) -> bytes:
        """Return the bytes of image file i.

        Raises:
            UnreadableImage: missing or not permitted.
        """
        offsets = self._arrays.get("offsets")
        if offsets is None or offsets[i] < 0:
            return read_bytes(self.path(i))
        return _read_range(*self.place(i), int(self._arrays["sizes"][i]), self.path(i))

    def _folder(self, i: int) -> bytes:
        return self._text("folder", int(self._arrays["folder"][i]))

    def _text(self, kind: str, i: int) -> bytes:
        ends = self._arrays[f"{kind}_ends"]
        return self._arrays[f"{kind}_bytes"][ends[i] : ends[i + 1]].tobytes()

    def save(self, folder: str) -> None:
        """Write the index to a new folder, which :meth:`load` maps into memory."""
        os.makedirs(folder)
        for name, values in self._arrays.items():
            np.save(os.path.join(folder, f"{name}.npy"), values)
        with open(os.path.join(folder, _META), "w") as file:
            json.dump({"arrays": list(self._arrays), "classes": self.classes}, file)

    @classmethod
    def load(cls, folder: str) -> "ImageIndex":
        """Open a saved index. Its arrays stay in the page cache, once for all processes."""
        with open(os.path.join(folder, _META)) as file:
            meta = json.load(file)
        arrays = {
            name: np.asarray(np.load(os.path.join(folder, f"{name}.npy"), mmap_mode="r"))
            for name in meta["arrays"]
        }
        index = cls.from_arrays(arrays, meta["classes"])
        index._stored_in = folder
        return index

    def __reduce__(self):
        """Processes that are sent a stored index open its files instead of taking a copy."""
        if self._stored_in is not None:
            return ImageIndex.load, (self._stored_in,)
        return ImageIndex.from_arrays, (self._arrays, self.classes)

    def take(self, indices: np.ndarray) -> "ImageIndex":
        """An index of some of the images, with the same classes.

        Args:
            indices: int64 (M,), which images, in the order that they shall have.
        """
        own, starts = self._arrays, self._arrays["name_ends"][indices]
        lengths = own["name_ends"][np.asarray(indices) + 1] - starts
        ends = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)])
        # Byte b of the new names was starts[i] + (b - ends[i]), where i is the image it belongs to.
        source = np.arange(ends[-1]) + np.repeat(starts - ends[:-1], lengths)
        names = {"name_bytes": own["name_bytes"][source], "name_ends": ends}
        folders = {name: own[name] for name in ("folder_bytes", "folder_ends")}
        others = {name: own[name][indices] for name in own if name not in {**names, **folders}}
        return ImageIndex.from_arrays({**others, **names, **folders}, self.classes)

    @staticmethod
    def concatenate(parts: Sequence["ImageIndex"]) -> "ImageIndex":
        """Join indices in their order. Equal class names are one class."""
        if len(parts) == 1:
            return parts[0]
        classes: dict[str, int] = {}
        columns: dict[str, list[np.ndarray]] = {name: [] for name in (*_ARRAYS, *_SHARD_ARRAYS)}
        folders = 0
        for part in parts:
            numbers = [classes.setdefault(name, len(classes)) for name in part.classes]
            translate = np.array([*numbers, -1], dtype=np.int64)  # the last for label -1
            own = dict(part._arrays)
            own["labels"] = translate[own["labels"]]
            own["folder"] = own["folder"] + np.int32(folders)
            own.setdefault("offsets", np.full(len(part), -1, dtype=np.int64))
            own.setdefault("sizes", np.zeros(len(part), dtype=np.int64))
            folders += len(own["folder_ends"]) - 1
            for name, column in columns.items():
                column.append(own[name])
        arrays = {
            name: _join_ends(column) if name.endswith("_ends") else np.concatenate(column)
            for name, column in columns.items()
        }
        if not any("offsets" in part._arrays for part in parts):
            del arrays["offsets"], arrays["sizes"]
        return ImageIndex.from_arrays(arrays, tuple(classes))


class IndexBuilder:
    """Collects images one by one in compact arrays."""

    def __init__(self):
        self._names, self._name_ends = bytearray(), array("q", [0])
        self._folders: dict[bytes, int] = {}
        self._folder, self._labels = array("i"), array("q")
        self._offsets, self._sizes = array("q"), array("q")
        self._has_shards = False

    def __len__(self) -> int:
        return len(self._labels)

    def add_path(self, path: str, label: int = -1) -> None:
        """Add an image in a file of its own."""
        folder, slash, name = os.fsencode(path).rpartition(b"/")
        self._add(folder + slash, name, label, -1, 0)

    def add_member(self, shard: str, name: str, offset: int, size: int, label: int = -1) -> None:
        """Add an image that is ``size`` bytes of a tar file, from ``offset`` on."""
        self._has_shards = True
        self._add(os.fsencode(f"{shard}/"), os.fsencode(name), label, offset, size)

    def _add(self, folder: bytes, name: bytes, label: int, offset: int, size: int) -> None:
        self._names += name
        self._name_ends.append(len(self._names))
        self._folder.append(self._folders.setdefault(folder, len(self._folders)))
        self._labels.append(label)
        self._offsets.append(offset)
        self._sizes.append(size)

    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays of an :class:`ImageIndex`."""
        folder_ends = np.cumsum([0, *map(len, self._folders)], dtype=np.int64)
        arrays = {
            "labels": np.array(self._labels, dtype=np.int64),
            "folder": np.array(self._folder, dtype=np.int32),
            "name_bytes": np.frombuffer(bytes(self._names), dtype=np.uint8),
            "name_ends": np.array(self._name_ends, dtype=np.int64),
            "folder_bytes": np.frombuffer(b"".join(self._folders), dtype=np.uint8),
            "folder_ends": folder_ends,
        }
        if self._has_shards:
            arrays["offsets"] = np.array(self._offsets, dtype=np.int64)
            arrays["sizes"] = np.array(self._sizes, dtype=np.int64)
        return arrays

    def finish(self, classes: Sequence[str] = ()) -> ImageIndex:
        return ImageIndex.from_arrays(self.arrays(), classes)


def _join_ends(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Concatenate the ends of texts whose bytes are concatenated."""
    starts = np.cumsum([0, *(part[-1] for part in parts)])
    shifted = [part[1:] + start for part, start in zip(parts, starts[:-1], strict=True)]
    return np.concatenate([np.zeros(1, dtype=np.int64), *shifted])


def _read_range(shard: str, offset: int, size: int, path: str) -> bytes:
    try:
        data = os.pread(_descriptor(os.getpid(), shard), size, offset)
    except OSError as error:
        raise UnreadableImage(path, (error.strerror or str(error)).lower()) from error
    if len(data) < size:
        raise UnreadableImage(path, "the shard ends before it")
    return data


@functools.lru_cache(maxsize=256)
def _descriptor(process: int, shard: str) -> int:
    """An open file, kept; each process has its own."""
    return os.open(PathManager.get_local_path(shard), os.O_RDONLY | os.O_CLOEXEC)
