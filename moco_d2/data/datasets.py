"""What DATASETS.TRAIN may name, registered sets and folders of images, as a compact index."""

import difflib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from detectron2.data import DatasetCatalog, MetadataCatalog

IMAGE_EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff")

_DATASETS_ROOT = os.path.expanduser(os.getenv("DETECTRON2_DATASETS", "datasets"))
_OWN_FOLDER = "name your own folder of images: DATASETS.TRAIN \"('path/to/images',)\""


class ImageIndex:
    """Paths and labels of N images in NumPy arrays: a million images cost bytes, not objects.

    Attributes:
        labels: int64 (N,), index into ``classes``, or -1 where the label is not known.
        classes: class names.
        nbytes: memory of paths and labels, in bytes.
    """

    def __init__(self, paths: Sequence[str], labels: Sequence[int], classes: Sequence[str] = ()):
        """
        Args:
            paths: N paths.
            labels: N indices into ``classes``, -1 for unknown.
            classes: class names.
        """
        encoded = [os.fsencode(path) for path in paths]
        self._blob = np.frombuffer(b"".join(encoded), dtype=np.uint8)
        self._ends = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
        self.labels = np.asarray(labels, dtype=np.int64).reshape(len(encoded))
        self.classes = tuple(classes)

    def __len__(self) -> int:
        return len(self.labels)

    def path(self, i: int) -> str:
        """Return the path of image i, 0 <= i < N."""
        return os.fsdecode(self._blob[self._ends[i] : self._ends[i + 1]].tobytes())

    @property
    def nbytes(self) -> int:
        return self._blob.nbytes + self._ends.nbytes + self.labels.nbytes


def register_image_folder(name: str, root: str) -> None:
    """Register a folder of images with detectron2, under a name that DATASETS.TRAIN may use.

    The folder is read when the set is first used. Dicts hold ``file_name``, ``image_id`` and,
    if every image lies in a sub-folder of ``root``, ``label``; see :func:`load_image_index`.

    Args:
        name: a name not yet registered.
        root: the folder.
    """
    _register(name, _ImageFolder(name, root, f"register a folder that exists, or {_OWN_FOLDER}"))


def load_image_index(names: Sequence[str]) -> ImageIndex:
    """Read the images that a config names into one index, in the order of the names.

    Each name is a data set registered with detectron2 (by :func:`register_image_folder`, or any
    set whose dicts have ``file_name``; annotations are ignored and images without any are kept),
    or a path to a folder. Folders are searched recursively for files that end in
    ``IMAGE_EXTENSIONS`` in any case, hidden ones ignored, and sorted. The first level of
    sub-folders are the classes if every image lies in one; otherwise no label is known. Equal
    class names of several sets are one class.

    Args:
        names: names or paths, at least one.

    Returns:
        The index, with at least one image.

    Raises:
        FileNotFoundError: a folder or annotation file is missing, or holds no image.
        ValueError: no name given, an unknown name, or a set whose dicts name no files.
    """
    if isinstance(names, str) or not names:
        raise ValueError(
            f"Images are named by a tuple of at least one data set or folder, got {names!r}: "
            f"name a registered data set, or {_OWN_FOLDER}."
        )
    paths: list[str] = []
    labels: list[int] = []
    classes: dict[str, int] = {}
    for name in names:
        source = next((read for knows, read in _SOURCES if knows(name)), _raise_unknown)
        new_paths, new_labels, new_classes = source(name)
        numbers = [classes.setdefault(c, len(classes)) for c in new_classes]
        paths += new_paths
        labels += [numbers[label] if label >= 0 else -1 for label in new_labels]
    return ImageIndex(paths, labels, tuple(classes))


# What a source returns: N paths, N labels (-1: unknown), class names.
_Source = tuple[list[str], list[int], Sequence[str]]


@dataclass(frozen=True)
class _ImageFolder:
    """What DatasetCatalog calls for the dicts of a registered folder."""

    name: str
    root: str
    remedy: str  # what to do when there is no such folder

    def __call__(self) -> list[dict]:
        index = load_image_index([self.name])
        return [
            {"file_name": index.path(i), "image_id": i} | ({} if label < 0 else {"label": label})
            for i, label in enumerate(index.labels.tolist())
        ]


