"""Weight files on disk: read without running what is in them, written whole or not at all."""

import contextlib
import hashlib
import json
import os
import pickle
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from detectron2.utils.file_io import PathManager

from moco_d2.checkpoint.pickles import LEGACY_MAGIC, ZIP_MAGIC, read_arrays, wanted_globals
from moco_d2.errors import UserError

# Where files keep their tensors, and what is put before the names of those that are there. A file
# with none of these places is itself a state dict. Only the first place without a prefix counts.
PLACES: dict[tuple[str, ...], str] = {
    ("model",): "",
    ("state_dict",): "",
    ("model_state_dict",): "",
    ("blobs",): "",
    ("model_ema",): "model_ema.",
    ("state_dict_ema",): "state_dict_ema.",
    ("student",): "student.",
    ("teacher",): "teacher.",
    ("online_network_state_dict",): "online_network.",
    ("target_network_state_dict",): "target_network.",
    ("classy_state_dict", "base_model", "model", "trunk"): "trunk.",
    ("classy_state_dict", "base_model", "model", "heads"): "heads.",
}
# Key of a safetensors file's metadata under which this project keeps what is no tensor, as JSON.
SAFETENSORS_KEY = "moco_d2"
# First bytes of what is no weight file at all -> what it is.
STRANGERS = {
    rb"\s*<(!doctype|html|\?xml|head)": "it is a web page, not a weight file: the download failed",
    rb"version https://git-lfs": "it is a pointer of Git LFS; fetch the file itself: git lfs pull",
}
SAFETENSORS = ".safetensors"
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
        state: tensors by name, on the CPU, with the prefixes of `PLACES`, and without the
            `module.` that DDP puts before all names.
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
        return sha256(self.path)


def sha256(path: str) -> str:
    """SHA-256 of a file's content, in hexadecimal."""
    digest = hashlib.sha256()
    with open(path, "rb") as f:
        while chunk := f.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def read_weight_file(path: str, *, unsafe_pickle: bool = False) -> WeightFile:
    """Read a weight file: `.safetensors`, a pickle of NumPy arrays, or what `torch.save` wrote.

    Which one it is is told by its content, not by its name, but for `.safetensors`.

    Args:
        path: a local path or whatever detectron2's `PathManager` resolves.
        unsafe_pickle: read files that ask for other classes and functions, too. Such a file can
            run any code.

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
    content = _read(path, local, unsafe_pickle)
    if not isinstance(content, Mapping):
        raise WeightsError(f"{path} holds a {type(content).__name__}, not a dict of tensors")
    states, used = _states(content)
    if not states:
        return WeightFile(local, _tensors(path, content), {})
    tensors = {}
    for prefix, state in states.items():
        named = _tensors(path, state) if state or len(states) == 1 else {}
        tensors.update({prefix + name: value for name, value in named.items()})
    return WeightFile(local, tensors, {k: v for k, v in content.items() if k not in used})


def _states(content: Mapping[str, Any]) -> tuple[dict[str, Mapping], set[str]]:
    """State dicts by the prefix of their place, and the keys of the file that hold them."""
    states: dict[str, Mapping] = {}
    used = set()
    for place, prefix in PLACES.items():
        value: Any = content
        for key in place:
            value = value.get(key) if isinstance(value, Mapping) else None
        if isinstance(value, Mapping) and prefix not in states:
            states[prefix] = value
            used.add(place[0])
    return states, used


def _read(path: str, local: str, unsafe_pickle: bool) -> Any:
    with open(local, "rb") as f:
        head = f.read(64)
    if not head:
        raise WeightsError(f"{path} cannot be read: it is empty")
    for pattern, what in STRANGERS.items():
        if re.match(pattern, head, re.IGNORECASE):
            raise WeightsError(f"{path} cannot be read: {what}")
    if local.endswith(SAFETENSORS):
        read: Callable[[str], Any] = _read_safetensors
    elif head.startswith((ZIP_MAGIC, LEGACY_MAGIC)) or not local.endswith((".pkl", ".pickle")):
        read = _unsafe_torch if unsafe_pickle else _read_torch
    else:
        read = _unsafe_pickle if unsafe_pickle else read_arrays
    try:
        return read(local)
    except WeightsError:
        raise
    except Exception as error:  # a damaged file shows up as almost any exception
        reason = str(error).strip().splitlines()[-1:] or [type(error).__name__]
        wanted = [] if read is _read_safetensors else _wanted(local)
        if wanted and not unsafe_pickle:
            raise WeightsError(
                f"{path} cannot be read as a file of tensors and plain Python: it asks for "
                f"{', '.join(wanted)}; if you trust its origin, read it with --unsafe-pickle, "
                "under which it can run any code"
            ) from error
        raise WeightsError(
            f"{path} cannot be read: it is truncated, damaged or no weight file ({reason[0]})"
        ) from error


def _wanted(local: str) -> list[str]:
    # A truncated archive has no directory to look into.
    with contextlib.suppress(zipfile.BadZipFile):
        return wanted_globals(local)
    return []


def _read_torch(path: str) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True)


def _unsafe_torch(path: str) -> Any:
    return torch.load(path, map_location="cpu", weights_only=False)


def _unsafe_pickle(path: str) -> Any:
    with open(path, "rb") as f:
        return pickle.load(f, encoding="latin1")


def _safetensors() -> tuple[Any, Any]:
    """(safe_open, save_file) of the optional package.

    Raises:
        WeightsError: it is not installed.
    """
    try:
        from safetensors import safe_open
        from safetensors.torch import save_file
    except ImportError as error:
        raise WeightsError(
            "files that end in .safetensors need the package safetensors: pip install safetensors"
        ) from error
    return safe_open, save_file


def _read_safetensors(path: str) -> dict[str, Any]:
    safe_open, _ = _safetensors()
    with safe_open(path, framework="pt") as f:
        tensors = {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118 (no dict)
        return {**json.loads((f.metadata() or {}).get(SAFETENSORS_KEY, "{}")), "model": tensors}


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


def write_weight_file(path: str, content: Mapping[str, Any], state_key: str = "model") -> None:
    """Write a weight file of the kind that the name ends in.

    Args:
        path: ends in `.pkl` (tensors become NumPy arrays), `.safetensors` (what is no tensor goes
            into the metadata) or anything else (`torch.save`).
        content: a dict of tensors by name under `state_key`, and plain Python.
        state_key: where the tensors are.
    """
    tensors = content[state_key]
    if path.endswith(SAFETENSORS):
        plain = {key: value for key, value in content.items() if key != state_key}
        metadata = {"format": "pt", SAFETENSORS_KEY: json.dumps(plain)}
        own = {name: value.clone().contiguous() for name, value in tensors.items()}
        _safetensors()[1](own, path, metadata)
    elif path.endswith(".pkl"):
        arrays = {name: value.numpy() for name, value in tensors.items()}
        with open(path, "wb") as f:
            pickle.dump({**content, state_key: arrays}, f, protocol=4)
    else:
        torch.save(dict(content), path)


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
