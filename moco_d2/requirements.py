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
    its files: `REPEAT_SQRT`, which LVIS's sampler is asked for, is a config key since 28 March 2024
    (commit afe9eb92), and versions of before August 2023 fail with current Pillow.

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
    defaults = root / "config" / "defaults.py"
    if not defaults.exists() or "REPEAT_SQRT" not in defaults.read_text(encoding="utf-8"):
        raise ImportError(
            f"moco_d2 needs a detectron2 of April 2024 or later; the one in {root} is older: "
            f"{_PINNED}, or {_FROM_SOURCE}."
        )
