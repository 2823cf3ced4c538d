"""Settings of the whole suite."""

import os
import sys
from pathlib import Path

# Test helpers are importable here and in the processes that tests spawn.
sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("OMP_NUM_THREADS", "2")
# Processes of a test are CPU processes, on machines with GPUs too.
os.environ["CUDA_VISIBLE_DEVICES"] = ""
