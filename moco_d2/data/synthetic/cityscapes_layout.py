"""The layout of Cityscapes, whose classes are fixed: a shape becomes a kind of road user."""

import json
from collections import Counter

import numpy as np

from moco_d2.data.synthetic.files import write_image, write_text
from moco_d2.data.synthetic.outlines import mask_to_outline
from moco_d2.data.synthetic.pictures import IGNORE_LABEL, Picture
from moco_d2.data.synthetic.shapes import SHAPES

# Cityscapes' labels as name, id, trainId. Things are in the order of its trainIds; the shapes, of
# any texture, take them in the order of SHAPES.
_UNLABELED = ("unlabeled", 0, 255)
_ROAD = ("road", 7, 0)  # the background
_THINGS = (
    ("person", 24, 11),
    ("rider", 25, 12),
    ("car", 26, 13),
    ("truck", 27, 14),
    ("bus", 28, 15),
    ("train", 31, 16),
    ("motorcycle", 32, 17),
    ("bicycle", 33, 18),
)
_THING_OF_SHAPE = dict(zip(SHAPES, _THINGS, strict=True))
_CITY = "demo"


class Cityscapes:
    """leftImg8bit and gtFine: polygons, and PNGs of labels, of trainIds and of instances."""

    suffix = "_cityscapes"
    revision = 0

    def locations(self, demo_set):
        folder = demo_set.family + self.suffix
        return {
            "image_dir": f"{folder}/leftImg8bit/{demo_set.split}",
            "gt_dir": f"{folder}/gtFine/{demo_set.split}",
        }

    def files(self, demo_set, number):
        folders, name = self.locations(demo_set), f"{_CITY}/{_CITY}_000000_{number:06d}"
        truth = f"{folders['gt_dir']}/{name}_gtFine"
        return {
            "image": f"{folders['image_dir']}/{name}_leftImg8bit.png",
            "labels": f"{truth}_labelIds.png",
            "train_labels": f"{truth}_labelTrainIds.png",
            "instances": f"{truth}_instanceIds.png",
            "polygons": f"{truth}_polygons.json",
        }

    def write(self, root, demo_set, number, picture):
        files = self.files(demo_set, number)
        things = [thing_of_class(demo_set.classes[i.label]) for i in picture.instances]
        write_image(root / files["image"], picture.image)
        write_image(root / files["labels"], _paint(picture, things, 1).astype(np.uint8))
        write_image(root / files["train_labels"], _paint(picture, things, 2).astype(np.uint8))
        write_image(root / files["instances"], _paint_instances(picture, things))
        write_text(root / files["polygons"], json.dumps(_polygons(picture, things)))

    def finish(self, root, demo_set, records):
        """Cityscapes' folders need no index."""


def thing_of_class(class_name: str) -> tuple[str, int, int]:
    """Cityscapes' name, id and trainId for a class "texture_shape"."""
    return _THING_OF_SHAPE[class_name.split("_")[1]]


def _paint(picture: Picture, things: list[tuple], field: int) -> np.ndarray:
    """Labels (H, W): that field of what each pixel shows."""
    labels = np.where(picture.semantic == IGNORE_LABEL, _UNLABELED[field], _ROAD[field])
    for instance, thing in zip(picture.instances, things, strict=True):
        labels[instance.mask] = thing[field]
    return labels


def _paint_instances(picture: Picture, things: list[tuple]) -> np.ndarray:
    """uint16 (H, W): 1000 x id + the thing's number among those of its label; else the id."""
    labels, seen = _paint(picture, things, 1), Counter()
    for instance, (_, label, _) in zip(picture.instances, things, strict=True):
        labels[instance.mask] = 1000 * label + seen[label]
        seen[label] += 1
    return labels.astype(np.uint16)


def _polygons(picture: Picture, things: list[tuple]) -> dict:
    """One polygon per thing, to be drawn one over the other in their order."""
    height, width = picture.image.shape[:2]
    everything = [(_ROAD[0], np.ones((height, width), bool))]
    everything += [
        (name, i.mask) for (name, _, _), i in zip(things, picture.instances, strict=True)
    ]
    hidden = picture.semantic == IGNORE_LABEL
    if hidden.any():
        everything.append((_UNLABELED[0], hidden))
    objects = [{"label": name, "polygon": mask_to_outline(mask)} for name, mask in everything]
    return {"imgHeight": height, "imgWidth": width, "objects": objects}
