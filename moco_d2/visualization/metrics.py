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

    Where iterations go back, a run went on from a checkpoint or was started anew: what an earlier
    attempt wrote of them does not count. Half a line at the end is one that is being written.

    Raises:
        UserError: a line is not detectron2's.
    """
    records: dict[int, dict[str, float]] = {}
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
            while records and next(reversed(records)) > iteration:
                records.popitem()
            records.setdefault(iteration, {}).update(record)
    return list(records.values())


def read_runs(names: Sequence[str]) -> list[Run]:
    """Read runs for comparison.

    Args:
        names: each a run's folder, its metrics.json, or a folder with runs anywhere below it;
            NAME=PATH to say what the run is called.

    Raises:
        UserError: there are no metrics where one is looked for, or two runs have the same name.
    """
    found: dict[Path, str] = {}
    for text in names:
        name, separator, rest = text.partition("=")
        named = bool(separator) and not Path(text).exists()
        paths = _files(Path(rest if named else text))
        if named and len(paths) > 1:
            raise UserError(f"{text!r} names {len(paths)} runs: give each a name, or none")
        found.update(dict.fromkeys(paths, name if named else ""))
    short = _short_names([path for path, name in found.items() if not name])
    runs = [Run(name or short[path], path, _curves(path)) for path, name in found.items()]
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
    if not curves:
        raise UserError(f"{path} is empty: no metrics are written yet")
    return curves
