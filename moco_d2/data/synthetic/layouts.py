"""How a set lies on disk, by the layout asked for. Paths are relative to the data's root."""

from pathlib import Path
from typing import Any, Protocol

from moco_d2.data.synthetic.cityscapes_layout import Cityscapes
from moco_d2.data.synthetic.coco_layouts import Coco, Lvis
from moco_d2.data.synthetic.files import write_image
from moco_d2.data.synthetic.pictures import Picture
from moco_d2.data.synthetic.sets import DemoSet
from moco_d2.data.synthetic.voc_layout import Voc


class Layout(Protocol):
    """The files of a set in one layout.

    Attributes:
        suffix: what the family's name gets in the name of its folder and of the registered set.
        revision: raised whenever the layout gets other files, and old ones are replaced.
    """

    suffix: str
    revision: int

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
    revision = 0

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
        write_image(root / self.files(demo_set, number)["image"], picture.image)

    def finish(self, root, demo_set, records):
        """Folders need no index."""


# Which layout a family is written in, by the layout that the user asks for. Only COCO has
# keypoints.
_FOLDERS, _COCO, _VOC, _LVIS, _CITYSCAPES = ClassFolders(), Coco(), Voc(), Lvis(), Cityscapes()
LAYOUTS: dict[str, dict[str, Layout]] = {
    "coco": {"objects": _FOLDERS, "scenes": _COCO, "novel": _COCO, "figures": _COCO},
    "voc": {"objects": _FOLDERS, "scenes": _VOC, "novel": _VOC},
    "lvis": {"objects": _FOLDERS, "scenes": _LVIS, "novel": _LVIS},
    "cityscapes": {"objects": _FOLDERS, "scenes": _CITYSCAPES, "novel": _CITYSCAPES},
}
