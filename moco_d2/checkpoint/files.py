"""Weight files on disk: read without running what is in them, written whole or not at all."""

import contextlib
import hashlib
import os
import pickle
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from detectron2.utils.file_io import PathManager

from moco_d2.errors import UserError

# Where files keep their tensors; a file with neither key is itself a state dict.
STATE_KEYS = ("model", "state_dict")
# detectron2 lets a path ask for matching by suffix; this project decides that from the names.
HEURISTICS_QUERY = "?matching_heuristics=True"


class WeightsError(UserError):
    """A weight file cannot be used; the message says why and what to do."""


class CheckError(WeightsError):
    """A weight file was understood, but what is in it fails a check."""


@dataclass(frozen=True)
class WeightFile:
    """What a weight file holds.

    Attributes:
        path: local path that was read.
        state: tensors by name, on the CPU, without a `module.` that all names share.
        meta: everything else of the file; empty for a bare state dict.
    """

    path: str
    state: dict[str, torch.Tensor]
    meta: dict[str, Any]

    @property
    def name(self) -> str:
        return os.path.basename(self.path)

    def section(self, key: str) -> Mapping[str, Any]:
        """A dict of `meta`; empty if there is none, or something else of that name."""
        value = self.meta.get(key)
        return value if isinstance(value, Mapping) else {}

    def sha256(self) -> str:
        digest = hashlib.sha256()
        with open(self.path, "rb") as f:
            while chunk := f.read(1 << 20):
                digest.update(chunk)
        return digest.hexdigest()


def read_weight_file(path: str) -> WeightFile:
    """Read a `.pkl` of NumPy arrays, or any file that `torch.load(weights_only=True)` reads.

    Args:
        path: a local path or whatever detectron2's `PathManager` resolves.

    Raises:
        WeightsError: there is no such file, it is damaged, it holds more than tensors, arrays
            and plain Python, or no tensors at all.
    """
    try:
        local = PathManager.get_local_path(path.removesuffix(HEURISTICS_QUERY))
    except OSError as error:
        raise WeightsError(f"{path} cannot be fetched: {error}") from error
    if not os.path.isfile(local):
        raise WeightsError(f"there is no weight file {path}")
    read = _read_pickle if local.endswith(".pkl") else _read_torch
    # What is wrong with a damaged file shows up as almost any exception.
    try:
        content = read(local)
    except Exception as error:
        reason = str(error).strip().splitlines()[-1:] or [type(error).__name__]
        raise WeightsError(
            f"{path} cannot be read as a file of tensors and plain Python: {reason[0]}"
        ) from error
    if not isinstance(content, Mapping):
        raise WeightsError(f"{path} holds a {type(content).__name__}, not a dict of tensors")
    key = next((k for k in STATE_KEYS if isinstance(content.get(k), Mapping)), None)
    state = content if key is None else content[key]
    meta = {} if key is None else {k: v for k, v in content.items() if k != key}
    return WeightFile(local, _tensors(path, state), meta)


def _read_torch(path: str) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True)


def _read_pickle(path: str) -> Any:
    with open(path, "rb") as f:
        return _ArrayUnpickler(f, encoding="latin1").load()


class _ArrayUnpickler(pickle.Unpickler):
    """Unpickles plain Python and NumPy arrays, and nothing that could run code."""

    # NumPy 1 and 2 name the same two functions differently, and read each other's files.
    _FUNCTIONS = {
        "_reconstruct": np.zeros(1).__reduce_ex__(2)[0],
        "_frombuffer": np.zeros(1).__reduce_ex__(5)[0],
    }
    _ALLOWED = {
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
        ("collections", "OrderedDict"): OrderedDict,
        ("builtins", "bytes"): bytes,
        ("__builtin__", "bytes"): bytes,
        ("numpy.core.multiarray", "_reconstruct"): _FUNCTIONS["_reconstruct"],
        ("numpy._core.multiarray", "_reconstruct"): _FUNCTIONS["_reconstruct"],
        ("numpy.core.numeric", "_frombuffer"): _FUNCTIONS["_frombuffer"],
        ("numpy._core.numeric", "_frombuffer"): _FUNCTIONS["_frombuffer"],
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("_codecs", "encode"):
            return _latin1_bytes
        try:
            return self._ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(
                f"it asks for {module}.{name}, and only NumPy arrays and plain types are read"
            ) from None


def _latin1_bytes(text: str, encoding: str) -> bytes:
    # Protocol 2 stores the bytes of an array as text of this one encoding.
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"it stores bytes as {encoding}, not as latin1")
    return text.encode("latin1")


def _tensors(path: str, state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    tensors = {}
    for name, value in state.items():
        if isinstance(value, np.ndarray):
            with contextlib.suppress(TypeError, ValueError):  # a type that torch does not know
                value = torch.from_numpy(value.copy())
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise WeightsError(
                f"{path}: {name!r} is a {type(value).__name__}, where a tensor is expected"
            )
        tensors[name] = value
    if not tensors:
        raise WeightsError(f"{path} holds no tensors")
    if all(name.startswith("module.") for name in tensors):
        tensors = {name.removeprefix("module."): value for name, value in tensors.items()}
    return tensors


def write_weight_file(path: str, content: Mapping[str, Any]) -> None:
    """Write a file that detectron2's checkpointer loads.

    Args:
        path: ends in `.pkl` (tensors become NumPy arrays) or `.pth` (they stay tensors).
        content: `model`, a dict of tensors by name, and plain Python.
    """
    content = dict(content)
    if path.endswith(".pkl"):
        content["model"] = {k: v.numpy() for k, v in content["model"].items()}
        with open(path, "wb") as f:
            pickle.dump(content, f, protocol=4)
    else:
        torch.save(content, path)


@contextlib.contextmanager
def replaced_file(path: str) -> Iterator[str]:
    """Yield a name to write to in place of `path`, which appears only when all went well.

    The file is flushed to disk and renamed at the end. When the body raises, what it wrote is
    removed, and a file that was at `path` before is untouched.
    """
    target = Path(path)
    aside = target.with_name(f".{target.stem}.{os.getpid()}.tmp{target.suffix}")
    try:
        yield str(aside)
        _flush_to_disk(aside)
        os.replace(aside, target)
        _flush_to_disk(target.parent)
    finally:
        aside.unlink(missing_ok=True)


def _flush_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
