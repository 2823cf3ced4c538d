"""How a set lies on disk: class folders, COCO or VOC. Paths are relative to the data's root."""

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any, Protocol

import cv2
import numpy as np

from moco_d2.data.synthetic.figures import KEYPOINT_CONNECTION_RULES, KEYPOINT_NAMES
from moco_d2.data.synthetic.outlines import mask_to_polygons
from moco_d2.data.synthetic.pictures import Instance, Picture
from moco_d2.data.synthetic.sets import DemoSet

# VOC wants JPEG. With full colour resolution, since the textures are a few pixels fine.
_JPEG_SETTINGS = [
    cv2.IMWRITE_JPEG_QUALITY,
    98,
    cv2.IMWRITE_JPEG_SAMPLING_FACTOR,
    cv2.IMWRITE_JPEG_SAMPLING_FACTOR_444,
]


class Layout(Protocol):
    """The files of a set in one layout.

    Attributes:
        suffix: what the family's name gets in the name of its folder and of the registered set.
        min_size: the smallest set that detectron2 can read.
    """

    suffix: str
    min_size: int

    def locations(self, demo_set: DemoSet) -> dict[str, str]:
        """Where the set's parts are, by the name that detectron2's metadata has for each."""

    def files(self, demo_set: DemoSet, number: int) -> dict[str, str]:
        """The files of one picture, by kind. They depend on nothing else, not even the seed."""

    def write(self, root: Path, demo_set: DemoSet, number: int, picture: Picture) -> Any:
        """Write the files of one picture and return what ``finish`` needs of it."""

    def finish(self, root: Path, demo_set: DemoSet, records: list[Any]) -> None:
        """Write what belongs to the set as a whole, given the records of its pictures."""


class ClassFolders:
    """One folder of images per class, as ImageNet is laid out."""

    suffix = ""
    min_size = 1

    def locations(self, demo_set):
        return {"image_root": f"{demo_set.family}/{demo_set.split}"}

    def files(self, demo_set, number):
        folder = self.locations(demo_set)["image_root"]
        class_name = demo_set.classes[self.label(demo_set, number)]
        return {"image": f"{folder}/{class_name}/{number:06d}.png"}

    def label(self, demo_set: DemoSet, number: int) -> int:
        """The class of picture ``number``: classes take turns."""
        return (number - 1) % len(demo_set.classes)

    def write(self, root, demo_set, number, picture):
        _write_image(root / self.files(demo_set, number)["image"], picture.image)

    def finish(self, root, demo_set, records):
        """Folders need no index."""


class Coco:
    """Images, one JSON of boxes, polygons and keypoints, and a PNG of semantic labels each."""

    suffix = ""
    min_size = 1

    def locations(self, demo_set):
        family, split = demo_set.family, demo_set.split
        return {
            "json_file": f"{family}/annotations/instances_{split}.json",
            "image_root": f"{family}/images/{split}",
            "sem_seg_root": f"{family}/labels/{split}",
        }

    def files(self, demo_set, number):
        folders = self.locations(demo_set)
        return {
            "image": f"{folders['image_root']}/{number:06d}.png",
            "semantic": f"{folders['sem_seg_root']}/{number:06d}.png",
        }

    def write(self, root, demo_set, number, picture):
        files = self.files(demo_set, number)
        _write_image(root / files["image"], picture.image)
        _write_image(root / files["semantic"], picture.semantic)
        height, width = picture.image.shape[:2]
        name = Path(files["image"]).name
        image = {"id": number, "file_name": name, "height": height, "width": width}
        annotations = [{"image_id": number} | _coco_annotation(i) for i in picture.instances]
        return {"image": image, "annotations": annotations}

    def finish(self, root, demo_set, records):
        annotations = [a for record in records for a in record["annotations"]]
        content = {
            "info": {"description": f"Built-in data set of moco_d2, {demo_set.name}"},
            "images": [record["image"] for record in records],
            "categories": _coco_categories(demo_set),
            "annotations": [{"id": i} | a for i, a in enumerate(annotations, start=1)],
        }
        _write_text(root / self.locations(demo_set)["json_file"], json.dumps(content))


