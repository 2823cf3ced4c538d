"""The layout of Pascal VOC, with the further labels of SBD that the field trains on."""

import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import numpy as np

from moco_d2.data.synthetic.files import write_image, write_palette_image, write_text
from moco_d2.data.synthetic.outlines import mask_to_box
from moco_d2.data.synthetic.pictures import Picture
from moco_d2.data.synthetic.sets import DemoSet


class Voc:
    """JPEGImages, Annotations, SegmentationClass, SegmentationClassAug and lists in ImageSets.

    As there, labels in SegmentationClass are coloured by a palette, while SegmentationClassAug,
    for which ``train_aug`` is the list, has plain values.
    """

    suffix = "_voc"
    revision = 1

    def locations(self, demo_set):
        return {"dirname": demo_set.family + self.suffix}

    def files(self, demo_set, number):
        folder, name = self.locations(demo_set)["dirname"], f"{demo_set.split}_{number:06d}"
        return {
            "image": f"{folder}/JPEGImages/{name}.jpg",
            "annotation": f"{folder}/Annotations/{name}.xml",
            "semantic": f"{folder}/SegmentationClass/{name}.png",
            "semantic_aug": f"{folder}/SegmentationClassAug/{name}.png",
        }

    def write(self, root, demo_set, number, picture):
        files = self.files(demo_set, number)
        write_image(root / files["image"], picture.image)
        write_palette_image(root / files["semantic"], picture.semantic, _PALETTE)
        write_image(root / files["semantic_aug"], picture.semantic)
        write_text(root / files["annotation"], _annotation(demo_set, files, picture))
        return Path(files["image"]).stem

    def finish(self, root, demo_set, records):
        folder = root / self.locations(demo_set)["dirname"] / "ImageSets"
        split = demo_set.split
        lists = [f"Main/{split}", f"Segmentation/{split}"]
        if split == "train":
            lists.append("Segmentation/train_aug")
        for name in lists:
            write_text(folder / f"{name}.txt", "\n".join(records) + "\n")


def _palette() -> np.ndarray:
    """VOC's colours, uint8 (256, 3): bit i of channel c is bit 3 (7 - i) + c of the label."""
    labels, places = np.arange(256)[:, None, None], np.arange(8)
    bits = (labels >> (3 * (7 - places) + np.arange(3)[:, None])) & 1  # (256, 3, 8)
    return (bits << places).sum(axis=2).astype(np.uint8)


_PALETTE = _palette()


def _annotation(demo_set: DemoSet, files: dict[str, str], picture: Picture) -> str:
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
