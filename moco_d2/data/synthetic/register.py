"""Registers the built-in data sets with detectron2, as ``moco_demo_*``; importing it is enough."""

import os
from functools import partial
from pathlib import Path
from typing import Any

from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data.catalog import Metadata
from detectron2.data.datasets import load_coco_json
from detectron2.data.datasets.cityscapes import (
    load_cityscapes_instances,
    load_cityscapes_semantic,
)
from detectron2.data.datasets.lvis import load_lvis_json

from moco_d2.data.synthetic.figures import (
    KEYPOINT_CONNECTION_RULES,
    KEYPOINT_FLIP_MAP,
    KEYPOINT_NAMES,
)
from moco_d2.data.synthetic.layouts import (
    LAYOUTS,
    Cityscapes,
    ClassFolders,
    Coco,
    Layout,
    Lvis,
    Voc,
)
from moco_d2.data.synthetic.pictures import IGNORE_LABEL, OBJECT_SIDE, SCENE_SIDE
from moco_d2.data.synthetic.sets import SETS, DemoSet
from moco_d2.data.synthetic.writer import read_manifest
from moco_d2.data.voc import load_voc_instances


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

    The names are "moco_demo_" and

    - ``objects_{train,val}``, in class folders;
    - ``{scenes,novel,figures}_{train,val,test}``, in COCO's layout;
    - ``{scenes,novel}_{lvis,voc,voc_sem_seg,cityscapes_instance,cityscapes_sem_seg}_{split}``.

    Loading a set that is not rendered raises FileNotFoundError with the command that renders it.
    """
    for layout_name, families in LAYOUTS.items():
        for demo_set in SETS.values():
            layout = families.get(demo_set.family)
            if layout is None:
                continue
            for task, (_, describe) in _READERS[type(layout)].items():
                name = f"moco_demo_{demo_set.family}{layout.suffix}{task}_{demo_set.split}"
                if name in DatasetCatalog:
                    continue
                DatasetCatalog.register(name, partial(_load, name, demo_set, layout_name, task))
                locations, description = layout.locations(demo_set), describe(demo_set)
                MetadataCatalog[name] = DemoMetadata(name=name, locations=locations, **description)


def _load(name: str, demo_set: DemoSet, layout_name: str, task: str) -> list[dict[str, Any]]:
    root = demo_root()
    manifest = read_manifest(root, demo_set, layout_name)
    if manifest is None or not manifest["finished"]:
        raise FileNotFoundError(
            f"The built-in data set {name} is not in {root}, or not completely; render it with: "
            f"python -m moco_d2.data.synthetic {root} --layout {layout_name}"
        )
    layout = LAYOUTS[layout_name][demo_set.family]
    load, _ = _READERS[type(layout)][task]
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


def _load_voc_semantic(name: str, demo_set: DemoSet, layout: Layout, size: int) -> list[dict]:
    labels = "semantic_aug" if demo_set.split == "train" else "semantic"
    root = demo_root()
    records = []
    for number in range(1, size + 1):
        files = layout.files(demo_set, number)
        records.append(
            {
                "file_name": str(root / files["image"]),
                "sem_seg_file_name": str(root / files[labels]),
                "image_id": Path(files["image"]).stem,
                "height": SCENE_SIDE,
                "width": SCENE_SIDE,
            }
        )
    return records


def _describe_semantic(demo_set: DemoSet) -> dict[str, Any]:
    return {
        "evaluator_type": "sem_seg",
        "stuff_classes": ["background", *demo_set.classes],
        "ignore_label": IGNORE_LABEL,
    }


def _load_lvis(name: str, demo_set: DemoSet, layout: Layout, size: int) -> list[dict]:
    metadata = MetadataCatalog.get(name)
    # detectron2 puts no slash behind the folder.
    return load_lvis_json(metadata.json_file, metadata.image_root + "/")


def _describe_lvis(demo_set: DemoSet) -> dict[str, Any]:
    return {"evaluator_type": "lvis", "thing_classes": list(demo_set.classes)}


def _load_cityscapes(name: str, demo_set: DemoSet, layout: Layout, size: int) -> list[dict]:
    metadata = MetadataCatalog.get(name)
    # The PNGs are exact, and reading the polygons needs another package, shapely.
    return load_cityscapes_instances(metadata.image_dir, metadata.gt_dir, from_json=False)


def _load_cityscapes_semantic(
    name: str, demo_set: DemoSet, layout: Layout, size: int
) -> list[dict]:
    metadata = MetadataCatalog.get(name)
    return load_cityscapes_semantic(metadata.image_dir, metadata.gt_dir)


def _describe_cityscapes(evaluator_type: str, demo_set: DemoSet) -> dict[str, Any]:
    classes = MetadataCatalog.get("cityscapes_fine_sem_seg_val")
    return {
        "evaluator_type": evaluator_type,
        "thing_classes": classes.thing_classes,
        "stuff_classes": classes.stuff_classes,
        "ignore_label": IGNORE_LABEL,
    }


# How a layout is read into detectron2's dicts, and what its metadata says, by task: what the name
# of the registered set has between those of the layout and the split.
_READERS = {
    ClassFolders: {"": (_load_folders, _describe_folders)},
    Coco: {"": (_load_coco, _describe_coco)},
    Voc: {
        "": (_load_voc, _describe_voc),
        "_sem_seg": (_load_voc_semantic, _describe_semantic),
    },
    Lvis: {"": (_load_lvis, _describe_lvis)},
    Cityscapes: {
        "_instance": (_load_cityscapes, partial(_describe_cityscapes, "cityscapes_instance")),
        "_sem_seg": (
            _load_cityscapes_semantic,
            partial(_describe_cityscapes, "cityscapes_sem_seg"),
        ),
    },
}

register_demo_datasets()
