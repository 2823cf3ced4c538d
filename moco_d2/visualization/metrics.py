"""What runs have written to their metrics.json, by run and by metric."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from moco_d2.errors import UserError

FILE = "metrics.json"
_PREFIX = "[metric]"  # this project's metrics of a training step have it in the file


@dataclass(frozen=True)
class Run:
    """A run's name for people, its metrics.json, and (iterations, values) by metric."""

    name: str
    path: Path
    curves: dict[str, tuple[list[int], list[float]]]

    @property
    def iterations(self) -> int:
        """The last one that anything was written of."""
        return max(iterations[-1] for iterations, _ in self.curves.values())


def read_metrics(path: str | Path) -> list[dict[str, float]]:
    """One dict per written iteration, by iteration.

    Where iterations of training go back, a run went on from a checkpoint or was started anew: what
    an earlier attempt wrote of later ones does not count. Lines of evaluations and monitors may
    come after those of a later iteration (detectron2's JSONWriter groups what it writes at a time
    by iteration). Half a line at the end is one that is being written.

    Raises:
        UserError: a line is not detectron2's.
    """
    records: dict[int, dict[str, float]] = {}
    trained = -1  # the last iteration of training in this attempt
    with open(path, errors="replace") as f:
        for number, line in enumerate(f, 1):
            try:
                record = json.loads(line)
                iteration = record["iteration"]
            except (ValueError, KeyError, TypeError) as error:
                if not line.endswith("\n"):
                    break
                raise UserError(
                    f"line {number} of {path} is not a line of metrics: remove it, or name another "
                    "file"
                ) from error
            if "total_loss" in record:
                if iteration <= trained:
                    records = {i: r for i, r in records.items() if i <= iteration}
                trained = iteration
            records.setdefault(iteration, {}).update(record)
    return [records[iteration] for iteration in sorted(records)]


def read_runs(names: Sequence[str]) -> list[Run]:
    """Read runs for comparison.

    Args:
        names: each a run's folder, its metrics.json, or a folder with runs anywhere below it, of
            which those that have not written anything yet are left out; NAME=PATH to say what the
            run is called.

    Raises:
        UserError: there are no metrics where one is looked for, or two runs have the same name.
    """
    found: dict[Path, str] = {}
    begun: set[Path] = set()  # found below a folder: they may have nothing to show yet
    for text in names:
        name, separator, rest = text.partition("=")
        named = bool(separator) and not Path(text).exists()
        paths = _files(Path(rest if named else text))
        if named and len(paths) > 1:
            raise UserError(f"{text!r} names {len(paths)} runs: give each a name, or none")
        found.update(dict.fromkeys(paths, name if named else ""))
        begun.update(paths if len(paths) > 1 else ())
    curves = {path: _curves(path) for path in found}
    waiting = [path for path in found if not curves[path]]
    if waiting and (len(waiting) == len(found) or not begun.issuperset(waiting)):
        raise UserError(f"{waiting[0]} is empty: no metrics are written yet")
    found = {path: name for path, name in found.items() if curves[path]}
    short = _short_names([path for path, name in found.items() if not name])
    runs = [Run(name or short[path], path, curves[path]) for path, name in found.items()]
    called = [run.name for run in runs]
    for run in runs:
        if called.count(run.name) > 1:
            raise UserError(f"several runs are called {run.name!r}: name them as NAME=PATH")
    return runs


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if (path / FILE).is_file():
        return [path / FILE]
    below = sorted(path.rglob(FILE))
    if not below:
        raise UserError(f"there is no {FILE} in {path}: name a run's OUTPUT_DIR")
    return below


def _short_names(paths: list[Path]) -> dict[Path, str]:
    """For each file the part of its folder's path that tells it from the others, without what all
    of them end in."""
    parts = {path: path.absolute().parent.parts for path in paths}
    if len(paths) > 1:
        reversed_parts = zip(*(reversed(p) for p in parts.values()), strict=False)
        same = sum(1 for _ in takewhile(lambda names: len(set(names)) == 1, reversed_parts))
        parts = {path: p[: len(p) - same] for path, p in parts.items()}
    names = {}
    for path, own in parts.items():
        others = [other for p, other in parts.items() if p != path]
        lengths = (n for n in range(1, len(own)) if all(o[-n:] != own[-n:] for o in others))
        names[path] = "/".join(own[-next(lengths, len(own)) :])
    return names


def _curves(path: Path) -> dict[str, tuple[list[int], list[float]]]:
    curves: dict[str, tuple[list[int], list[float]]] = {}
    for record in read_metrics(path):
        for key, value in record.items():
            if key != "iteration":
                iterations, values = curves.setdefault(key.removeprefix(_PREFIX), ([], []))
                iterations.append(record["iteration"])
                values.append(value)
    return curves
