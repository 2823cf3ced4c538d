"""Renders the built-in data to disk: in parallel, with progress, and only what is not there yet."""

import json
import logging
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cv2
from tqdm import tqdm

from moco_d2.data.synthetic.layouts import LAYOUTS, Layout
from moco_d2.data.synthetic.sets import SETS, DemoSet

# Part of a set's manifest; raise it whenever the pictures change, and old ones are replaced.
RENDERER_VERSION = 1
_CHUNK = 20  # pictures per piece of work

logger = logging.getLogger(__name__)


def render_demo_data(
    root: str,
    layout: str = "coco",
    sizes: dict[str, int] | None = None,
    seed: int = 0,
    workers: int | None = None,
) -> None:
    """Write the built-in data set; sets that are complete already are left alone.

    A picture depends on the seed, its set and its number alone: any number of workers writes the
    same bytes, and a larger set starts with the pictures of a smaller one. A set that lies there
    with another size or seed is rendered again. The folder is registered with detectron2 if it is
    ``$DETECTRON2_DATASETS/moco_demo``.

    Args:
        root: folder to write to; made if missing.
        layout: a key of LAYOUTS; which annotations come with the scenes. Only COCO has figures.
        sizes: number of pictures by name of the set (see :data:`SETS`), where it is to differ from
            the default; 0 leaves a set as it is.
        seed: not negative.
        workers: processes; None takes one per available core.

    Raises:
        ValueError: an argument is out of its range.
        NotADirectoryError: ``root`` is a file.
    """
    wanted = _wanted_sizes(layout, sizes or {})
    if seed < 0:
        raise ValueError(f"The seed of the built-in data is {seed}; give a number of 0 or more.")
    if workers is None:
        workers = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    if workers < 1:
        raise ValueError(f"{workers} workers cannot render the built-in data; give 1 or more.")
    if os.path.exists(root) and not os.path.isdir(root):
        raise NotADirectoryError(f"{root} is a file; name a folder to render the data to.")

    missing = []
    for name, size in wanted.items():
        manifest = _manifest(_layout_of(SETS[name], layout), size, seed, finished=True)
        if read_manifest(root, SETS[name], layout) == manifest:
            logger.info(f"{name}: {size} images are in {root} already.")
        else:
            missing.append(name)
    if missing:
        with _parallel_map(workers) as parallel_map:
            for name in missing:
                _render_set(Path(root), SETS[name], layout, wanted[name], seed, parallel_map)


def read_manifest(root: str | Path, demo_set: DemoSet, layout: str) -> dict[str, Any] | None:
    """What is known of a set on disk: version, seed, size and whether it is finished.

    Args:
        root: folder of the built-in data.
        demo_set: the set.
        layout: a key of LAYOUTS.

    Returns:
        The manifest's content; None where there is none or it cannot be read.
    """
    try:
        return json.loads(_manifest_path(root, demo_set, layout).read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None


def _wanted_sizes(layout: str, sizes: dict[str, int]) -> dict[str, int]:
    if layout not in LAYOUTS:
        raise ValueError(f'There is no layout "{layout}"; choose one of {", ".join(LAYOUTS)}.')
    for name, size in sizes.items():
        if name not in SETS:
            raise ValueError(f'There is no set "{name}"; the sets are {", ".join(SETS)}.')
        if size < 0:
            raise ValueError(f"The size of {name} is {size}; give a number of 0 or more.")
    wanted = {}
    for name, demo_set in SETS.items():
        writer, size = LAYOUTS[layout].get(demo_set.family), sizes.get(name, demo_set.default_size)
        if writer is None or size == 0:
            continue
        wanted[name] = size
    return wanted


def _render_set(
    root: Path, demo_set: DemoSet, layout: str, size: int, seed: int, parallel_map: Callable
) -> None:
    path, writer = _manifest_path(root, demo_set, layout), _layout_of(demo_set, layout)
    old_size = (read_manifest(root, demo_set, layout) or {}).get("size", 0)
    # Until all is written the manifest names every file there may be, so that whoever comes after
    # an interruption knows what to replace or delete.
    _write_manifest(path, _manifest(writer, max(size, old_size), seed, finished=False))
    for number in range(size + 1, old_size + 1):
        for file in writer.files(demo_set, number).values():
            (root / file).unlink(missing_ok=True)

    jobs = [
        (root, demo_set.name, layout, seed, range(start, min(start + _CHUNK, size + 1)))
        for start in range(1, size + 1, _CHUNK)
    ]
    records = []
    title = f"Rendering {demo_set.name}"
    with tqdm(total=size, desc=title, unit=" images", mininterval=1) as progress:
        for chunk in parallel_map(_render_chunk, jobs):
            records += chunk
            progress.update(len(chunk))
    writer.finish(root, demo_set, records)
    _write_manifest(path, _manifest(writer, size, seed, finished=True))


def _render_chunk(job: tuple[Path, str, str, int, range]) -> list[Any]:
    root, name, layout, seed, numbers = job
    demo_set = SETS[name]
    writer = _layout_of(demo_set, layout)
    return [writer.write(root, demo_set, n, demo_set.picture(n, seed)) for n in numbers]


@contextmanager
def _parallel_map(workers: int) -> Iterator[Callable]:
    """A ``map`` that keeps the order and runs on so many processes."""
    if workers == 1:
        yield map
        return
    # Forking spares the workers the import of torch and detectron2, which they never use. Elsewhere
    # than on Linux it is unsafe or unknown.
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    with context.Pool(workers, initializer=cv2.setNumThreads, initargs=(0,)) as pool:
        yield pool.imap


def _layout_of(demo_set: DemoSet, layout: str) -> Layout:
    return LAYOUTS[layout][demo_set.family]


def _manifest(layout: Layout, size: int, seed: int, finished: bool) -> dict[str, Any]:
    version = RENDERER_VERSION + layout.revision
    return {"version": version, "seed": seed, "size": size, "finished": finished}


def _manifest_path(root: str | Path, demo_set: DemoSet, layout: str) -> Path:
    folder = demo_set.family + _layout_of(demo_set, layout).suffix
    return Path(root) / folder / f"{demo_set.split}.manifest.json"


def _write_manifest(path: Path, content: dict[str, Any]) -> None:
    """Write aside and rename: a reader sees the old content or the new, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(".tmp")
    aside.write_text(json.dumps(content))
    os.replace(aside, path)
