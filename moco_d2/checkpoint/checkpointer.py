"""Checkpoints that survive: written aside, flushed and renamed, checked before they are used."""

import contextlib
import os
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from detectron2.checkpoint import DetectionCheckpointer
from detectron2.utils import comm
from torch import nn

from moco_d2.checkpoint.files import replaced_file
from moco_d2.errors import UserError


class CheckpointError(UserError):
    """A checkpoint cannot be written, or none can be read."""


class AtomicCheckpointer(DetectionCheckpointer):
    """detectron2's checkpointer, whose files are complete or not there.

    `last_checkpoint` names a file only once that file is on disk. Files are read with
    `weights_only=True`: they hold tensors and plain Python. A damaged one is passed over.
    """

    def __init__(
        self,
        model: nn.Module,
        save_dir: str = "",
        *,
        keep: int = 0,
        archive_period: int = 0,
        **checkpointables: Any,
    ):
        """
        Args:
            keep: how many of the files `model_<iteration>.pth` are kept, the newest; 0: all.
            archive_period: files of every so many iterations are kept besides; 0: none.
            checkpointables: further objects with `state_dict`, by name.
        """
        super().__init__(model, save_dir, **checkpointables)
        self._keep = keep
        self._archive_period = archive_period

    def save(self, name: str, **kwargs: Any) -> None:
        """Write `{name}.pth` into `save_dir`, then point `last_checkpoint` at it.

        Raises:
            CheckpointError: it cannot be written. What was there before is as it was.
        """
        if not self.save_dir or not self.save_to_disk:
            return
        data = {"model": self.model.state_dict()}
        data.update({key: obj.state_dict() for key, obj in self.checkpointables.items()})
        data.update(kwargs)
        path = os.path.join(self.save_dir, f"{name}.pth")
        self.logger.info(f"Saving checkpoint to {path}")
        try:
            self._remove_leftovers()
            # Through Python's file: torch's own does not say why it cannot write.
            with replaced_file(path) as aside, open(aside, "wb") as f:
                torch.save(data, f)
            self.tag_last_checkpoint(os.path.basename(path))
            self._prune(os.path.basename(path))
        except (OSError, RuntimeError) as error:
            reason = _reason(error)
            if reason is None:
                raise
            older = next(self._intact(), None)
            raise CheckpointError(
                f"cannot write the checkpoint {path}: {reason}. "
                + (f"{older} is intact. " if older else "None was saved before. ")
                + "Make room or make the folder writable, and go on with --resume"
            ) from error

    def tag_last_checkpoint(self, last_filename_basename: str) -> None:
        with (
            replaced_file(os.path.join(self.save_dir, "last_checkpoint")) as aside,
            open(aside, "w") as f,
        ):
            f.write(last_filename_basename)

    def has_checkpoint(self) -> bool:
        """Whether there is a checkpoint, as process 0 sees it. A collective."""
        return comm.all_gather(bool(self._candidates()))[0]

    def get_checkpoint_file(self) -> str:
        """The newest checkpoint that is not damaged; "" if there is none at all. A collective.

        Raises:
            CheckpointError: all are damaged, or other processes do not see what process 0 sees.
        """
        found = None
        if comm.is_main_process():
            found = next(self._intact(log=True), None)
            if found is None and self._candidates():
                found = CheckpointError(
                    f"none of the checkpoints in {self.save_dir} can be read; start anew without "
                    "--resume, or restore one of them"
                )
        found = comm.all_gather(found)[0]
        if isinstance(found, CheckpointError):
            raise found
        if found and not os.path.isfile(found):
            raise CheckpointError(
                f"{found}, which process 0 resumes from, is not there for process "
                f"{comm.get_rank()}: OUTPUT_DIR must be on storage that all machines share"
            )
        return found or ""

    def last_finite(self) -> str | None:
        """The newest undamaged checkpoint without an infinity or NaN among its weights."""
        for path in self._intact():
            state = self._torch_load(path)["model"]
            if all(bool(t.isfinite().all()) for t in state.values()):
                return path
        return None

    def _torch_load(self, f: str) -> Any:
        return torch.load(f, map_location="cpu", weights_only=True)

    def _intact(self, log: bool = False) -> Iterator[str]:
        """Undamaged checkpoints, newest first."""
        for name in self._candidates():
            path = os.path.join(self.save_dir, name)
            damage = _damage(path)
            if damage is None:
                yield path
            elif log:
                self.logger.error(f"{path} is damaged ({damage}): the one before it is used")

    def _candidates(self) -> list[str]:
        """Names of checkpoints, newest first: the one in `last_checkpoint`, then older ones.

        Newer ones than that are of another, earlier run.
        """
        saved = self._by_iteration()
        try:
            last = Path(self.save_dir, "last_checkpoint").read_text().strip()
        except (OSError, UnicodeDecodeError):
            last = ""
        newest = _iteration(last)
        older = [name for name, i in saved.items() if newest is None or i < newest]
        return ([last] if last else []) + older

    def _by_iteration(self) -> dict[str, int]:
        """Names of the files `model_<iteration>.pth` with their iterations, newest first."""
        with contextlib.suppress(OSError):
            found = {name: _iteration(name) for name in os.listdir(self.save_dir)}
            numbered = [(name, i) for name, i in found.items() if i is not None]
            return dict(sorted(numbered, key=lambda entry: -entry[1]))
        return {}

    def _prune(self, saved: str) -> None:
        """Remove what is neither among the newest nor archived."""
        newest = _iteration(saved)
        if not self._keep or newest is None:
            return
        mine = [(name, i) for name, i in self._by_iteration().items() if i <= newest]
        for name, iteration in mine[self._keep :]:
            if not self._archive_period or (iteration + 1) % self._archive_period:
                os.remove(os.path.join(self.save_dir, name))

    def _remove_leftovers(self) -> None:
        """Remove what a process that was killed while it saved has left."""
        for path in Path(self.save_dir).glob(".model_*.tmp.pth"):
            path.unlink()


def _iteration(name: str) -> int | None:
    match = re.fullmatch(r"model_(\d+)\.pth", name)
    return int(match[1]) if match else None


def _damage(path: str) -> str | None:
    """What is wrong with a file that `torch.save` wrote; None: nothing.

    torch.load notices what is missing, but not what has changed: it ignores the checksums.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            changed = archive.testzip()
        if changed is not None:
            return f"{changed} in it fails its checksum"
        torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError:
        return "it is missing"
    except Exception as error:  # what is wrong with a damaged file shows up as almost any
        return str(error).partition("\n")[0] or type(error).__name__
    return None


def _reason(error: BaseException | None) -> str | None:
    """What the operating system said, which torch's error may hide."""
    while error is not None and not isinstance(error, OSError):
        error = error.__context__
    return error and error.strerror
