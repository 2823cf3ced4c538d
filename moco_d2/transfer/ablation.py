"""Ablations: grids of pretraining recipes as cells, judged by kNN and, on request, by detection."""

import re
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from detectron2.config import CfgNode
from tabulate import tabulate

from moco_d2.engine.setup import sentence, setup
from moco_d2.transfer.benchmark import run_and_report
from moco_d2.transfer.cells import REPOSITORY, TRAIN_NET, Cell, Step, training_step
from moco_d2.transfer.checks import dataset_size
from moco_d2.transfer.grids import GRIDS, V1_DROPS, Grid, Variant, select_grid
from moco_d2.transfer.machine import places
from moco_d2.transfer.plan import (
    RANDOM,
    Task,
    refuse,
    settings,
    task_metrics,
    unusable_arguments,
)
from moco_d2.transfer.runner import only_runner

KNN = "knn/top1"
CONTRASTIVE = "[metric]contrastive_acc1"
CONVERT = REPOSITORY / "tools/convert_weights.py"
# What no option may set: the trial's own, and what follows from the length or the pretraining.
_PRETRAINING_OWN = ("SEED", "OUTPUT_DIR", "SOLVER.STEPS")
_DETECTION_OWN = ("SEED", "OUTPUT_DIR", "MODEL.WEIGHTS")


@dataclass
class Ablation:
    """What is to be run.

    Attributes:
        grids: see `select_grid`.
        options: KEY VALUE pairs of all pretraining.
        detect: configs that each backbone is fine-tuned with afterwards.
        detect_options: KEY VALUE pairs of all fine-tuning.
        validate: evaluate what is fine-tuned on the `_val` sets in place of the `_test` sets.
    """

    root: Path
    grids: list[str]
    seeds: int
    num_gpus: int = 1
    options: Sequence[str] = ()
    detect: Sequence[str] = ()
    detect_options: Sequence[str] = ()
    validate: bool = False
    problems: list[str] = field(default_factory=list)
    on_gpu: bool = False  # whether any run needs one

    def cells(self) -> list[Cell]:
        """All cells, the first trial of everything first. What cannot run is in `problems`."""
        self.problems += self._unusable()
        return [
            cell
            for trial in range(1, self.seeds + 1)
            for name, grid in self.selected().items()
            for variant in grid.variants
            if (cell := self._cell(name, grid, variant, trial)) is not None
        ]

    def _unusable(self) -> list[str]:
        """Sentences on what would be overridden, or written to the same place, without a word."""
        problems = []
        for what, options, own in (
            ("KEY VALUE", self.options, _PRETRAINING_OWN),
            ("--detect-option", self.detect_options, _DETECTION_OWN),
        ):
            clash = sorted(set(options[0::2]) & set(own))
            problems += [f"{key} is each run's own: leave it out of {what}" for key in clash]
        stems = [Path(path).stem for path in self.detect]
        for stem in sorted({s for s in stems if stems.count(s) > 1 or s == "pretrain"}):
            problems.append(f"--detect {stem}: rename that config, whose folder is another run's")
        return problems

    def selected(self) -> dict[str, Grid]:
        """The grids, with the variants that are to be run; one that is named twice has both's.

        Raises:
            UserError: there is no such grid or variant.
        """
        chosen: dict[str, Grid] = {}
        for name, grid in map(select_grid, self.grids):
            wanted = (*grid.variants, *(chosen[name].variants if name in chosen else ()))
            in_order = tuple(v for v in GRIDS[name].variants if v in wanted)
            chosen[name] = replace(grid, variants=in_order)
        return chosen

    def _cell(self, name: str, grid: Grid, variant: Variant, trial: int) -> Cell | None:
        cell = Cell(self.root, name, variant.name, trial, seed=trial)
        clash = sorted(set(self.options[0::2]) & set(variant.options))
        if clash:
            self.problems.append(f"grid {name} sets {', '.join(clash)}: leave it out of KEY VALUE")
            return None
        config = variant.config or grid.config
        options = [*self.options, *_flat(variant.options), "SEED", str(trial)]
        cfg = self._config(config, options)
        if cfg is None:
            return None
        scaled = _scaling(variant, cfg)
        if scaled:
            options = [*options, *scaled]
            cfg = self._config(config, options)
        folder = cell.folder / "pretrain"
        cell.inputs = settings(cfg)
        if variant.kind == RANDOM:
            cell.steps = (_evaluation(config, folder, options),)
            backbone = ""
        else:
            options = ["SOLVER.CHECKPOINT_KEEP", "1", *options]
            iterations, watched = cfg.SOLVER.MAX_ITER, (CONTRASTIVE,)
            cell.steps = (
                training_step(
                    "pretrain", config, folder, options, iterations, self.num_gpus, watched=watched
                ),
            )
            backbone = str(cell.folder / "backbone.pkl")
        if self.detect:
            cell.steps += tuple(self._detection(cell, backbone))
        return cell

    def _detection(self, cell: Cell, backbone: str) -> list[Step]:
        """Steps that export the backbone and fine-tune it, with new layers and a data order that
        follow from the trial."""
        steps = []
        if backbone:
            checkpoint = cell.folder / "pretrain/model_final.pth"
            command = (sys.executable, str(CONVERT), str(checkpoint), backbone, "--force")
            steps.append(Step("export", command))
        for path in self.detect:
            options = ["SOLVER.CHECKPOINT_KEEP", "1", "SEED", str(cell.seed)]
            options += self._detect_options(Path(path))
            cfg = self._config(Path(path), options)
            if cfg is None:
                continue
            label = Path(path).stem
            cell.inputs |= {f"{label} {key}": value for key, value in settings(cfg).items()}
            options += ["MODEL.WEIGHTS", backbone]
            steps.append(
                training_step(
                    f"detect_{label}",
                    Path(path).resolve(),
                    cell.folder / label,
                    options,
                    cfg.SOLVER.MAX_ITER,
                    self.num_gpus,
                    label=label,
                )
            )
        return steps

    def _detect_options(self, config: Path) -> list[str]:
        """KEY VALUE pairs of fine-tuning with a config."""
        options = list(self.detect_options)
        cfg = self._config(config, options) if self.validate else None
        if cfg is not None:
            if any(not name.endswith("_test") for name in cfg.DATASETS.TEST):
                self.problems.append(
                    f"{config}: --val takes sets called …_val in place of …_test, and "
                    f"DATASETS.TEST is {cfg.DATASETS.TEST}"
                )
            sets = tuple(re.sub("_test$", "_val", name) for name in cfg.DATASETS.TEST)
            options += ["DATASETS.TEST", str(sets)]
        return options

    def _config(self, path: Path, options: Sequence[str]) -> CfgNode | None:
        """The effective config; all data sets that it names are there."""
        args = Namespace(config_file=str(path), opts=list(options), eval_only=False, resume=False)
        try:
            cfg, _ = setup(args, self.num_gpus)
            for name in (*cfg.DATASETS.TRAIN, *cfg.DATASETS.TEST):
                dataset_size(name)
        except (ValueError, KeyError, AssertionError, OSError, ImportError) as error:
            self.problems.append(f"{path}: {sentence(error)}")
            return None
        self.on_gpu |= cfg.MODEL.DEVICE != "cpu"
        return cfg

    def describe(self) -> dict[str, Any]:
        """`tasks`, `inits` and `trials` of results.json."""
        detection = []
        for path in self.detect:
            cfg = self._config(Path(path), self._detect_options(Path(path)))
            task = Task(Path(path).stem, Path(path))
            detection += [f"{task.name}/{metric}" for metric in task_metrics(task, cfg)]
        grids = self.selected()
        variants = {v.name: v for grid in grids.values() for v in grid.variants}
        judged = "; what is fine-tuned is evaluated on the validation split" * self.validate
        return {
            "trials": self.seeds,
            "tasks": [
                {
                    "name": name,
                    "config": str(grid.config),
                    "protocol": f"{grid.question} {grid.source}{judged}",
                    "metric": KNN,
                    "shown": [KNN, *(metric for metric in detection if metric.endswith("/AP"))],
                    "metrics": [KNN, CONTRASTIVE.removeprefix("[metric]"), *detection],
                    "inits": [variant.name for variant in grid.variants],
                }
                for name, grid in grids.items()
            ],
            "inits": [
                {"name": name, "weights": "", "sha256": "", "kind": variant.kind}
                for name, variant in variants.items()
            ],
        }


