"""Class labels from folders, lists and registered sets, and classes that agree by name."""

import numpy as np
import pytest
from detectron2.data import DatasetCatalog, MetadataCatalog

from moco_d2.data.labels import load_labelled_index, with_classes
from moco_d2.errors import UserError

NAMES = ("crow/1.png", "crow/2.png", "jay/3.png", "tit/4.png")
CLASSES = ("crow", "jay", "tit")


@pytest.fixture
def sources(tmp_path):
    """The same four images, labelled in every way."""
    root = tmp_path / "birds"
    for name in NAMES:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    rows = [(str(root / name), name.partition("/")[0]) for name in NAMES]
    csv = tmp_path / "list.csv"
    csv.write_text("path,label\n" + "".join(f"{p},{c}\n" for p, c in rows))
    other = tmp_path / "other.csv"
    other.write_text("where,label,species\n" + "".join(f"{p},x,{c}\n" for p, c in rows))
    text = tmp_path / "list.txt"
    text.write_text("".join(f"{p}\t{c}\n" for p, c in rows))
    name = f"birds_{tmp_path.name}"
    dicts = [{"file_name": p, "label": CLASSES.index(c)} for p, c in rows]
    DatasetCatalog.register(name, lambda: dicts)
    MetadataCatalog.get(name).classes = list(CLASSES)
    yield [str(root), str(csv), f"{other}?column=where&label=species", str(text), name]
    DatasetCatalog.remove(name)
    MetadataCatalog.remove(name)


def test_labels_are_the_same_wherever_they_come_from(sources):
    for source in sources:
        index = load_labelled_index([source], "DATASETS.TRAIN")
        assert index.classes == CLASSES, source
        assert index.labels.tolist() == [0, 0, 1, 2], source
        assert index.path(3).endswith("birds/tit/4.png")
    mixed = load_labelled_index(sources, "DATASETS.TRAIN")
    assert mixed.classes == CLASSES and np.bincount(mixed.labels).tolist() == [10, 5, 5]


def test_a_column_of_labels_that_is_not_there(sources):
    path = sources[1]
    with pytest.raises(UserError, match=r"'path', 'label' and none of them is species"):
        load_labelled_index([f"{path}?label=species"], "DATASETS.TRAIN")


def test_an_image_without_a_label_is_named(tmp_path):
    path = tmp_path / "list.csv"
    path.write_text("path,label\na.png,crow\nb.png,\n")
    with pytest.raises(UserError, match=r"1 of 2 images .* without a class label, among .*b\.png"):
        load_labelled_index([str(path)], "DATASETS.TEST")


def test_classes_are_matched_by_name(sources):
    index = load_labelled_index(sources[:1], "DATASETS.TEST")
    other = with_classes(index, ("tit", "wren", "crow", "jay"), "birds")
    assert other.labels.tolist() == [2, 2, 3, 0] and other.classes[3] == "jay"
    assert index.labels.tolist() == [0, 0, 1, 2]  # as it was
    assert [other.path(i) for i in range(4)] == [index.path(i) for i in range(4)]
    with pytest.raises(UserError, match=r"birds has images of 2 class\(es\) .*\(jay, tit\)"):
        with_classes(index, ("crow",), "birds")
