"""What the tests of training runs share."""

import jobs
import pytest
from weights import register_tiny_coco


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
