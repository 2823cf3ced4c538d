"""Packaging of moco_d2. detectron2 is a prerequisite that `moco_d2` checks when it is imported:
it has no package of its own name on the index."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent


def read_version() -> str:
    """Version in moco_d2/__init__.py, read without importing it (which needs detectron2)."""
    source = (ROOT / "moco_d2" / "__init__.py").read_text(encoding="utf-8")
    return re.search(r'^__version__ = "([^"]+)"', source, re.MULTILINE).group(1)


setup(
    name="moco_d2",
    version=read_version(),
    description="Momentum Contrast pretraining as a detectron2 plugin",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="The moco_d2 authors",
    license="Apache-2.0",
    packages=find_packages(include=["moco_d2", "moco_d2.*"]),
    package_data={"moco_d2.transfer": ["*.yaml", "*.css"]},
    python_requires=">=3.10",
    install_requires=[
        "torch>=2.3",
        "torchvision>=0.18",
        "fvcore>=0.1.5",
        "iopath>=0.1.9",
        "opencv-python>=4.6",
    ],
    extras_require={
        "data": ["pyarrow", "tifffile"],
        "weights": ["timm", "safetensors"],
        "benchmark": ["lvis", "cityscapesScripts", "shapely"],
        "dev": [
            "pytest",
            "pytest-xdist",
            "hypothesis",
            "scikit-image",
            "scipy",
            "matplotlib",
            "ruff",
            "black",
        ],
    },
)
