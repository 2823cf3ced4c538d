"""What must be installed before this project can be imported, checked with one line per problem."""

import importlib.util
from pathlib import Path

_PINNED = "run `make setup` for the pinned environment"
_FROM_SOURCE = (
    "build it from source: "
    "pip install --no-build-isolation 'git+https://github.com/facebookresearch/detectron2'"
)


def check_requirements() -> None:
    """Check that torch and a detectron2 recent enough are there, without importing either.

    detectron2's version number did not change from 2021 to today's main, so its age is read from
    its files: the ViT backbone came in 2022, and the releases before it fail with current Pillow
    and NumPy.

    Raises:
        ImportError: one line that says what is missing and how to install it.
    """
    if importlib.util.find_spec("torch") is None:
        raise ImportError(
            f"moco_d2 needs PyTorch (torch >= 2.3), which is not installed: {_PINNED}."
        )
    spec = importlib.util.find_spec("detectron2")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(
            f"moco_d2 needs detectron2, which is not installed: {_PINNED}, or {_FROM_SOURCE}."
        )
    root = Path(list(spec.submodule_search_locations)[0])
    if not (root / "modeling" / "backbone" / "vit.py").exists():
        raise ImportError(
            f"moco_d2 needs a detectron2 newer than 2021's v0.6; the one in {root} has no ViT "
            f"backbone: {_PINNED}, or {_FROM_SOURCE}."
        )
