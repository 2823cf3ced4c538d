"""What DATASETS.TRAIN may name: folders, registered folders, any registered set; and the errors."""

import json
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data.datasets import register_coco_instances

from moco_d2.data.datasets import ImageIndex, load_image_index, register_image_folder


def touch(root, *names: str) -> str:
    """Create empty files; an index does not open them."""
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return str(root)


def relative_paths(index: ImageIndex, root: str) -> list[str]:
    return [os.path.relpath(index.path(i), root) for i in range(len(index))]


@pytest.fixture
def registered():
    """Names to remove from detectron2's catalogs after the test."""
    names = []
    yield names
    for name in names:
        DatasetCatalog.remove(name)
        MetadataCatalog.pop(name, None)


def test_class_folders_give_labels(tmp_path):
    root = touch(tmp_path, "b/2.jpg", "a/deep/er/1.PNG", "a/0.jpeg", "c/3.webp", "a-b/4.bmp")
    index = load_image_index([root])
    assert relative_paths(index, root) == [
        "a-b/4.bmp",
        "a/0.jpeg",
        "a/deep/er/1.PNG",
        "b/2.jpg",
        "c/3.webp",
    ]
    assert index.classes == ("a", "a-b", "b", "c")
    assert [index.classes[i] for i in index.labels] == ["a-b", "a", "a", "b", "c"]
    assert index.labels.dtype == np.int64


def test_flat_and_mixed_folders_give_no_labels(tmp_path):
    flat = load_image_index([touch(tmp_path / "flat", "1.jpg", "0.TIF", "2.tiff", "note.txt")])
    assert relative_paths(flat, str(tmp_path / "flat")) == ["0.TIF", "1.jpg", "2.tiff"]
    mixed = load_image_index([touch(tmp_path / "mixed", "1.jpg", "a/0.jpg")])
    for index in (flat, mixed):
        assert index.classes == () and set(index.labels) == {-1}


def test_hidden_files_are_ignored_and_links_followed(tmp_path):
    elsewhere = touch(tmp_path / "elsewhere", "x/9.jpg")
    root = touch(tmp_path / "root", "1.jpg", "._1.jpg", ".cache/2.jpg", "jpg")
    os.symlink(os.path.join(elsewhere, "x", "9.jpg"), os.path.join(root, "link.jpg"))
    os.symlink(os.path.join(elsewhere, "x"), os.path.join(root, "linked"))
    os.symlink(root, os.path.join(root, "circle"))
    os.symlink("nowhere.jpg", os.path.join(root, "dangling.jpg"))
    paths = relative_paths(load_image_index([root]), root)
    assert paths == ["1.jpg", "dangling.jpg", "link.jpg", "linked/9.jpg"]


def test_odd_names_survive(tmp_path):
    names = ["ü b.jpg", "日本.png", os.fsdecode(b"\xff\xfe.jpg")]
    root = touch(tmp_path, *names)
    assert sorted(relative_paths(load_image_index([root]), root)) == sorted(names)


def test_several_names_share_class_names(tmp_path):
    first = touch(tmp_path / "1", "cat/0.jpg", "dog/1.jpg")
    second = touch(tmp_path / "2", "ant/0.jpg", "cat/1.jpg")
    third = touch(tmp_path / "3", "0.jpg")
    index = load_image_index([first, second, third])
    assert index.classes == ("cat", "dog", "ant")
    assert index.labels.tolist() == [0, 1, 2, 0, -1]


def test_registered_folder(tmp_path, registered):
    root = touch(tmp_path, "a/0.jpg", "b/1.jpg")
    registered.append("test_folder")
    register_image_folder("test_folder", root)
    assert MetadataCatalog.get("test_folder").image_root == root
    assert MetadataCatalog.get("test_folder").evaluator_type == "image_folder"
    assert DatasetCatalog.get("test_folder") == [
        {"file_name": os.path.join(root, "a/0.jpg"), "image_id": 0, "label": 0},
        {"file_name": os.path.join(root, "b/1.jpg"), "image_id": 1, "label": 1},
    ]
    index = load_image_index(["test_folder"])
    assert index.labels.tolist() == [0, 1] and index.classes == ("a", "b")


def test_dicts_of_a_flat_folder_have_no_label(tmp_path, registered):
    registered.append("test_flat")
    register_image_folder("test_flat", touch(tmp_path, "0.jpg"))
    assert DatasetCatalog.get("test_flat") == [
        {"file_name": str(tmp_path / "0.jpg"), "image_id": 0}
    ]


