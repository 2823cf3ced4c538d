"""Lets detectron2's main branch read Cityscapes' instances, for which it imports a package that is
not public in place of `cityscapesscripts` (its issue 5436)."""

import importlib
import importlib.util
import sys

_PUBLIC = "cityscapesscripts.helpers.labels"
_NOT_PUBLIC = f"deeplearning.projects.cityscapesApi.{_PUBLIC}"


def provide_cityscapes_labels() -> None:
    """Answer imports of the module that is not public by the public one, where that is there."""
    if _NOT_PUBLIC not in sys.modules and not _exists("deeplearning") and _exists(_PUBLIC):
        sys.modules[_NOT_PUBLIC] = importlib.import_module(_PUBLIC)


def _exists(module: str) -> bool:
    return importlib.util.find_spec(module.split(".")[0]) is not None
