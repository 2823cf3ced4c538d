"""The global random numbers that other libraries draw from, as functions of a place."""

import contextlib
import random
from collections.abc import Iterator

import numpy as np

from moco_d2.data.streams import generator


@contextlib.contextmanager
def globally_seeded(stream: int, seed: int, place: int) -> Iterator[None]:
    """In the body, NumPy's and Python's global generators follow from the arguments alone; after
    it they are as before. detectron2's augmentations draw from them.

    Args:
        stream, seed, place: see :func:`moco_d2.data.streams.generator`.
    """
    numpy_state, python_state = np.random.get_state(), random.getstate()
    draws = generator(stream, seed, place).integers(2**32, size=2)
    np.random.seed(draws[0])
    random.seed(int(draws[1]))
    try:
        yield
    finally:
        np.random.set_state(numpy_state)
        random.setstate(python_state)