def test_coco_set_keeps_images_without_annotations(tmp_path, registered):
    touch(tmp_path, "images/1.jpg", "images/2.jpg")
    annotations = {
        "images": [{"id": i, "file_name": f"{i}.jpg", "height": 10, "width": 10} for i in (1, 2)],
        "categories": [{"id": 1, "name": "thing"}],
        "annotations": [
            {"id": 1, "image_id": 1, "category_id": 1, "bbox": [0, 0, 5, 5], "area": 25}
            | {"iscrowd": 0, "segmentation": [[0, 0, 5, 0, 5, 5]]}
        ],
    }
    json_file = tmp_path / "instances.json"
    json_file.write_text(json.dumps(annotations))
    registered.append("test_coco")
    register_coco_instances("test_coco", {}, str(json_file), str(tmp_path / "images"))
    index = load_image_index(["test_coco"])
    assert relative_paths(index, str(tmp_path / "images")) == ["1.jpg", "2.jpg"]
    assert index.labels.tolist() == [-1, -1] and index.classes == ()


def test_labels_of_a_registered_set_are_kept(registered):
    registered += ["test_labels", "test_numbers"]
    dicts = [{"file_name": "x.jpg", "label": 2}, {"file_name": "y.jpg", "label": 0}]
    DatasetCatalog.register("test_labels", lambda: dicts)
    MetadataCatalog.get("test_labels").set(thing_classes=["a", "b", "c"])
    DatasetCatalog.register("test_numbers", lambda: dicts)
    named = load_image_index(["test_labels"])
    assert named.labels.tolist() == [2, 0] and named.classes == ("a", "b", "c")
    assert load_image_index(["test_numbers"]).classes == ("0", "1", "2")


def test_a_folder_without_images_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds no image.*\.jpg.*\.tiff") as error:
        load_image_index([touch(tmp_path, "a/note.txt")])
    assert str(tmp_path) in str(error.value)


def test_unknown_names_list_close_ones(tmp_path):
    with pytest.raises(ValueError, match="'imagenet_trian' is neither.*imagenet_train"):
        load_image_index(["imagenet_trian"])
    with pytest.raises(ValueError, match="neither a registered data set nor a folder") as error:
        load_image_index([str(tmp_path / "none")])
    assert "DATASETS.TRAIN" in str(error.value)


@pytest.mark.parametrize("names", [(), "imagenet_train"])
def test_names_must_be_a_tuple(names):
    with pytest.raises(ValueError, match="tuple of at least one"):
        load_image_index(names)


def test_missing_annotations_name_the_file(registered):
    registered.append("test_missing")
    register_coco_instances("test_missing", {}, "no/such.json", "no")
    with pytest.raises(FileNotFoundError, match="'no/such.json'.*DETECTRON2_DATASETS"):
        load_image_index(["test_missing"])


def test_a_sentence_of_the_data_set_itself_is_kept(registered):
    def dicts():
        raise FileNotFoundError("Render it with this command.")

    registered.append("test_sentence")
    DatasetCatalog.register("test_sentence", dicts)
    with pytest.raises(FileNotFoundError, match="^Render it with this command.$"):
        load_image_index(["test_sentence"])


def test_sets_that_name_no_files(registered):
    registered += ["test_nameless", "test_empty"]
    DatasetCatalog.register("test_nameless", lambda: [{"image": 1}])
    DatasetCatalog.register("test_empty", lambda: [])
    with pytest.raises(ValueError, match="'test_nameless'.*'file_name'"):
        load_image_index(["test_nameless"])
    with pytest.raises(FileNotFoundError, match="'test_empty' holds no image"):
        load_image_index(["test_empty"])


def test_imagenet_is_looked_for_under_detectron2s_root(tmp_path):
    """In a process of its own: detectron2's root is read from the environment on import."""
    script = """
import pathlib
from moco_d2.data.datasets import load_image_index
for split in ("train", "val"):
    try:
        load_image_index([f"imagenet_{split}"])
    except FileNotFoundError as error:
        print(error)
    folder = pathlib.Path("sets/imagenet", split, "n01440764")
    folder.mkdir(parents=True)
    (folder / "1.JPEG").touch()
    print(len(load_image_index([f"imagenet_{split}"])))
"""
    environment = os.environ | {
        "DETECTRON2_DATASETS": "sets",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    output = subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert [output[1], output[3]] == ["1", "1"]
    for message, split in ((output[0], "train"), (output[2], "val")):
        assert repr(os.path.join("sets", "imagenet", split)) in message
        assert "set DETECTRON2_DATASETS" in message
        assert "DATASETS.TRAIN \"('path/to/images',)\"" in message


def test_an_index_costs_bytes():
    count = 200_000
    paths = [f"imagenet/train/n{i % 1000:08d}/n{i % 1000:08d}_{i}.JPEG" for i in range(count)]
    index = ImageIndex(paths, [i % 1000 for i in range(count)], [str(i) for i in range(1000)])
    assert index.nbytes <= sum(map(len, paths)) + 16 * count + 8
    assert len(pickle.dumps(index)) < index.nbytes + 20_000  # nothing else in it grows with N
    for i in (0, 1, 123_456, count - 1):
        assert index.path(i) == paths[i]
