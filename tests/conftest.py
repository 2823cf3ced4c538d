"""Settings of the whole suite."""

import os
import sys
from pathlib import Path

import pytest

# Test helpers are importable here and in the processes that tests spawn.
sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("OMP_NUM_THREADS", "2")
# Processes of a test are CPU processes, on machines with GPUs too.
os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.fixture(scope="session")
def exported(tmp_path_factory):
    """A MoCo backbone cut at res4, as the demo exports it."""
    import torch
    from weights import moco_checkpoint

    from moco_d2.checkpoint import convert

    root = tmp_path_factory.mktemp("exported")
    torch.save(moco_checkpoint(18, last="res4"), root / "moco.pth")
    convert(str(root / "moco.pth"), str(root / "out.pkl"))
    return str(root / "out.pkl")
