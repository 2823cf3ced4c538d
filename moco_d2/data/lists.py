"""Lists of image paths: text, CSV and Parquet."""

import csv
import io
import itertools
import os
from collections.abc import Callable, Iterable

from detectron2.utils.file_io import PathManager

from moco_d2.data.index import ImageIndex, IndexBuilder
from moco_d2.errors import UserError

PATH_COLUMNS = ("path", "file_name", "filename", "file", "image")
LABEL_COLUMNS = ("label", "class")

_Rows = Iterable[tuple[str, str | None]]  # path, label


def is_list_name(name: str) -> bool:
    """Tell by its extension whether a file is a list of images."""
    return os.path.splitext(name)[1].lower() in _READERS


def read_list(
    path: str, root: str | None = None, column: str | None = None, label: str | None = None
) -> ImageIndex:
    """Index the images that a list names, in its order.

    Args:
        path: a text file with a path in each line, after it a tab and a label if there are any; or
            a CSV or Parquet file with a column of paths (one of ``PATH_COLUMNS``), and of labels
            (one of ``LABEL_COLUMNS``) if there are any.
        root: the folder that paths are relative to; None: that of the list.
        column: name of the column of paths.
        label: name of the column of labels.

    Raises:
        FileNotFoundError: the list names no image.
        UserError: no such column, or Parquet without pyarrow.
    """
    if root is None:
        root = path[: path.rfind("/") + 1]
    read = _READERS[os.path.splitext(path)[1].lower()]
    rows = [(name, class_name) for name, class_name in read(path, column, label) if name]
    if not rows:
        raise FileNotFoundError(f"The list {path!r} names no image: it needs one in each line.")
    names = {class_name for _, class_name in rows if class_name not in (None, "")}
    classes = sorted(names, key=lambda name: (len(name), name) if name.isdigit() else (0, name))
    numbers = {name: number for number, name in enumerate(classes)}
    builder = IndexBuilder()
    for name, class_name in rows:
        where = name if "://" in name else os.path.join(root, name)
        builder.add_path(where, numbers.get(class_name, -1))
    return builder.finish(classes)


def _read_text(path: str, column: str | None, label: str | None) -> _Rows:
    with PathManager.open(path, "rb") as file:
        for line in file.read().splitlines():
            name, _, class_name = os.fsdecode(line).partition("\t")
            yield name.strip(), class_name.strip() or None


def _read_csv(path: str, column: str | None, label: str | None) -> _Rows:
    with PathManager.open(path, "rb") as file:
        text = os.fsdecode(file.read()).removeprefix("\ufeff")
    rows = csv.DictReader(io.StringIO(text, newline=""))
    names, labels = _columns(path, rows.fieldnames or (), column, label)
    return ((row[names], row[labels] if labels else None) for row in rows)


def _read_parquet(path: str, column: str | None, label: str | None) -> _Rows:
    try:
        from pyarrow import parquet
    except ImportError:
        raise UserError(
            f"The list {path!r} is a Parquet file, which needs pyarrow: pip install pyarrow, or "
            "write the list as CSV."
        ) from None
    local = PathManager.get_local_path(path)
    names, labels = _columns(path, parquet.read_schema(local).names, column, label)
    table = parquet.read_table(local, columns=[names, *([labels] if labels else [])])
    paths = table[names].to_pylist()
    classes = map(str, table[labels].to_pylist()) if labels else itertools.repeat(None)
    return zip(paths, classes, strict=False)


def _columns(
    path: str, there: Iterable[str], column: str | None, label: str | None
) -> tuple[str, str | None]:
    there = list(there)
    wanted = PATH_COLUMNS if column is None else (column,)
    names = next((name for name in wanted if name in there), None)
    if names is None:
        raise UserError(
            f"The list {path!r} has the columns {', '.join(map(repr, there))} and none of them is "
            f"{' or '.join(wanted)}: name the column of paths, as in '{path}?column=...'."
        )
    if label is not None and label not in there:
        raise UserError(
            f"The list {path!r} has the columns {', '.join(map(repr, there))} and none of them is "
            f"{label}: name the column of labels, as in '{path}?label=...'."
        )
    return names, label or next((name for name in LABEL_COLUMNS if name in there), None)


_READERS: dict[str, Callable[[str, str | None, str | None], _Rows]] = {
    ".txt": _read_text,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}
