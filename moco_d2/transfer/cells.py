"""Cells: the runs of a benchmark, each with a folder of its own, and what they leave behind.

A cell's folder DIR/group/variant/trial_k holds `plan.json` (what is run there, and how much of it
is done) and, once it has ended, `cell.json`; DIR holds `results.json`, all cells together.
"""

import contextlib
import json
import math
import shlex
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moco_d2.checkpoint.files import replaced_file
from moco_d2.engine.setup import EVALUATION
from moco_d2.errors import UserError
from moco_d2.visualization.metrics import read_metrics

REPOSITORY = Path(__file__).resolve().parents[2]
TRAIN_NET = REPOSITORY / "tools/train_net.py"
# What evaluators call their results: `bbox/AP` of metrics.json is one, `rpn/num_pos_anchors` none.
EVALUATED = (
    "bbox",
    "segm",
    "keypoints",
    "sem_seg",
    "densepose_gps",
    "densepose_gpsm",
    "densepose_segm",
    "knn",
    "classification",
)
# Scores over all objects of a data set, which are defined on every set that has any.
_OF_ALL = ("/AP", "/AP50", "/AP75")
DONE, FAILED = "done", "failed"


@dataclass(frozen=True)
class Step:
    """A command of a cell. Started again after a stop, it goes on or begins anew, as it can.

    Attributes:
        name: what the progress and the log are called after.
        command: program and arguments.
        folder: where a run writes its metrics.json; None for any other command.
        iterations: of a training run.
        label: put before the names of its results, "label/bbox/AP"; "": nothing is.
        watched: entries of metrics.json whose last value counts as a result besides.
    """

    name: str
    command: tuple[str, ...]
    folder: Path | None = None
    iterations: int = 0
    label: str = ""
    watched: tuple[str, ...] = ()

    def metrics(self) -> list[dict[str, float]]:
        """What the run has written so far; see `read_metrics`."""
        path = self.folder and self.folder / "metrics.json"
        return read_metrics(path) if path and path.exists() else []

    def results(self) -> dict[str, float]:
        """The last results of evaluations, and of what is watched without its `[metric]`."""
        found = {}
        for record in self.metrics():
            for key, value in record.items():
                if is_result(key) or key in self.watched:
                    found[key.removeprefix("[metric]")] = value
        if self.folder:
            evaluated = read_json(self.folder / EVALUATION) or {}
            found.update({k: math.nan if v is None else v for k, v in evaluated.items()})
        return {f"{self.label}/{k}" if self.label else k: v for k, v in found.items()}


def training_step(
    name: str,
    config: str | Path,
    folder: Path,
    options: Iterable[Any],
    iterations: int,
    num_gpus: int = 1,
    **more: Any,
) -> Step:
    """A run of tools/train_net.py that goes on where it was stopped.

    Args:
        config: path of a config.
        folder: OUTPUT_DIR.
        options: KEY VALUE pairs.
        iterations: SOLVER.MAX_ITER as it will be.
        num_gpus: GPUs, or processes on a CPU.
        more: further attributes of a `Step`.
    """
    command = [sys.executable, TRAIN_NET, "--config", config, "--num-gpus", num_gpus, "--resume"]
    command += [*options, "OUTPUT_DIR", folder]
    return Step(name, tuple(str(word) for word in command), folder, iterations, **more)


