"""The index of a big folder: its memory, and how long a start takes that finds it scanned."""

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable

import numpy as np
from tabulate import tabulate

from moco_d2.data.datasets import load_image_index

_FILES_PER_FOLDER = 1280
_YEAR = 365 * 86400  # seconds; a folder that has just changed is not kept
_READS = 20_000


def measure_index(files: int) -> tuple[str, dict[str, float]]:
    """Index a folder of empty files twice, the second time in a new process.

    Args:
        files: how many, 1280 in each folder as in ImageNet.

    Returns:
        a table, and ``mb``, the private memory of a process that holds the index and reads of it
        or the size of the index, whichever is more, and ``second_start_s``.
    """
    with tempfile.TemporaryDirectory() as root:
        images, cache = os.path.join(root, "train"), os.path.join(root, "cache")
        _write_files(images, files)
        first = _in_new_process(_start, images, cache)
        second = _in_new_process(_start, images, cache)
    rows = [
        ("images", f"{second['images']}"),
        ("first start, which scans", f"{first['seconds']:.2f} s"),
        ("second start", f"{second['seconds']:.2f} s"),
        ("size of the index", f"{second['size']:.1f} MB"),
        ("private memory for it, first start", f"{first['private']:.1f} MB"),
        ("private memory for it, second start", f"{second['private']:.1f} MB"),
        ("private memory for it, a loader worker", f"{second['worker']:.1f} MB"),
    ]
    largest = max(second[name] for name in ("size", "private", "worker"))
    return tabulate(rows), {"mb": largest, "second_start_s": second["seconds"]}


def _write_files(root: str, files: int) -> None:
    folders = -(-files // _FILES_PER_FOLDER)
    for folder in range(folders):
        path = os.path.join(root, f"n{folder:08d}")
        os.makedirs(path)
        for number in range(folder, files, folders):
            os.close(os.open(os.path.join(path, f"n{folder:08d}_{number}.JPEG"), os.O_CREAT))
        os.utime(path, (time.time() - _YEAR,) * 2)
    os.utime(root, (time.time() - _YEAR,) * 2)


def _start(images: str, cache: str) -> dict[str, float]:
    os.environ["MOCO_D2_CACHE"] = cache
    before, start = _private_mb(), time.perf_counter()
    index = load_image_index([images])
    seconds = time.perf_counter() - start

    def read() -> float:
        mine = _private_mb()
        for i in np.random.default_rng(0).integers(len(index), size=_READS).tolist():
            index.path(i)
        return _private_mb() - mine

    worker = _in_new_process(read)
    return {
        "images": len(index),
        "seconds": seconds,
        "size": index.nbytes / 1e6,
        "private": _private_mb() - before,
        "worker": worker,
    }


def _in_new_process(function: Callable, *args):
    """Call a function in a process of its own, with nothing but modules loaded."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(theirs, function, *args))
    process.start()
    theirs.close()
    try:
        return ours.recv()
    finally:
        process.join()


def _send(connection, function: Callable, *args) -> None:
    connection.send(function(*args))


def _private_mb() -> float:
    """Memory that this process shares with no other and that no file backs, in MB."""
    with open("/proc/self/smaps_rollup") as file:
        fields = dict(line.split()[:2] for line in file.readlines()[1:])
    return int(fields["Private_Dirty:"]) * 1024 / 1e6