class Voc:
    """Pascal VOC: JPEGImages, Annotations, SegmentationClass and lists in ImageSets."""

    suffix = "_voc"
    # detectron2 reads the list of images with numpy.loadtxt, which makes no list of one line.
    min_size = 2

    def locations(self, demo_set):
        return {"dirname": demo_set.family + self.suffix}

    def files(self, demo_set, number):
        folder, name = self.locations(demo_set)["dirname"], f"{demo_set.split}_{number:06d}"
        return {
            "image": f"{folder}/JPEGImages/{name}.jpg",
            "annotation": f"{folder}/Annotations/{name}.xml",
            "semantic": f"{folder}/SegmentationClass/{name}.png",
        }

    def write(self, root, demo_set, number, picture):
        files = self.files(demo_set, number)
        _write_image(root / files["image"], picture.image)
        _write_image(root / files["semantic"], picture.semantic)
        _write_text(root / files["annotation"], _voc_annotation(demo_set, files, picture))
        return Path(files["image"]).stem

    def finish(self, root, demo_set, records):
        folder = root / self.locations(demo_set)["dirname"] / "ImageSets"
        for task in ("Main", "Segmentation"):
            _write_text(folder / task / f"{demo_set.split}.txt", "\n".join(records) + "\n")


# Which layout a family is written in, by the layout that the user asks for. VOC knows no keypoints.
_FOLDERS, _COCO, _VOC = ClassFolders(), Coco(), Voc()
LAYOUTS: dict[str, dict[str, Layout]] = {
    "coco": {"objects": _FOLDERS, "scenes": _COCO, "novel": _COCO, "figures": _COCO},
    "voc": {"objects": _FOLDERS, "scenes": _VOC, "novel": _VOC},
}


def mask_to_box(mask: np.ndarray) -> tuple[int, int, int, int]:
    """The smallest box x0, y0, x1, y1 around a mask that is not empty; x1 and y1 are exclusive."""
    columns, rows = np.flatnonzero(mask.any(axis=0)), np.flatnonzero(mask.any(axis=1))
    return int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1


def _coco_categories(demo_set: DemoSet) -> list[dict[str, Any]]:
    categories = [{"id": i, "name": name} for i, name in enumerate(demo_set.classes, start=1)]
    if demo_set.family == "figures":
        number = {name: i for i, name in enumerate(KEYPOINT_NAMES, start=1)}
        skeleton = [[number[start], number[end]] for start, end, _ in KEYPOINT_CONNECTION_RULES]
        for category in categories:
            category.update(keypoints=list(KEYPOINT_NAMES), skeleton=skeleton)
    return categories


def _coco_annotation(instance: Instance) -> dict[str, Any]:
    """All of an annotation but the ids of itself and of its image.

    Coordinates are floats though they are whole: detectron2 scales integers with truncation.
    """
    x0, y0, x1, y1 = mask_to_box(instance.mask)
    annotation = {
        "category_id": instance.label + 1,
        "bbox": [float(x0), float(y0), float(x1 - x0), float(y1 - y0)],
        "segmentation": mask_to_polygons(instance.mask),
        "area": int(np.count_nonzero(instance.mask)),
        "iscrowd": 0,
    }
    if instance.keypoints is not None:
        annotation["keypoints"] = instance.keypoints.ravel().tolist()
        annotation["num_keypoints"] = int(np.count_nonzero(instance.keypoints[:, 2]))
    return annotation


def _voc_annotation(demo_set: DemoSet, files: dict[str, str], picture: Picture) -> str:
    height, width = picture.image.shape[:2]
    root = ET.Element("annotation")
    _add(root, "filename", Path(files["image"]).name)
    size = ET.SubElement(root, "size")
    for tag, value in (("width", width), ("height", height), ("depth", 3)):
        _add(size, tag, value)
    _add(root, "segmented", 1)
    for instance in picture.instances:
        x0, y0, x1, y1 = mask_to_box(instance.mask)
        thing = ET.SubElement(root, "object")
        _add(thing, "name", demo_set.classes[instance.label])
        _add(thing, "pose", "Unspecified")
        _add(thing, "truncated", int(min(x0, y0) == 0 or x1 == width or y1 == height))
        _add(thing, "difficult", 0)
        box = ET.SubElement(thing, "bndbox")
        # VOC counts pixels from 1 and includes the last one.
        for tag, value in (("xmin", x0 + 1), ("ymin", y0 + 1), ("xmax", x1), ("ymax", y1)):
            _add(box, tag, value)
    ET.indent(root)
    return ET.tostring(root, encoding="unicode") + "\n"


def _add(parent: ET.Element, tag: str, value: Any) -> None:
    ET.SubElement(parent, tag).text = str(value)


def _write_image(path: Path, image: np.ndarray) -> None:
    """Encode uint8 labels (H, W) or colours (H, W, 3), RGB, as the file's name asks for."""
    stored = image[..., ::-1] if image.ndim == 3 else image  # OpenCV takes BGR
    settings = _JPEG_SETTINGS if path.suffix == ".jpg" else []
    _, code = cv2.imencode(path.suffix, stored, settings)
    _write_bytes(path, code.tobytes())


def _write_text(path: Path, text: str) -> None:
    _write_bytes(path, text.encode())


def _write_bytes(path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
