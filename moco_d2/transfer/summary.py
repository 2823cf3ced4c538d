"""Everything that a benchmark's folder tells: cells, what they add up to, what is published."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from detectron2.config import CfgNode

from moco_d2.errors import UserError
from moco_d2.transfer.cells import DONE, read_json
from moco_d2.transfer.protocol import departures, load_config
from moco_d2.transfer.published import published_results
from moco_d2.transfer.statistics import difference, spread, verdict
from moco_d2.visualization.metrics import read_metrics

RANDOM, SUPERVISED = "random", "supervised"


def read_results(root: Path) -> dict[str, Any]:
    """results.json with the cells as they are in the folder now, and a summary of those.

    Args:
        root: folder of a benchmark.

    Returns:
        the content of results.json, described in `moco_d2.transfer.cells.write_results`, and in
        each task `departures`: see `moco_d2.transfer.protocol.departures`.

    Raises:
        UserError: there is no results.json.
    """
    results = read_json(root / "results.json")
    if results is None:
        raise UserError(f"{root} has no results.json; name the --output folder of a benchmark")
    names = ({task["name"] for task in results["tasks"]}, {i["name"] for i in results["inits"]})
    results["cells"] = [
        cell for cell in _cells_of(root) if cell["task"] in names[0] and cell["init"] in names[1]
    ]
    for task in results["tasks"]:
        task["departures"] = _departures(root, task["name"], results["cells"])
    results["summary"] = summarise(results, root)
    return results


def summarise(results: dict[str, Any], root: Path) -> list[dict[str, Any]]:
    """One row for each task, initialisation and metric that a finished cell has measured.

    Args:
        results: `tasks` (with `departures`), `inits` and `cells` of results.json.
        root: folder of the benchmark.

    Returns:
        rows of task, init, metric; trials, seeds and values, one each per finished trial; mean,
        std, n; diff_random and diff_supervised, see `statistics.difference`, None in the row of
        that initialisation itself; published: value, its source and the verdict, None where
        nothing was published for this protocol.
    """
    rows = []
    for task in results["tasks"]:
        for init in inits_of(results, task):
            cells = finished(results, task["name"], init["name"])
            name = _published_init(init, _config_of(root, cells)) if cells else None
            for metric in task["metrics"]:
                measured = [cell for cell in cells if metric in cell["metrics"]]
                if not measured:
                    continue
                row = {
                    "task": task["name"],
                    "init": init["name"],
                    "metric": metric,
                    "trials": [cell["trial"] for cell in measured],
                    "seeds": [cell["seed"] for cell in measured],
                    "values": [cell["metrics"][metric] for cell in measured],
                }
                row.update(spread(row["values"]))
                for kind in (RANDOM, SUPERVISED):
                    row[f"diff_{kind}"] = _difference_to(kind, results, task, init, metric)
                comparable = not task["departures"]
                row["published"] = _published(task["name"], name, row) if comparable else None
                rows.append(row)
    return rows


def inits_of(results: dict[str, Any], task: dict[str, Any]) -> list[dict[str, Any]]:
    """The initialisations of a task: all, unless it names its own, as the grids of an ablation."""
    names = task.get("inits")
    return [init for init in results["inits"] if names is None or init["name"] in names]


def shown_metrics(task: dict[str, Any]) -> list[str]:
    """The metrics of a task that have a table and a plot each."""
    return task.get("shown", [task["metric"]])


def finished(results: dict[str, Any], task: str, init: str) -> list[dict[str, Any]]:
    """The finished cells of a task and an initialisation, by trial."""
    cells = (c for c in results["cells"] if (c["task"], c["init"]) == (task, init))
    return sorted((c for c in cells if c["status"] == DONE), key=lambda cell: cell["trial"])


def count_trials(results: dict[str, Any]) -> int:
    """Trials that each task and initialisation should have."""
    return max([results.get("trials", 1), *(cell["trial"] for cell in results["cells"])])


def read_curve(folder: Path, metric: str) -> dict[int, float]:
    """A metric by iterations done, from what a cell's runs have written; empty where none did."""
    for path in _newest_first(folder, "metrics.json"):
        records = read_metrics(path)
        # detectron2 counts the evaluation after training as one step further than the last.
        end = max((r["iteration"] for r in records if "total_loss" in r), default=math.inf) + 1
        curve = {min(r["iteration"] + 1, end): r[metric] for r in records if metric in r}
        if curve:
            return curve
    return {}


def _cells_of(root: Path) -> Iterable[dict[str, Any]]:
    for path in sorted(root.glob("*/*/trial_*/cell.json")):
        yield {**read_json(path), "folder": path.parent.relative_to(root).as_posix()}


def _newest_first(folder: Path, name: str) -> list[Path]:
    """Files of this name in a cell's folder, the last step's first."""
    return sorted(folder.rglob(name), key=lambda path: path.stat().st_mtime, reverse=True)


def _config_of(root: Path, cells: list[dict[str, Any]]) -> CfgNode | None:
    """The config that the last run of the first of some cells was trained with."""
    for cell in cells:
        for path in _newest_first(root / cell["folder"], "config.yaml"):
            return load_config(path)
    return None


def _departures(root: Path, task: str, cells: list[dict[str, Any]]) -> list[str]:
    """Where any finished run of a task left the published protocol."""
    done = [cell for cell in cells if cell["task"] == task and cell["status"] == DONE]
    if task not in published_results().tasks:
        return ["nothing is published for this task"]
    found: dict[str, None] = {}  # in order, each once
    for cell in done:
        cfg = _config_of(root, [cell])
        lost = [f"{cell['folder']} has no config.yaml to compare with"]
        found.update(dict.fromkeys(lost if cfg is None else departures(task, cfg)))
    return list(found)


def _difference_to(
    kind: str, results: dict[str, Any], task: dict, init: dict, metric: str
) -> dict[str, Any] | None:
    """Difference to the first initialisation of a kind."""
    other = next((i["name"] for i in results["inits"] if i["kind"] == kind), init["name"])
    if other == init["name"]:
        return None
    here, there = (
        {
            cell["seed"]: cell["metrics"][metric]
            for cell in finished(results, task["name"], name)
            if metric in cell["metrics"]
        }
        for name in (init["name"], other)
    )
    return difference(here, there)


def _published_init(init: dict[str, Any], cfg: CfgNode | None) -> str:
    """What published.yaml calls an initialisation.

    Random and supervised ones are known by their kind, and MSRA's supervised network by its
    input convention; any other has to be named as the published one.
    """
    if init["kind"] != SUPERVISED or cfg is None:
        return RANDOM if init["kind"] == RANDOM else init["name"]
    msra = cfg.INPUT.FORMAT == "BGR" and cfg.MODEL.RESNETS.STRIDE_IN_1X1
    return "supervised_msra" if msra else "supervised_torchvision"


def _published(task: str, init: str | None, row: dict[str, Any]) -> dict[str, Any] | None:
    published = published_results().tasks.get(task)
    found = published.find(init, row["metric"]) if published and init else None
    if found is None:
        return None
    return {
        "init": found.init,
        "value": found.value,
        "std": found.std,
        "runs": found.runs,
        "source": found.source,
        "seen_in": found.seen_in,
        "verified": found.verified,
        **verdict(row, found),
    }