def _register(name: str, folder: _ImageFolder) -> None:
    DatasetCatalog.register(name, folder)
    MetadataCatalog.get(name).set(image_root=folder.root, evaluator_type="image_folder")


def _is_registered_folder(name: str) -> bool:
    return name in DatasetCatalog and isinstance(DatasetCatalog[name], _ImageFolder)


def _read_registered_folder(name: str) -> _Source:
    folder = DatasetCatalog[name]
    if not os.path.isdir(folder.root):
        raise FileNotFoundError(
            f"The images of data set {name!r} are looked for in the folder {folder.root!r}, which "
            f"does not exist: {folder.remedy}."
        )
    return _read_folder(folder.root)


def _read_catalog(name: str) -> _Source:
    try:
        dicts = DatasetCatalog.get(name)
    except FileNotFoundError as error:
        if error.filename is None:  # raised with a sentence of its own, not by the system
            raise
        raise FileNotFoundError(
            f"Data set {name!r} needs {error.filename!r}, which does not exist: set "
            f"DETECTRON2_DATASETS (now {_DATASETS_ROOT!r}) to the folder of your data sets, or "
            f"{_OWN_FOLDER}."
        ) from error
    try:
        paths = [d["file_name"] for d in dicts]
        labels = [int(d.get("label", -1)) for d in dicts]
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"Data set {name!r} is not a list of dicts with 'file_name', so its images cannot be "
            f"found: name another set, or {_OWN_FOLDER}."
        ) from error
    if not paths:
        raise FileNotFoundError(
            f"Data set {name!r} holds no image: name another, or {_OWN_FOLDER}."
        )
    metadata = MetadataCatalog.get(name)
    classes = list(metadata.get("classes", metadata.get("thing_classes", ())))
    classes += [str(label) for label in range(len(classes), max(labels) + 1)]
    return paths, labels, classes if max(labels) >= 0 else ()


def _read_folder(root: str) -> _Source:
    files = sorted(_image_files(root))
    if not files:
        raise FileNotFoundError(
            f"The folder {root!r} holds no image: files must end in "
            f"{', '.join(IMAGE_EXTENSIONS)} and may lie in sub-folders."
        )
    paths = [os.path.join(root, file) for file in files]
    if not all(os.sep in file for file in files):
        return paths, [-1] * len(files), ()
    names = [file.split(os.sep, 1)[0] for file in files]
    classes = sorted(set(names))
    number = {name: i for i, name in enumerate(classes)}
    return paths, [number[name] for name in names], classes


def _image_files(root: str, folder: str = "", above: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield image files below a folder, relative to root. Follows links, but not in circles."""
    real = os.path.realpath(os.path.join(root, folder))
    if real in above:
        return
    with os.scandir(real) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            relative = os.path.join(folder, entry.name)
            if entry.is_dir():
                yield from _image_files(root, relative, (*above, real))
            elif os.path.splitext(entry.name)[1].lower() in IMAGE_EXTENSIONS:
                yield relative


def _raise_unknown(name: str) -> _Source:
    close = difflib.get_close_matches(name, DatasetCatalog.list(), n=3)
    hint = f"close registered names are {', '.join(close)}" if close else _OWN_FOLDER
    raise ValueError(f"{name!r} is neither a registered data set nor a folder: {hint}.")


# How to read what a config names: (does this source know the name, reader), first match wins.
_SOURCES = (
    (_is_registered_folder, _read_registered_folder),
    (DatasetCatalog.__contains__, _read_catalog),
    (os.path.isdir, _read_folder),
)

for _split in ("train", "val"):
    _name = f"imagenet_{_split}"
    _root = os.path.join(_DATASETS_ROOT, "imagenet", _split)
    _remedy = f"set DETECTRON2_DATASETS to the folder that holds imagenet/, or {_OWN_FOLDER}"
    _register(_name, _ImageFolder(_name, _root, _remedy))
