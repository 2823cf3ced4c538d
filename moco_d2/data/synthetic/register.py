"""Registers the built-in data sets with detectron2, as ``moco_demo_*``; importing it is enough."""

import os
from functools import partial
from pathlib import Path
from typing import Any

from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data.catalog import Metadata
from detectron2.data.datasets import load_coco_json, load_voc_instances

from moco_d2.data.synthetic.figures import (
    KEYPOINT_CONNECTION_RULES,
    KEYPOINT_FLIP_MAP,
    KEYPOINT_NAMES,
)
from moco_d2.data.synthetic.layouts import LAYOUTS, ClassFolders, Coco, Layout, Voc
from moco_d2.data.synthetic.pictures import IGNORE_LABEL, OBJECT_SIDE
from moco_d2.data.synthetic.sets import SETS, DemoSet
from moco_d2.data.synthetic.writer import read_manifest


def demo_root() -> Path:
    """Where the registered sets are looked for: ``$DETECTRON2_DATASETS/moco_demo``."""
    return Path(os.getenv("DETECTRON2_DATASETS", "datasets")).expanduser() / "moco_demo"


class DemoMetadata(Metadata):
    """Metadata whose paths follow ``$DETECTRON2_DATASETS`` at the time when they are read.

    Attributes:
        locations: paths relative to :func:`demo_root`, by attribute, e.g. "json_file".
    """

    def __getattr__(self, key: str) -> Any:
        locations = self.__dict__.get("locations", {})
        if key in locations:
            return str(demo_root() / locations[key])
        return super().__getattr__(key)


def register_demo_datasets() -> None:
    """Register every set in every layout. Reads nothing; sets registered already are kept.

    The names are ``moco_demo_objects_{train,val}``, ``moco_demo_{scenes,novel,figures}_{train,
    test}`` in COCO layout and ``moco_demo_{scenes,novel}_voc_{train,test}``. Loading a set that is
    not rendered raises FileNotFoundError with the command that renders it.
    """
    for layout_name, families in LAYOUTS.items():
        for demo_set in SETS.values():
            layout = families.get(demo_set.family)
            if layout is None:
                continue
            name = f"moco_demo_{demo_set.family}{layout.suffix}_{demo_set.split}"
            if name in DatasetCatalog:
                continue
            DatasetCatalog.register(name, partial(_load, name, demo_set, layout_name))
            _, describe = _READERS[type(layout)]
            locations = layout.locations(demo_set)
            description = describe(demo_set)
            MetadataCatalog[name] = DemoMetadata(name=name, locations=locations, **description)


def _load(name: str, demo_set: DemoSet, layout_name: str) -> list[dict[str, Any]]:
    root = demo_root()
    manifest = read_manifest(root, demo_set, layout_name)
    if manifest is None or not manifest["finished"]:
        raise FileNotFoundError(
            f"The built-in data set {name} is not in {root}, or not completely; render it with: "
            f"python -m moco_d2.data.synthetic {root} --layout {layout_name}"
        )
    layout = LAYOUTS[layout_name][demo_set.family]
    load, _ = _READERS[type(layout)]
    return load(name, demo_set, layout, manifest["size"])


def _load_folders(name: str, demo_set: DemoSet, layout: Layout, size: int) -> list[dict]:
    root = demo_root()
    return [
        {
            "file_name": str(root / layout.files(demo_set, number)["image"]),
            "image_id": number,
            "label": layout.label(demo_set, number),
            "height": OBJECT_SIDE,
            "width": OBJECT_SIDE,
        }
        for number in range(1, size + 1)
    ]


def _describe_folders(demo_set: DemoSet) -> dict[str, Any]:
    classes = list(demo_set.classes)
    return {"evaluator_type": "image_folder", "classes": classes, "thing_classes": classes}


def _load_coco(name: str, demo_set: DemoSet, layout: Layout, size: int) -> list[dict]:
    metadata = MetadataCatalog.get(name)
    records = load_coco_json(metadata.json_file, metadata.image_root, name)
    for record in records:
        semantic = layout.files(demo_set, record["image_id"])["semantic"]
        record["sem_seg_file_name"] = str(demo_root() / semantic)
    return records


def _describe_coco(demo_set: DemoSet) -> dict[str, Any]:
    description = {
        "evaluator_type": "coco",
        "thing_classes": list(demo_set.classes),
        "thing_dataset_id_to_contiguous_id": {i + 1: i for i in range(len(demo_set.classes))},
        # The labels of the PNGs, in order; pixels of IGNORE_LABEL are not scored.
        "stuff_classes": ["background", *demo_set.classes],
        "ignore_label": IGNORE_LABEL,
    }
    if demo_set.family == "figures":
        description |= {
            "keypoint_names": KEYPOINT_NAMES,
            "keypoint_flip_map": KEYPOINT_FLIP_MAP,
            "keypoint_connection_rules": KEYPOINT_CONNECTION_RULES,
        }
    return description


def _load_voc(name: str, demo_set: DemoSet, layout: Layout, size: int) -> list[dict]:
    return load_voc_instances(MetadataCatalog.get(name).dirname, demo_set.split, demo_set.classes)


def _describe_voc(demo_set: DemoSet) -> dict[str, Any]:
    return {
        "evaluator_type": "pascal_voc",
        "thing_classes": list(demo_set.classes),
        "split": demo_set.split,
        # Which definition of AP detectron2's evaluator takes: the area under the curve.
        "year": 2012,
    }


# How a layout is read into detectron2's dicts, and what its metadata says.
_READERS = {
    ClassFolders: (_load_folders, _describe_folders),
    Coco: (_load_coco, _describe_coco),
    Voc: (_load_voc, _describe_voc),
}

register_demo_datasets()
