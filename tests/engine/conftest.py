"""What the tests of training runs share."""

import jobs
import pytest
import torch
from weights import moco_checkpoint, register_tiny_coco

from moco_d2.checkpoint import convert


@pytest.fixture(scope="session")
def images(tmp_path_factory):
    """A folder of smooth random pictures, fewer than a batch of 32 holds."""
    return jobs.draw_images(tmp_path_factory.mktemp("images"))


@pytest.fixture
def pictures(tmp_path):
    """Four pictures, registered as `tiny_train`."""
    (tmp_path / "pictures").mkdir()
    register_tiny_coco("tiny_train", tmp_path / "pictures")
    return tmp_path / "pictures"


@pytest.fixture(scope="session")
def exported(tmp_path_factory):
    """A MoCo backbone cut at res4, as the demo exports it."""
    root = tmp_path_factory.mktemp("exported")
    torch.save(moco_checkpoint(18, last="res4"), root / "moco.pth")
    convert(str(root / "moco.pth"), str(root / "out.pkl"))
    return str(root / "out.pkl")