def run_ablation(ablation: Ablation, at_once: int, command: str) -> int:
    """Check, run and report; returns how many cells failed.

    Args:
        at_once: cells that run at the same time.
        command: the command line, for the record.

    Raises:
        UserError: something cannot work.
        Stopped: on a signal; the same command goes on.
    """
    refuse(unusable_arguments("--seeds", ablation.seeds, ablation.num_gpus, ablation.options))
    cells = ablation.cells()
    refuse(ablation.problems)
    slots = places(at_once, ablation.num_gpus, ablation.on_gpu)
    about = {**ablation.describe(), "title": "Ablations", "command": command}
    print(f"{len(cells)} cells in {ablation.root}, {at_once} at a time", flush=True)
    with only_runner(ablation.root):
        return run_and_report(ablation.root, cells, slots, about)


def list_grids() -> str:
    """What there is to run, as text."""
    rows = [
        (name, f"{grid.question}\n{grid.source}", "\n".join(v.name for v in grid.variants))
        for name, grid in GRIDS.items()
    ]
    return tabulate(rows, ("grid", "question and source", "variants"), tablefmt="grid")


def _evaluation(config: Path, folder: Path, options: Sequence[str]) -> Step:
    """kNN of the network as it is initialised."""
    command = [sys.executable, TRAIN_NET, "--config", config, "--eval-only", *options]
    return Step("evaluate", tuple(str(w) for w in [*command, "OUTPUT_DIR", folder]), folder)


def _scaling(variant: Variant, cfg: CfgNode) -> list[str]:
    """Options that follow from the config's own schedule: another batch, the drops of the lr."""
    solver, options = cfg.SOLVER, {}
    iterations = solver.MAX_ITER
    if variant.batch or variant.length != 1:
        batch = variant.batch or solver.IMS_PER_BATCH
        factor = batch / solver.IMS_PER_BATCH
        iterations = max(1, round(iterations * variant.length / factor))
        options = {
            "SOLVER.IMS_PER_BATCH": batch,
            "SOLVER.BASE_LR": solver.BASE_LR * factor,
            "SOLVER.MAX_ITER": iterations,
            "SOLVER.WARMUP_ITERS": round(solver.WARMUP_ITERS * variant.length / factor),
        }
    if solver.LR_SCHEDULER_NAME == "WarmupMultiStepLR":
        options["SOLVER.STEPS"] = tuple(round(share * iterations) for share in V1_DROPS)
    return _flat(options)


def _flat(options: dict[str, Any]) -> list[str]:
    return [str(word) for pair in options.items() for word in pair]
