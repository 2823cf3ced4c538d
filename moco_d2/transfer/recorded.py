"""The recorded benchmark: what docs/results shows, as ablations that anyone can repeat on two CPU
cores."""

import json
import os
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moco_d2.data.synthetic import render_demo_data
from moco_d2.errors import UserError
from moco_d2.transfer.ablation import Ablation, run_ablation
from moco_d2.transfer.cells import DONE, REPOSITORY, Cell, read_json, write_json
from moco_d2.transfer.grids import DEMO
from moco_d2.transfer.machine import environment, places
from moco_d2.transfer.plan import refuse
from moco_d2.transfer.runner import only_runner, run_cells

SCENES = DEMO / "scenes_mask_rcnn_R18_FPN.yaml"  # boxes and masks of one detector
TASKS = (
    SCENES,
    DEMO / "novel_faster_rcnn_R18_FPN.yaml",
    DEMO / "figures_keypoint_rcnn_R18_FPN.yaml",
)
# The cores are busy with a cell each.
FINE_TUNING = ("MODEL.DEVICE", "cpu", "DATALOADER.NUM_WORKERS", "0")


@dataclass(frozen=True)
class Part:
    """An ablation with a folder of its own; for the attributes see `Ablation`."""

    grids: tuple[str, ...]
    seeds: int
    options: tuple[str, ...] = ()
    detect: tuple[Path, ...] = ()

    def ablation(self, root: Path, validate: bool = False) -> Ablation:
        detect = [str(path) for path in self.detect]
        return Ablation(
            root,
            list(self.grids),
            self.seeds,
            options=self.options,
            detect=detect,
            detect_options=FINE_TUNING if detect else (),
            validate=validate,
        )

    def command(self, output: Path, jobs: int, validate: bool = False) -> str:
        """The command line that does the same."""
        words = ["tools/ablate.py", *self.grids, *self.options]
        words += ["--seeds", self.seeds, "--jobs", jobs, "--output", output]
        for path in self.detect:
            words += ["--detect", path.relative_to(REPOSITORY)]
        for key, value in zip(FINE_TUNING[::2], FINE_TUNING[1::2], strict=True):
            words += ["--detect-option", key, value] if self.detect else []
        return shlex.join(map(str, words + ["--val"] * validate))


METHODS = (
    "methods:random,supervised,supervised_96,supervised_992,moco_v1,moco_v2,moco_v2_long,moco_v3"
)
# Steps of 64 images, of which the built-in objects have 24,000: 4.3 and 0.9 epochs.
LONG = ("SOLVER.MAX_ITER", "1600")
SHORT = ("SOLVER.MAX_ITER", "350")
# The demo's recipe is a part of each of the grids, and run once.
TRENDS = (
    "momentum:m0,m0.9,m0.995",
    "dictionary:queue_K64,queue_K4096",
    "shuffle",
    "steps:v1,mlp_views_cosine",
)
# Sized for two cores: full to end in under 3 hours, quick in some 17 minutes.
PLANS: dict[str, dict[str, Part]] = {
    "full": {
        "methods": Part((METHODS,), 3, LONG, TASKS),
        "trends": Part(TRENDS, 3, SHORT),
    },
    "quick": {
        "methods": Part(("methods:random,supervised,moco_v2",), 1, LONG, (SCENES,)),
        "trends": Part(TRENDS, 1, SHORT),
    },
}


def use_data_of(output: str, sizes: dict[str, int] | None = None) -> None:
    """Render the built-in data into a folder, if they are not there, for all runs to be found.

    Args:
        output: folder of the benchmark.
        sizes: images per set where they differ from the defaults.
    """
    root = Path(output).resolve() / "datasets"
    os.environ["DETECTRON2_DATASETS"] = str(root)
    render_demo_data(str(root / "moco_demo"), sizes=sizes)


def run_recorded(parts: dict[str, Part], output: str, jobs: int, validate: bool = False) -> int:
    """Run all parts, each into a folder of `output`; what is done there is kept.

    Args:
        parts: of `PLANS`, by the name of the folder.
        output: folder for everything written.
        jobs: cells at the same time.
        validate: see `Ablation`.

    Returns:
        how many cells failed.

    Raises:
        UserError: something cannot work.
        Stopped: on a signal; the same call goes on.
    """
    return sum(
        run_ablation(
            part.ablation(Path(output, name).resolve(), validate),
            jobs,
            part.command(Path(output, name), jobs, validate),
        )
        for name, part in parts.items()
    )


