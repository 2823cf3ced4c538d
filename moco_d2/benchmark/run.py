"""The benchmarks by name, and running them."""

import argparse
import tempfile
from collections.abc import Callable

from moco_d2.benchmark.exchange import measure_shuffle
from moco_d2.benchmark.index_scan import measure_index
from moco_d2.benchmark.method import measure_key_update, measure_step
from moco_d2.benchmark.monitoring import measure_monitors
from moco_d2.benchmark.photos import write_photographs
from moco_d2.benchmark.pipeline import measure_pipeline
from moco_d2.data.datasets import load_image_index
from moco_d2.errors import UserError

Result = tuple[str, dict[str, float]]  # table, ratios


def _pipeline(args: argparse.Namespace, repeats: int) -> Result:
    if args.images is None:
        with tempfile.TemporaryDirectory() as folder:
            return measure_pipeline(write_photographs(folder, count=args.count), repeats)
    index = load_image_index([args.images])
    paths = [index.path(i) for i in range(len(index))]
    jpegs = [path for path in paths if path.lower().endswith((".jpg", ".jpeg"))][: args.count]
    if not jpegs:
        raise UserError(f"--images {args.images!r} holds no JPEG: name a folder that does.")
    return measure_pipeline(jpegs, repeats)


def _ema(args: argparse.Namespace, repeats: int) -> Result:
    return measure_key_update(repeats)


def _shuffle(args: argparse.Namespace, repeats: int) -> Result:
    return measure_shuffle(repeats, processes=args.processes, batch=args.batch, size=args.size)


def _step(args: argparse.Namespace, repeats: int) -> Result:
    return measure_step(repeats, batch=args.batch, size=args.size, device=args.device)


def _monitors(args: argparse.Namespace, repeats: int) -> Result:
    return measure_monitors(repeats, batch=args.batch, size=args.size, device=args.device)


def _index(args: argparse.Namespace, repeats: int) -> Result:
    return measure_index(args.files)


# name -> (what runs, repeats unless they are given)
BENCHMARKS: dict[str, tuple[Callable[[argparse.Namespace, int], Result], int]] = {
    "pipeline": (_pipeline, 9),
    "step": (_step, 5),
    "monitors": (_monitors, 9),
    "ema": (_ema, 15),
    "shuffle": (_shuffle, 15),
    "index": (_index, 1),
}


def run_benchmarks(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Run the benchmarks that ``args.what`` names and print their tables and ratios.

    Args:
        args: of ``tools/benchmark.py``.

    Returns:
        the ratios by benchmark.
    """
    results = {}
    for name in args.what:
        run, repeats = BENCHMARKS[name]
        table, results[name] = run(args, args.repeats or repeats)
        print(f"{name}\n{table}")
        for key, value in results[name].items():
            print(f"  {name}.{key} = {value:.4f}")
        print(flush=True)
    return results
