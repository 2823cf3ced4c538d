"""Pickles without trust: arrays and plain types are read, anything else is only named."""

import pickle
import re
import zipfile
from collections import OrderedDict
from typing import IO, Any

import numpy as np

# Zip archives of torch >= 1.6, and the number that begins the older files.
ZIP_MAGIC = b"PK\x03\x04"
LEGACY_MAGIC = bytes.fromhex("80028a0a6cfc9c46f920")
# What `torch.load(weights_only=True)` reads, as far as weight files have it.
TORCH_PLAIN = re.compile(
    r"collections\.OrderedDict|_codecs\.encode|__builtin__\.set|builtins\.set"
    r"|torch\.(\w+Storage|Size|device|Tensor|b?float\d+|u?int\d+|double|half|long|int|bool)"
    r"|torch\.storage\.(Untyped|Typed)Storage|torch\._utils\._rebuild_\w+"
    r"|torch\.nn\.parameter\.Parameter|torch\._tensor\._rebuild_from_type_v2"
)


def read_arrays(path: str) -> Any:
    """Unpickle a file of plain Python and NumPy arrays.

    Raises:
        pickle.UnpicklingError: it asks for anything else.
    """
    with open(path, "rb") as f:
        return _ArrayUnpickler(f, encoding="latin1").load()


def wanted_globals(path: str) -> list[str]:
    """The classes and functions that a file asks for beyond arrays, tensors and plain types.

    Nothing in the file is run: all that it asks for is replaced by an object that does nothing.
    """
    names: list[str] = []
    with open(path, "rb") as f:
        magic = f.read(len(LEGACY_MAGIC))
        f.seek(0)
        if magic.startswith(ZIP_MAGIC):
            with zipfile.ZipFile(f) as archive:
                for name in archive.namelist():
                    if name.endswith("data.pkl"):
                        with archive.open(name) as member:
                            _record(member, names)
        else:
            # Older files of torch are several pickles in a row.
            _record(f, names)
    torch_file = magic.startswith((ZIP_MAGIC, LEGACY_MAGIC))
    return sorted(
        name
        for name in set(names)
        if not (TORCH_PLAIN.fullmatch(name) if torch_file else _is_array_global(name))
    )


def _record(stream: IO[bytes], names: list[str]) -> None:
    try:
        while True:
            _Recorder(stream, names).load()
    except Exception:  # the end, the raw data behind the pickles, or what no stub can stand for
        return


class _Stub:
    """Stands for anything that a pickle builds, and does nothing."""

    def __new__(cls, *_, **__):
        return object.__new__(cls)

    def __init__(self, *_, **__):
        pass

    def _nothing(self, *_, **__):
        return self

    __call__ = __setstate__ = __setitem__ = append = extend = add = _nothing


class _Recorder(pickle.Unpickler):
    def __init__(self, stream: IO[bytes], names: list[str]):
        super().__init__(stream, encoding="latin1")
        self._names = names

    def find_class(self, module: str, name: str) -> Any:
        self._names.append(f"{module}.{name}")
        return _Stub

    def persistent_load(self, pid: Any) -> Any:
        return _Stub()


def _is_array_global(name: str) -> bool:
    module, _, attribute = name.rpartition(".")
    return (module, attribute) in _ArrayUnpickler.ALLOWED


def _latin1_bytes(text: str, encoding: str) -> bytes:
    # Protocol 2 stores the bytes of an array as text of this one encoding.
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"it stores bytes as {encoding}, not as latin1")
    return text.encode("latin1")


class _ArrayUnpickler(pickle.Unpickler):
    # NumPy 1 and 2 name the same functions differently, and read each other's files.
    _FUNCTIONS = {
        "_reconstruct": np.zeros(1).__reduce_ex__(2)[0],
        "_frombuffer": np.zeros(1).__reduce_ex__(5)[0],
    }
    ALLOWED = {
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
        ("collections", "OrderedDict"): OrderedDict,
        ("builtins", "bytes"): bytes,
        ("__builtin__", "bytes"): bytes,
        ("_codecs", "encode"): _latin1_bytes,
        ("numpy.core.multiarray", "_reconstruct"): _FUNCTIONS["_reconstruct"],
        ("numpy._core.multiarray", "_reconstruct"): _FUNCTIONS["_reconstruct"],
        ("numpy.core.numeric", "_frombuffer"): _FUNCTIONS["_frombuffer"],
        ("numpy._core.numeric", "_frombuffer"): _FUNCTIONS["_frombuffer"],
    }

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self.ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}") from None
