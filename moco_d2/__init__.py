"""Momentum Contrast as a detectron2 plugin. Importing it registers everything it adds."""

from moco_d2.requirements import check_requirements

check_requirements()

from moco_d2.config import add_moco_config  # noqa: E402

__version__ = "0.1.0"
__all__ = ["__version__", "add_moco_config"]
