"""What a process knows of a data set's size is forgotten: tests have their own of the same name."""

import pytest

from moco_d2.engine.images import training_images
from moco_d2.transfer.checks import dataset_size


@pytest.fixture(autouse=True)
def no_known_data():
    for known in (dataset_size, training_images):
        known.cache_clear()
    yield
    for known in (dataset_size, training_images):
        known.cache_clear()
