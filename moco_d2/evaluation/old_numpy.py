"""Names that NumPy has given up and that official evaluators still use."""

import contextlib
from collections.abc import Iterator

import numpy as np

# lvis 0.5.3 uses np.float (gone since NumPy 1.24), cityscapesScripts 2.3.0 np.in1d (since 2.4).
_FORMER_NAMES = {"float": float, "in1d": np.isin}


@contextlib.contextmanager
def former_numpy_names() -> Iterator[None]:
    """Give NumPy the names back that it lacks, for as long as the context lasts."""
    missing = {name: value for name, value in _FORMER_NAMES.items() if not hasattr(np, name)}
    for name, value in missing.items():
        setattr(np, name, value)
    try:
        yield
    finally:
        for name in missing:
            delattr(np, name)