@dataclass
class Cell:
    """One trial of one variant in one group: steps in a row, and what the last ones measured.

    Attributes:
        root: folder of the benchmark.
        group: task, or name of a grid.
        variant: initialisation, or value of the grid.
        trial: from 1.
        seed: of the trial's runs.
        steps: commands, run in this order.
        inputs: what besides the commands decides the result, by name: plain values, such as those
            of a config's keys.
        files: files that decide it, by path, with their SHA-256.
        place: the folder in `root`; "": group/variant/trial_k.
    """

    root: Path
    group: str
    variant: str
    trial: int
    seed: int
    steps: tuple[Step, ...] = ()
    inputs: dict[str, Any] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    place: str = ""

    @property
    def name(self) -> str:
        return self.place or f"{self.group}/{self.variant}/trial_{self.trial}"

    @property
    def folder(self) -> Path:
        return self.root / self.name

    @property
    def iterations(self) -> int:
        return sum(step.iterations for step in self.steps)

    def iterations_done(self) -> int:
        """Iterations that metrics.json tells of, if it can be read, and those of finished steps."""
        if self.status == DONE:
            return self.iterations
        finished = self.steps_done()
        done = sum(step.iterations for step in self.steps[:finished])
        for step in self.steps[finished : finished + 1]:
            with contextlib.suppress(UserError):
                records = [r for r in step.metrics() if "total_loss" in r]
                done += min(int(records[-1]["iteration"]) + 1, step.iterations) if records else 0
        return done

    @property
    def result(self) -> dict[str, Any] | None:
        """The content of cell.json; None: the cell has not ended."""
        return read_json(self.folder / "cell.json")

    @property
    def status(self) -> str | None:
        """`DONE`, `FAILED`; None: not ended."""
        return (self.result or {}).get("status")

    def steps_done(self) -> int:
        """Steps that have ended well."""
        return self._record().get("steps_done", 0)

    def seconds(self) -> float:
        """How long its commands ran, in all starts that a kill has not cut off."""
        return self._record().get("seconds", 0.0)

    def write_plan(self, steps_done: int, seconds: float) -> None:
        content = {"plan": self.plan(), "steps_done": steps_done, "seconds": round(seconds, 1)}
        write_json(self.folder / "plan.json", content)

    def _record(self) -> dict[str, Any]:
        return read_json(self.folder / "plan.json") or {}

    def plan(self) -> dict[str, Any]:
        """What decides the result of the cell. The interpreter's place does not."""
        commands = [[word for word in s.command if word != sys.executable] for s in self.steps]
        return {"seed": self.seed, **self.files, **self.inputs, "commands": commands}

    def replanned(self) -> str | None:
        """What of the plan differs from that of the runs in the folder; None: nothing does."""
        before = self._record().get("plan")
        now = json.loads(json.dumps(self.plan()))
        if before is None or before == now:
            return None
        for key in sorted({*before, *now}, key=lambda key: key == "commands"):
            if before.get(key) != now.get(key):
                return f"{key} was {_short(before.get(key))} and is {_short(now.get(key))}"
        return None

    def measured(self) -> dict[str, float]:
        """What its steps measured, by the names of metrics.json.

        detectron2's evaluators call the AP of a detector that finds nothing NaN: here it is 0.
        What else is not finite, as the AP over objects of a size that does not occur, is left out.
        """
        found = {}
        for step in self.steps:
            found.update(step.results())
        nothing_found = [k for k, v in found.items() if math.isnan(v) and k.endswith(_OF_ALL)]
        found.update(dict.fromkeys(nothing_found, 0.0))
        return {key: value for key, value in found.items() if math.isfinite(value)}

    def write_result(self, error: str | None = None) -> dict[str, Any]:
        """Write cell.json; `error` says why the cell failed, None that it did not.

        A cell whose metrics.json cannot be read has failed, too.
        """
        metrics = {}
        if error is None:
            try:
                metrics = self.measured()
            except UserError as broken:
                error = str(broken)
        result = {
            "task": self.group,
            "init": self.variant,
            "trial": self.trial,
            "seed": self.seed,
            "status": DONE if error is None else FAILED,
            "metrics": metrics,
            "seconds": self.seconds(),
            "error": error,
            "command": "; ".join(shlex.join(step.command[1:]) for step in self.steps),
        }
        write_json(self.folder / "cell.json", result)
        return result


def is_result(key: str) -> bool:
    """Whether an entry of metrics.json is an evaluation's result."""
    return any(part in EVALUATED for part in key.split("/")[:-1])


def write_results(
    root: Path,
    cells: Iterable[Cell],
    *,
    title: str,
    command: str,
    environment: dict[str, Any],
    date: str,
    trials: int,
    tasks: list[dict[str, Any]],
    inits: list[dict[str, Any]],
) -> None:
    """Write DIR/results.json; its `summary` is left to `moco_d2.transfer.summary`.

    Args:
        cells: all of the plan; those that have not ended are left out.
        title: of a report.
        command: that started the benchmark.
        environment: machine and versions.
        date: of this start, YYYY-MM-DD.
        trials: of each task and initialisation.
        tasks: `name`, `config`, `protocol`, `metric` (the first to look at), `metrics` and, where
            it is more than the first, `shown` (those with a table and a plot each).
        inits: `name`, `weights`, `sha256` and `kind`: random, supervised or pretrained.
    """
    content = {
        "version": 1,
        "title": title,
        "command": command,
        "environment": environment,
        "date": date,
        "trials": trials,
        "tasks": tasks,
        "inits": inits,
        "cells": [
            {**cell.result, "folder": cell.name} for cell in cells if cell.result is not None
        ],
        "summary": [],
    }
    write_json(root / "results.json", content)


def read_json(path: Path) -> Any:
    """The content of a JSON file; None where there is none."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced_file(str(path)) as aside:
        Path(aside).write_text(json.dumps(content, indent=2, allow_nan=False) + "\n")


def _short(value: Any, length: int = 60) -> str:
    text = json.dumps(value)
    return text if len(text) <= length else f"{text[:length]}…"
