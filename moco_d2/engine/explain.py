"""Errors whose cause a user can put right, but whose own words do not say so."""

import errno
import os
import re
import shutil

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
    if isinstance(error, (UserError, FileNotFoundError)):
        return error
    if isinstance(error, OSError) and error.errno in _STORAGE:
        return UserError(
            f"cannot write to OUTPUT_DIR {cfg.OUTPUT_DIR}: {error.strerror}; make room or make it "
            "writable, and go on with --resume"
        )
    trouble = _WORKER_TROUBLE.search(str(error)) if isinstance(error, RuntimeError) else None
    if trouble:
        return LoaderWorkerDied(
            f"a process that loads images died ({trouble[0].rstrip('. ')}), most likely because "
            f"memory or shared memory{_shared_memory()} ran out: lower DATALOADER.NUM_WORKERS "
            f"(now {cfg.DATALOADER.NUM_WORKERS} for each training process), or give the machine "
            f"or container more of them (docker run --shm-size), and go on with --resume"
        )
    return None


def _shared_memory() -> str:
    if not os.path.isdir(_SHARED_MEMORY):
        return ""
    usage = shutil.disk_usage(_SHARED_MEMORY)
    return f" ({_SHARED_MEMORY}: {usage.free >> 20} of {usage.total >> 20} MiB free)"
