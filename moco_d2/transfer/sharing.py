"""Cells that are the same run under several names: run once, shown in each place."""

import json
import shutil
from collections.abc import Iterable

from moco_d2.transfer.cells import DONE, Cell, write_json


def same_runs(cells: Iterable[Cell]) -> dict[str, list[Cell]]:
    """Group cells that would do the very same, under different names.

    Returns:
        name of the one to run, or of one that is done already -> the others.
    """
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        what = [cell.seed, [step.name for step in cell.steps], cell.inputs, cell.files]
        groups.setdefault(json.dumps(what, sort_keys=True), []).append(cell)
    found = {}
    for group in groups.values():
        first = next((cell for cell in group if cell.status == DONE), group[0])
        found[first.name] = [cell for cell in group if cell is not first]
    return found


def copy_result(source: Cell, target: Cell) -> None:
    """Let a cell show the result, and the curves, of another one that is the same run."""
    for path in sorted(source.folder.rglob("*")):
        if path.name in ("metrics.json", "config.yaml"):
            copied = target.folder / path.relative_to(source.folder)
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copied)
    target.write_plan(source.steps_done(), source.seconds())
    own = {"task": target.group, "init": target.variant, "same_run_as": source.name}
    write_json(target.folder / "cell.json", {**source.result, **own})
