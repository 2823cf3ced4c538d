"""What the tests of training runs share."""

import jobs
import pytest


@pytest.fixture(scope="session")
def images(tmp_path_factory):
    """A folder of smooth random pictures, fewer than a batch of 32 holds."""
    return jobs.draw_images(tmp_path_factory.mktemp("images"))
