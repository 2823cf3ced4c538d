"""What DATASETS.TRAIN may name: registered sets, folders, lists, tar shards, as one index."""

import difflib
import itertools
import os
import urllib.parse
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.utils.file_io import PathManager

from moco_d2.data.folders import is_image_name, read_folder
from moco_d2.data.index import ImageIndex
from moco_d2.data.lists import is_list_name, read_list
from moco_d2.data.paths import expand_paths
from moco_d2.data.shards import read_shards
from moco_d2.errors import UserError

_DATASETS_ROOT = os.path.expanduser(os.getenv("DETECTRON2_DATASETS", "datasets"))
_OWN_FOLDER = "name your own folder of images: DATASETS.TRAIN \"('path/to/images',)\""


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

    Each name is one of

    - a data set registered with detectron2: by :func:`register_image_folder`, or any set whose
      dicts have ``file_name``; annotations are ignored and images without any are kept;
    - a folder, see :func:`moco_d2.data.folders.read_folder`;
    - a list, see :func:`moco_d2.data.lists.read_list`; its options follow the path, as in
      ``photos.csv?root=/data/photos&column=url``;
    - tar shards, see :func:`moco_d2.data.shards.read_shards`;
    - an image file.

    Paths may have ranges and alternatives in braces (``{000..127}``, ``{a,b}``) and globs. Equal
    class names of several sets are one class.

    Args:
        names: names or paths, at least one.

    Returns:
        The index, with at least one image.

    Raises:
        FileNotFoundError: a folder or annotation file is missing, or holds no image.
        UserError: no name given, an unknown name, or a set whose dicts name no files.
    """
    if isinstance(names, str) or not names:
        raise UserError(
            f"Images are named by a tuple of at least one data set or folder, got {names!r}: "
            f"name a registered data set, or {_OWN_FOLDER}."
        )
    parts = []
    for name in names:
        read = next((read for knows, read in _REGISTERED if knows(name)), _read_paths)
        parts.append(read(name))
    return ImageIndex.concatenate(parts)


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


def _read_registered_folder(name: str) -> ImageIndex:
    folder = DatasetCatalog[name]
    if not os.path.isdir(folder.root):
        raise FileNotFoundError(
            f"The images of data set {name!r} are looked for in the folder {folder.root!r}, which "
            f"does not exist: {folder.remedy}."
        )
    return read_folder(folder.root)


def _read_catalog(name: str) -> ImageIndex:
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
        raise UserError(
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
    return ImageIndex(paths, labels, classes if max(labels) >= 0 else ())


def _read_paths(name: str) -> ImageIndex:
    """Read what a name stands for that is not registered."""
    path, _, options = name.partition("?")
    options = dict(urllib.parse.parse_qsl(options)) if is_list_name(path) else {}
    paths = [path] if options else expand_paths(name)
    missing = [path for path in paths if not PathManager.exists(path)]
    if missing or not paths:
        _raise_unknown(missing[0] if missing else name)
    if set(options) - {"root", "column", "label"}:
        raise UserError(
            f"The list {name!r} has unknown options: a list takes root, column and label."
        )
    parts = []
    for kind, group in itertools.groupby(paths, _kind):
        parts += kind(name, list(group), options)
    return ImageIndex.concatenate(parts)


def _kind(path: str) -> "_Reader":
    reader = next((read for knows, read in _KINDS if knows(path)), None)
    if reader is None:
        raise UserError(
            f"{path!r} is neither a folder nor a file of a known kind: images may be named by a "
            "folder, a list (.txt, .csv, .parquet), tar shards (.tar), or one by one."
        )
    return reader


def _raise_unknown(name: str) -> None:
    close = difflib.get_close_matches(name, DatasetCatalog.list(), n=3)
    hint = f"close registered names are {', '.join(close)}" if close else _OWN_FOLDER
    raise UserError(
        f"{name!r} is neither a registered data set nor a folder, list, shard or image: {hint}."
    )


def _read_folders(name: str, paths: list[str], options: dict) -> list[ImageIndex]:
    return [read_folder(path) for path in paths]


def _read_shards(name: str, paths: list[str], options: dict) -> list[ImageIndex]:
    return [read_shards(name, paths)]


def _read_lists(name: str, paths: list[str], options: dict) -> list[ImageIndex]:
    return [read_list(path, **options) for path in paths]


def _read_files(name: str, paths: list[str], options: dict) -> list[ImageIndex]:
    return [ImageIndex(paths, [-1] * len(paths))]


_Reader = Callable[[str, list[str], dict], list[ImageIndex]]

# How to read what a config names, first match wins: registered sets, then paths by their kind.
_REGISTERED: tuple[tuple[Callable[[str], bool], Callable[[str], ImageIndex]], ...] = (
    (_is_registered_folder, _read_registered_folder),
    (DatasetCatalog.__contains__, _read_catalog),
)
_KINDS: tuple[tuple[Callable[[str], bool], _Reader], ...] = (
    (PathManager.isdir, _read_folders),
    (lambda path: path.lower().endswith(".tar"), _read_shards),
    (is_list_name, _read_lists),
    (is_image_name, _read_files),
)

# Registered here: name -> folder below the folder of all data sets.
_FOLDERS = {
    "imagenet_train": ("imagenet", "train"),
    "imagenet_val": ("imagenet", "val"),
    "coco_2017_unlabeled": ("coco", "unlabeled2017"),
}

for _name, _folder in _FOLDERS.items():
    _root = os.path.join(_DATASETS_ROOT, *_folder)
    _remedy = f"set DETECTRON2_DATASETS to the folder that holds {_folder[0]}/, or {_OWN_FOLDER}"
    _register(_name, _ImageFolder(_name, _root, _remedy))
