"""Checkpoints that survive a kill: written aside, flushed, then renamed."""

import os
from typing import Any

import torch
from detectron2.checkpoint import DetectionCheckpointer


class AtomicCheckpointer(DetectionCheckpointer):
    """detectron2's checkpointer, whose files are complete or not there.

    `last_checkpoint` names a file only once that file is on disk. Files are read with
    `weights_only=True`: they hold tensors and plain Python.
    """

    def save(self, name: str, **kwargs: Any) -> None:
        """Write `{name}.pth` into `save_dir`, then point `last_checkpoint` at it."""
        if not self.save_dir or not self.save_to_disk:
            return
        data = {"model": self.model.state_dict()}
        data.update({key: obj.state_dict() for key, obj in self.checkpointables.items()})
        data.update(kwargs)
        path = os.path.join(self.save_dir, f"{name}.pth")
        self.logger.info(f"Saving checkpoint to {path}")
        with atomic_write(path) as f:
            torch.save(data, f)
        self.tag_last_checkpoint(os.path.basename(path))

    def tag_last_checkpoint(self, last_filename_basename: str) -> None:
        with atomic_write(os.path.join(self.save_dir, "last_checkpoint")) as f:
            f.write(last_filename_basename.encode())

    def _torch_load(self, f: str) -> Any:
        return torch.load(f, map_location="cpu", weights_only=True)


class atomic_write:
    """`with atomic_write(path) as f`: a binary file that appears at `path` whole or not at all."""

    def __init__(self, path: str):
        self.path = path
        self._aside = f"{path}.{os.getpid()}.tmp"

    def __enter__(self):
        self._file = open(self._aside, "wb")
        return self._file

    def __exit__(self, error_type, *_):
        if error_type is None:
            self._file.flush()
            os.fsync(self._file.fileno())
        self._file.close()
        if error_type is None:
            os.replace(self._aside, self.path)
            _sync_folder(os.path.dirname(os.path.abspath(self.path)))
        else:
            os.remove(self._aside)


def _sync_folder(path: str) -> None:
    """Put a rename on disk, which syncing the file alone does not."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
