"""Checkpoints that survive a kill: written aside, flushed, then renamed."""

import os
from typing import Any

import torch
from detectron2.checkpoint import DetectionCheckpointer

from moco_d2.checkpoint.files import replaced_file


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
        with replaced_file(path) as aside:
            torch.save(data, aside)
        self.tag_last_checkpoint(os.path.basename(path))

    def tag_last_checkpoint(self, last_filename_basename: str) -> None:
        with (
            replaced_file(os.path.join(self.save_dir, "last_checkpoint")) as aside,
            open(aside, "w") as f,
        ):
            f.write(last_filename_basename)

    def _torch_load(self, f: str) -> Any:
        return torch.load(f, map_location="cpu", weights_only=True)
