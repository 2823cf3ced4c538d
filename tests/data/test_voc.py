"""Pascal VOC as it lies on disk: semantic sets, and detection sets of one picture."""

import pytest
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data.datasets import load_voc_instances as detectron2s

import moco_d2  # noqa: F401 (registers)
from moco_d2.data.voc import load_voc_instances


def write_sem_seg(root, lists, names=("2007_000032", "2007_000039")):
    for folder, suffix in (
        ("JPEGImages", "jpg"),
        ("SegmentationClass", "png"),
        ("SegmentationClassAug", "png"),
    ):
        (root / folder).mkdir(parents=True, exist_ok=True)
        for name in names:
            (root / folder / f"{name}.{suffix}").touch()
    for path, text in lists.items():
        file = root / "ImageSets" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


@pytest.fixture
def voc(tmp_path, monkeypatch):
    monkeypatch.setenv("DETECTRON2_DATASETS", str(tmp_path))
    return tmp_path / "VOC2012"


@pytest.mark.parametrize(
    "file, text",
    [
        ("Segmentation/train_aug.txt", "2007_000032\n2007_000039\n"),
        ("Segmentation/trainaug.txt", "2007_000032\r\n2007_000039\r\n\r\n"),
        (
            "SegmentationAug/train_aug.txt",
            "/JPEGImages/2007_000032.jpg /SegmentationClassAug/2007_000032.png\n"
            "/JPEGImages/2007_000039.jpg /SegmentationClassAug/2007_000039.png\n",
        ),
    ],
)
def test_train_aug_is_read_from_the_lists_in_use(voc, file, text):
    write_sem_seg(voc, {file: text, "Segmentation/val.txt": "2007_000033\n"})
    assert DatasetCatalog.get("voc_2012_sem_seg_train_aug") == [
        {
            "file_name": str(voc / "JPEGImages" / f"{name}.jpg"),
            "sem_seg_file_name": str(voc / "SegmentationClassAug" / f"{name}.png"),
            "image_id": name,
        }
        for name in ("2007_000032", "2007_000039")
    ]


def test_val_is_vocs_own(voc):
    write_sem_seg(voc, {"Segmentation/val.txt": "2007_000039\n"})
    (record,) = DatasetCatalog.get("voc_2012_sem_seg_val")
    assert record["sem_seg_file_name"] == str(voc / "SegmentationClass" / "2007_000039.png")
    metadata = MetadataCatalog.get("voc_2012_sem_seg_val")
    assert len(metadata.stuff_classes) == 21 and metadata.stuff_classes[15] == "person"
    assert (metadata.evaluator_type, metadata.ignore_label) == ("sem_seg", 255)


def test_what_is_missing_or_leaks_is_named(voc):
    with pytest.raises(FileNotFoundError, match="no .*Segmentation/train_aug.txt; docs/transfer"):
        DatasetCatalog.get("voc_2012_sem_seg_train_aug")
    lists = {"Segmentation/train_aug.txt": "a\nb\n", "Segmentation/val.txt": "b\nc\n"}
    write_sem_seg(voc, lists, names="abc")
    with pytest.raises(ValueError, match="names 1 pictures of val, such as b"):
        DatasetCatalog.get("voc_2012_sem_seg_train_aug")
    (voc / "SegmentationClass" / "b.png").unlink()
    with pytest.raises(FileNotFoundError, match="there is no .*SegmentationClass/b.png"):
        DatasetCatalog.get("voc_2012_sem_seg_val")


def write_detection(root, names):
    for folder in ("Annotations", "ImageSets/Main"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    (root / "ImageSets" / "Main" / "test.txt").write_text("".join(f"{n}\n" for n in names))
    for i, name in enumerate(names):
        corners = zip(("xmin", "ymin", "xmax", "ymax"), (1 + i, 2, 30, 40 + i), strict=True)
        box = "".join(f"<{key}>{value}</{key}>" for key, value in corners)
        (root / "Annotations" / f"{name}.xml").write_text(
            "<annotation><size><width>50</width><height>60</height></size>"
            f"<object><name>dog</name><bndbox>{box}</bndbox></object></annotation>"
        )


def test_detection_sets_are_detectron2s_and_may_hold_one_picture(tmp_path):
    write_detection(tmp_path, ["000001", "000002"])
    records = load_voc_instances(str(tmp_path), "test", ("cat", "dog"))
    assert records == detectron2s(str(tmp_path), "test", ("cat", "dog"))
    write_detection(tmp_path, ["000001"])
    assert load_voc_instances(str(tmp_path), "test", ("cat", "dog")) == records[:1]
    assert DatasetCatalog["voc_2007_test"].func is load_voc_instances
    assert MetadataCatalog.get("voc_2007_test").evaluator_type == "pascal_voc"
