"""The layouts of COCO and LVIS: images, and one JSON of all annotations."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from moco_d2.data.synthetic.figures import KEYPOINT_CONNECTION_RULES, KEYPOINT_NAMES
from moco_d2.data.synthetic.files import write_image, write_text
from moco_d2.data.synthetic.outlines import mask_to_box, mask_to_polygons
from moco_d2.data.synthetic.pictures import IGNORE_LABEL, Instance
from moco_d2.data.synthetic.sets import DemoSet


class Coco:
    """Images, one JSON of boxes, polygons and keypoints, and a PNG of semantic labels each."""

    suffix = ""
    revision = 0

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
        write_image(root / files["image"], picture.image)
        write_image(root / files["semantic"], picture.semantic)
        height, width = picture.image.shape[:2]
        name = Path(files["image"]).name
        image = {"id": number, "file_name": name, "height": height, "width": width}
        annotations = [{"image_id": number} | _annotation(i) for i in picture.instances]
        return {"image": image, "annotations": annotations}

    def finish(self, root, demo_set, records):
        _write_json(
            root / self.locations(demo_set)["json_file"], demo_set, records, _categories(demo_set)
        )


class Lvis:
    """LVIS v0.5: as COCO, but each class is annotated in a part of the images only.

    ``neg_category_ids`` of an image are classes known to be absent from it. In classes that are
    neither annotated nor known to be absent, nothing that is found in it is scored. Classes in
    ``not_exhaustive_category_ids`` may have instances that are not annotated.
    """

    suffix = "_lvis"
    revision = 0

    def locations(self, demo_set):
        folder = demo_set.family + self.suffix
        return {
            "json_file": f"{folder}/annotations/lvis_v0.5_{demo_set.split}.json",
            # detectron2 adds the last folder of each image's URL, which is the split.
            "image_root": f"{folder}/images",
        }

    def files(self, demo_set, number):
        folder = self.locations(demo_set)["image_root"]
        return {"image": f"{folder}/{demo_set.split}/{number:06d}.png"}

    def write(self, root, demo_set, number, picture):
        file = self.files(demo_set, number)["image"]
        write_image(root / file, picture.image)
        annotations = [_annotation(i, keys=_LVIS_KEYS) for i in picture.instances]
        present = {a["category_id"] for a in annotations}
        absent = set(range(1, len(demo_set.classes) + 1)) - present
        # Of an object that is seen too little to be annotated, the class may be any.
        unsure = bool(np.any(picture.semantic == IGNORE_LABEL))
        height, width = picture.image.shape[:2]
        image = {
            "id": number,
            "file_name": Path(file).name,
            "coco_url": f"{demo_set.split}/{Path(file).name}",
            "height": height,
            "width": width,
            # Every second class, in turns: the others are unknown.
            "neg_category_ids": [] if unsure else sorted(c for c in absent if (c + number) % 2),
            "not_exhaustive_category_ids": sorted(present) if unsure else [],
        }
        return {"image": image, "annotations": [{"image_id": number} | a for a in annotations]}

    def finish(self, root, demo_set, records):
        annotations = [a for record in records for a in record["annotations"]]
        instances = Counter(a["category_id"] for a in annotations)
        images = Counter(c for c, _ in {(a["category_id"], a["image_id"]) for a in annotations})
        categories = [
            category
            | {
                "synonyms": [category["name"]],
                "synset": f"{category['name']}.n.01",
                "def": f"a {category['name'].replace('_', ' ')}",
                "image_count": images[category["id"]],
                "instance_count": instances[category["id"]],
                "frequency": _frequency(images[category["id"]]),
            }
            for category in _categories(demo_set)
        ]
        _write_json(root / self.locations(demo_set)["json_file"], demo_set, records, categories)


_LVIS_KEYS = ("category_id", "bbox", "segmentation", "area")


def _frequency(image_count: int) -> str:
    """LVIS's bins: rare in up to 10 images, common in up to 100, else frequent."""
    return "r" if image_count <= 10 else "c" if image_count <= 100 else "f"


def _write_json(path: Path, demo_set: DemoSet, records: list[Any], categories: list[Any]) -> None:
    annotations = [a for record in records for a in record["annotations"]]
    content = {
        "info": {"description": f"Built-in data set of moco_d2, {demo_set.name}"},
        "images": [record["image"] for record in records],
        "categories": categories,
        "annotations": [{"id": i} | a for i, a in enumerate(annotations, start=1)],
    }
    write_text(path, json.dumps(content))


def _categories(demo_set: DemoSet) -> list[dict[str, Any]]:
    categories = [{"id": i, "name": name} for i, name in enumerate(demo_set.classes, start=1)]
    if demo_set.family == "figures":
        number = {name: i for i, name in enumerate(KEYPOINT_NAMES, start=1)}
        skeleton = [[number[start], number[end]] for start, end, _ in KEYPOINT_CONNECTION_RULES]
        for category in categories:
            category.update(keypoints=list(KEYPOINT_NAMES), skeleton=skeleton)
    return categories


def _annotation(instance: Instance, keys: tuple[str, ...] = ()) -> dict[str, Any]:
    """All of an annotation, or some keys of it, but the ids of itself and of its image.

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
    return {key: annotation[key] for key in keys} if keys else annotation
