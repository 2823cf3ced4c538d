"""Pascal VOC: the sets for semantic segmentation, and sets for detection of a single picture."""

import os
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data.datasets import pascal_voc
from detectron2.structures import BoxMode
from detectron2.utils.file_io import PathManager

from moco_d2.errors import UserError

IGNORE_LABEL = 255

# Registered name -> lists of pictures, of which the first that is there is taken, and the folder
# of labels. `train_aug` is VOC's train with the further labels of SBD, without what is in val
# (10,582 pictures); the field has several places for its list.
_SEM_SEG_SETS = {
    "voc_2012_sem_seg_train": (("Segmentation/train.txt",), "SegmentationClass"),
    "voc_2012_sem_seg_train_aug": (
        (
            "Segmentation/train_aug.txt",
            "Segmentation/trainaug.txt",
            "SegmentationAug/train_aug.txt",
        ),
        "SegmentationClassAug",
    ),
    "voc_2012_sem_seg_val": (("Segmentation/val.txt",), "SegmentationClass"),
}
_DETECTION_SETS = ("voc_2007_trainval", "voc_2007_train", "voc_2007_val", "voc_2007_test")
_DETECTION_SETS += ("voc_2012_trainval", "voc_2012_train", "voc_2012_val")


def register_voc_datasets() -> None:
    """Register the sets for segmentation, and those for detection anew; reads nothing."""
    for name, (lists, labels) in _SEM_SEG_SETS.items():
        if name not in DatasetCatalog:
            DatasetCatalog.register(name, partial(_load_sem_seg, lists, labels))
            MetadataCatalog.get(name).set(
                evaluator_type="sem_seg",
                stuff_classes=["background", *pascal_voc.CLASS_NAMES],
                ignore_label=IGNORE_LABEL,
            )
    for name in _DETECTION_SETS:
        if DatasetCatalog[name].__module__ == pascal_voc.__name__:
            metadata = MetadataCatalog.get(name)
            DatasetCatalog.remove(name)
            arguments = (metadata.dirname, metadata.split, metadata.thing_classes)
            DatasetCatalog.register(name, partial(load_voc_instances, *arguments))


def _load_sem_seg(lists: Sequence[str], labels: str) -> list[dict[str, Any]]:
    root = Path(os.getenv("DETECTRON2_DATASETS", "datasets")).expanduser() / "VOC2012"
    return load_voc_sem_seg(root, lists, labels)


def load_voc_sem_seg(root: Path, lists: Sequence[str], labels: str) -> list[dict[str, Any]]:
    """Read a list of pictures with semantic labels.

    Args:
        root: the folder with JPEGImages.
        lists: files in ImageSets, of which the first that is there is read. A line is a name,
            or the two paths "/JPEGImages/NAME.jpg /SegmentationClassAug/NAME.png".
        labels: folder of the label files.

    Raises:
        FileNotFoundError: none of the lists is there, or not the first picture or its labels.
        ValueError: a list for training names pictures of val.
    """
    folder = root / "ImageSets"
    found = next((folder / name for name in lists if (folder / name).exists()), None)
    if found is None:
        raise FileNotFoundError(
            f"there is no {folder / lists[0]}; docs/transfer.md says how VOC 2012 is laid out"
        )
    names = [Path(line.split()[0]).stem for line in read_list(found)]
    val = folder / "Segmentation" / "val.txt"
    if "train" in found.name and val.exists():
        shared = sorted(set(names) & set(read_list(val)))
        if shared:
            raise UserError(
                f"{found} names {len(shared)} pictures of val, such as {shared[0]}, so that "
                "training would see what it is tested on; take them out"
            )
    records = [
        {
            "file_name": str(root / "JPEGImages" / f"{name}.jpg"),
            "sem_seg_file_name": str(root / labels / f"{name}.png"),
            "image_id": name,
        }
        for name in names
    ]
    for key in ("file_name", "sem_seg_file_name"):
        if records and not Path(records[0][key]).exists():
            raise FileNotFoundError(f"there is no {records[0][key]}, which {found} names")
    return records


def load_voc_instances(
    dirname: str, split: str, class_names: Sequence[str]
) -> list[dict[str, Any]]:
    """As `detectron2.data.datasets.load_voc_instances`, which fails on a list of one picture.

    Args:
        dirname: the folder with Annotations, ImageSets and JPEGImages.
        split: the list ImageSets/Main/SPLIT.txt.
        class_names: in the order of the labels.

    Returns:
        detectron2's dicts, with boxes x0, y0, x1, y1 that begin at 0.
    """
    class_names = list(class_names)
    root = Path(PathManager.get_local_path(dirname))
    records = []
    for name in read_list(root / "ImageSets" / "Main" / f"{split}.txt"):
        tree = ET.parse(root / "Annotations" / f"{name}.xml")
        annotations = []
        for thing in tree.findall("object"):
            corners = [float(thing.find(f"bndbox/{key}").text) for key in _CORNERS]
            annotations.append(
                {
                    "category_id": class_names.index(thing.find("name").text),
                    # VOC counts pixels from 1 and includes the last one.
                    "bbox": [corners[0] - 1, corners[1] - 1, corners[2], corners[3]],
                    "bbox_mode": BoxMode.XYXY_ABS,
                }
            )
        records.append(
            {
                "file_name": str(root / "JPEGImages" / f"{name}.jpg"),
                "image_id": name,
                "height": int(tree.find("size/height").text),
                "width": int(tree.find("size/width").text),
                "annotations": annotations,
            }
        )
    return records


_CORNERS = ("xmin", "ymin", "xmax", "ymax")


def read_list(path: Path) -> list[str]:
    """The lines of a file that are not empty."""
    return [line.strip() for line in path.read_text().splitlines() if line.strip()]