def rerun_cell(
    parts: dict[str, Part], output: str, name: str, recorded: str, validate: bool = False
) -> bool:
    """Run a cell anew, in a folder of its own, and compare everything that it measures.

    Args:
        parts: of `PLANS`.
        output: folder to write to, below "rerun".
        name: GRID/VARIANT/trial_k.
        recorded: folder with the results.json of each part to compare with.
        validate: see `Ablation`.

    Returns:
        whether all recorded numbers came out again, bit for bit.

    Raises:
        UserError: there is no such cell, it is not recorded, or it failed.
    """
    part = next((p for p, given in parts.items() if _has_grid(given, name)), None)
    if part is None:
        raise UserError(f"there is no cell {name!r}: give GRID/VARIANT/trial_k as in results.json")
    results = read_json(Path(recorded, part, "results.json"))
    before = _recorded_cell(results, name)
    if before is None:
        raise UserError(f"{Path(recorded, part, 'results.json')} has no finished cell {name!r}")
    root = Path(output, "rerun", part).resolve()
    ablation = parts[part].ablation(root, validate)
    cell = next((cell for cell in ablation.cells() if cell.name == name), None)
    refuse(ablation.problems)
    if cell is None:
        raise UserError(f"there is no cell {name!r} in this plan; name it as in results.json")
    with only_runner(root):
        shutil.rmtree(cell.folder, ignore_errors=True)
        print(f"running {name} in {cell.folder}", flush=True)
        if run_cells([cell], places(1, ablation.num_gpus, ablation.on_gpu)):
            raise UserError(f"{name} failed: {cell.result['error']}")
    return _compare(before, cell, results["environment"])


def copy_results(output: str, target: str) -> list[Path]:
    """Copy what a repository should keep of each part: results.json, report.md and the plots.

    Of each cell only what the report tells is kept, and no path says where it was run.

    Args:
        output: folder of the benchmark.
        target: such as docs/results.

    Returns:
        the folders written.

    Raises:
        UserError: there is nothing to copy, or a part is not finished.
    """
    written = []
    for path in sorted(Path(output).glob("*/results.json")):
        source, copy = path.parent.resolve(), Path(target, path.parent.name)
        results = read_json(path)
        planned = results["trials"] * sum(len(task["inits"]) for task in results["tasks"])
        if not results["summary"] or planned != sum(c["status"] == DONE for c in results["cells"]):
            raise UserError(f"{source} is not finished: run the same benchmark again first")
        metrics = {task["name"]: task["metrics"] for task in results["tasks"]}
        for cell in results["cells"]:
            kept = metrics[cell["task"]]
            cell["metrics"] = {k: v for k, v in cell["metrics"].items() if k in kept}
        shutil.rmtree(copy, ignore_errors=True)
        write_json(copy / "results.json", json.loads(_portable(json.dumps(results), source)))
        report = (source / "report.md").read_text()
        (copy / "report.md").write_text(_portable(report, source))
        shutil.copytree(source / "plots", copy / "plots")
        written.append(copy)
    if not written:
        raise UserError(f"{output} has no part with a results.json: run the benchmark first")
    return written


def _has_grid(part: Part, cell: str) -> bool:
    return cell.split("/")[0] in {grid.split(":")[0] for grid in part.grids}


def _recorded_cell(results: dict[str, Any] | None, name: str) -> dict[str, Any] | None:
    cells = results["cells"] if results else []
    return next((c for c in cells if c["folder"] == name and c["status"] == DONE), None)


def _compare(before: dict[str, Any], cell: Cell, machine: dict[str, Any]) -> bool:
    """Print all recorded numbers beside the new ones; whether they are the same, bit for bit."""
    after = cell.result["metrics"]
    same = True
    for metric, value in before["metrics"].items():
        equal = after.get(metric) == value
        same &= equal
        print(f"{'same' if equal else 'DIFFERS'}  {metric}  {value}  {after.get(metric)}")
    for key, value in environment().items():
        if machine.get(key) != value:
            print(f"recorded with another {key}: {machine.get(key)}, here {value}")
    return same


def _portable(text: str, root: Path) -> str:
    """Without the places of the benchmark and of the repository."""
    return text.replace(f"{root.parent}/", "output/benchmark/").replace(f"{REPOSITORY}/", "")
