"""Errors whose cause a user can put right, but whose own words do not say so."""

import errno
import os
import re
import shutil
import traceback

from detectron2.config import CfgNode

from moco_d2.errors import UserError

_STORAGE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
_SHARED_MEMORY = "/dev/shm"
# What torch says, in a plain RuntimeError, when a worker was killed or got no shared memory.
_WORKER_TROUBLE = re.compile(
    r"DataLoader worker \(pid.*|unable to (?:write to|mmap|open|resize|allocate).*torch_.*"
    r"|unable to \w+ shared memory.*"
)


class LoaderWorkerDied(UserError):
    """A process that loads images was killed."""


def explain(error: Exception, cfg: CfgNode) -> Exception | None:
    """The error to show as one sentence in place of `error`; None: it needs its stack trace."""
    trouble = _worker_trouble(error)
    if trouble:
        return LoaderWorkerDied(
            f"a process that loads images died ({trouble.rstrip('. ')}), most likely because "
            f"memory or shared memory{_shared_memory()} ran out: lower DATALOADER.NUM_WORKERS "
            f"(now {cfg.DATALOADER.NUM_WORKERS} for each training process), or give the machine "
            f"or container more of them (docker run --shm-size), and go on with --resume"
        )
    if isinstance(error, (UserError, FileNotFoundError)):
        return error
    if isinstance(error, OSError) and error.errno in _STORAGE:
        return UserError(
            f"cannot write to OUTPUT_DIR {cfg.OUTPUT_DIR}: {error.strerror}; make room or make it "
            "writable, and go on with --resume"
        )
    return None


def _worker_trouble(error: Exception) -> str | None:
    """What a loader worker died of, in torch's words; None: `error` is of something else."""
    if isinstance(error, RuntimeError):
        said = _WORKER_TROUBLE.search(str(error))
        return said and said[0]
    if isinstance(error, (OSError, EOFError)):
        # A batch was being fetched from a worker that is no longer there.
        frames = (frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__))
        return type(error).__name__ if "_try_get_data" in frames else None
    return None


def _shared_memory() -> str:
    if not os.path.isdir(_SHARED_MEMORY):
        return ""
    usage = shutil.disk_usage(_SHARED_MEMORY)
    return f" ({_SHARED_MEMORY}: {usage.free >> 20} of {usage.total >> 20} MiB free)"
