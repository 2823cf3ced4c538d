"""The whole job on the built-in data: render, pretrain, export, fine-tune, compare."""

import json
import os
import shutil
import time
from datetime import date
from pathlib import Path

import torch
from detectron2.config import CfgNode, get_cfg
from tabulate import tabulate

from moco_d2.checkpoint import convert
from moco_d2.config import add_moco_config
from moco_d2.data.synthetic import SETS, render_demo_data
from moco_d2.engine.trainer import PretrainTrainer
from moco_d2.transfer.cells import REPOSITORY, Cell, training_step
from moco_d2.transfer.machine import cores, places, processor
from moco_d2.transfer.runner import run_cells
from moco_d2.transfer.statistics import spread
from moco_d2.visualization.curves import draw_curves
from moco_d2.visualization.detections import draw_detections
from moco_d2.visualization.metrics import read_runs
from moco_d2.visualization.views import draw_view_pairs

PRETRAIN_CONFIG = REPOSITORY / "configs/demo/moco_pretrain.yaml"
TRANSFER_CONFIG = REPOSITORY / "configs/demo/scenes_faster_rcnn_R18_FPN.yaml"
USED_SETS = ("objects_train", "objects_val", "scenes_train", "scenes_test")
METRICS = {"AP": "bbox/AP", "AP50": "bbox/AP50"}  # title in the table -> key in metrics.json


class Reports:
    """Prints what running cells have newly written to their metrics.json."""

    def __init__(self) -> None:
        self._reported: dict[str, int] = {}

    def __call__(self, running: list[Cell]) -> None:
        for cell in running:
            records = [r for r in cell.steps[0].metrics() if "total_loss" in r]
            if records and records[-1]["iteration"] > self._reported.get(cell.name, -1):
                self._reported[cell.name] = records[-1]["iteration"]
                self._print(cell, records[-1])

    def _print(self, cell: Cell, last: dict[str, float]) -> None:
        words = [f"  {cell.steps[0].name}: {int(last['iteration']) + 1}/{cell.iterations}"]
        words.append(f"loss {last['total_loss']:.3f}")
        if "[metric]contrastive_acc1" in last:
            words.append(f"(chance {last['[metric]chance_level']:.3f})")
            words.append(f"contrastive accuracy {last['[metric]contrastive_acc1']:.0f} %")
        words.append(f"{last.get('eta_seconds', 0):.0f} s left")
        print("  ".join(words), flush=True)


def _run_anew(cells: list[Cell], at_once: int) -> None:
    """Run cells from their beginning; an error if one of them fails."""
    for cell in cells:
        shutil.rmtree(cell.folder, ignore_errors=True)
    failed = run_cells(cells, places(at_once, 1, on_gpu=False), watch=Reports())
    if failed:
        raise RuntimeError(f"{failed[0].steps[0].name} failed: {failed[0].result['error']}")


def run_demo(
    output: str,
    options: list[str],
    trials: int,
    *,
    sizes: dict[str, int] | None = None,
    transfer_options: tuple[str, ...] = (),
) -> dict:
    """Do the whole job and print the table.

    Args:
        output: folder for everything that is written; the rendered data in it are kept.
        options: KEY VALUE pairs for the pretraining config.
        trials: fine-tuning runs per initialisation, each with its own seed.
        sizes: images per set where they differ from the built-in data set's defaults.
        transfer_options: KEY VALUE pairs for the fine-tuning config.

    Returns:
        what is written to results.json.
    """
    begin = time.time()
    root = Path(output).resolve()
    os.environ["DETECTRON2_DATASETS"] = str(root / "datasets")

    _headline(1, "render the built-in data set")
    sizes = {**dict.fromkeys(set(SETS) - set(USED_SETS), 0), **(sizes or {})}
    render_demo_data(str(root / "datasets/moco_demo"), sizes=sizes)

    _headline(2, "pretrain without labels: MoCo v2, ResNet-18")
    cfg = _config(PRETRAIN_CONFIG, options)
    processes = max(n for n in (1, 2, 4) if n <= cores())  # 4 BN groups, so up to 4 processes
    pretraining = Cell(root, "pretrain", "moco", 1, cfg.SEED, place="pretrain")
    arguments = (PRETRAIN_CONFIG, pretraining.folder, options, cfg.SOLVER.MAX_ITER, processes)
    pretraining.steps = (training_step("pretraining", *arguments),)
    _run_anew([pretraining], at_once=1)
    checkpoint = root / "pretrain/model_final.pth"

    _headline(3, "classify by nearest neighbours, with random and with pretrained features")
    knn = {}
    for title, weights in (("random", ""), ("MoCo v2", str(checkpoint))):
        evaluated = _config(PRETRAIN_CONFIG, [*options, "MODEL.WEIGHTS", weights])
        knn[title] = PretrainTrainer.eval_only(evaluated)["knn"]["top1"]
        print(f"  {title}: {knn[title]:.1f} % of the validation objects", flush=True)

    _headline(4, "export the query encoder's backbone to detectron2")
    backbone = root / "moco_r18.pkl"
    print(convert(str(checkpoint), str(backbone), force=True), flush=True)

    _headline(5, f"fine-tune a detector on few scenes, {trials} run(s) per initialisation")
    iterations = _config(TRANSFER_CONFIG, [*transfer_options]).SOLVER.MAX_ITER
    common = [*transfer_options, "MODEL.DEVICE", "cpu", "DATALOADER.NUM_WORKERS", "0"]
    cells = {}
    for trial in range(1, trials + 1):
        for title, folder, weights in (("random", "random", ""), ("MoCo v2", "moco", backbone)):
            cell = Cell(root, "transfer", folder, trial, seed=trial)
            own = [*common, "MODEL.WEIGHTS", str(weights), "SEED", str(trial)]
            arguments = (TRANSFER_CONFIG, cell.folder, own, iterations)
            cell.steps = (training_step(f"{title}, run {trial}", *arguments),)
            cells[title, trial] = cell
    _run_anew(list(cells.values()), at_once=cores())

    _headline(6, "draw what happened")
    pictures = {
        "views": root / "view_pairs.png",
        "curves": root / "pretraining_curves.png",
        "detections": root / "detections.png",
    }
    draw_view_pairs(cfg, str(pictures["views"]))
    draw_curves(read_runs([str(root / "pretrain")])).savefig(pictures["curves"], dpi=110)
    detectors = {title: _trained(cells[title, 1].folder) for title in knn}
    draw_detections(detectors, "moco_demo_scenes_test", str(pictures["detections"]))

    results = {
        "date": date.today().isoformat(),
        "machine": f"{processor()}, {cores()} cores, torch {torch.__version__}",
        "seconds": {"pretraining": pretraining.seconds(), "all": time.time() - begin},
        "pretraining_iterations": cfg.SOLVER.MAX_ITER,
        "trials": trials,
        "rows": [
            {
                "init": title,
                "kNN": knn[title],
                **_spread([cells[title, t].measured() for t in range(1, trials + 1)]),
            }
            for title in knn
        ],
    }
    (root / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    _print_table(results, root, pictures)
    return results


def _headline(number: int, text: str) -> None:
    print(f"\n[{number}/6] {text}", flush=True)


def _config(path: Path, options: list[str]) -> CfgNode:
    cfg = get_cfg()
    add_moco_config(cfg)
    cfg.merge_from_file(str(path))
    cfg.merge_from_list(options)
    return cfg


def _trained(output: Path) -> CfgNode:
    """The config of a finished run, with its weights."""
    return _config(output / "config.yaml", ["MODEL.WEIGHTS", str(output / "model_final.pth")])


def _spread(trials: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Mean and sample standard deviation of each metric; no deviation of a single trial."""
    summary = {}
    for title, key in METRICS.items():
        values = [trial[key] for trial in trials]
        summary[title] = {"values": values, **spread(values)}
    return summary


def _print_table(results: dict, root: Path, pictures: dict[str, Path]) -> None:
    def cell(value: dict) -> str:
        spread = "" if value["std"] is None else f" ± {value['std']:.1f}"
        return f"{value['mean']:.1f}{spread}"

    rows = [
        (row["init"], cell(row["AP"]), cell(row["AP50"]), f"{row['kNN']:.1f}")
        for row in results["rows"]
    ]
    print(
        f"\nFaster R-CNN fine-tuned on few scenes, mean ± std of {results['trials']} run(s); "
        "kNN: accuracy of the features before fine-tuning\n"
    )
    titles = ("initialisation", "AP", "AP50", "kNN %")
    print(tabulate(rows, titles, tablefmt="github", disable_numparse=True))
    print(f"\n{results['seconds']['all']:.0f} s on {results['machine']}")
    print(f"table: {_relative(root / 'results.json')}")
    for title, path in pictures.items():
        print(f"{title}: {_relative(path)}")


def _relative(path: Path) -> str:
    return os.path.relpath(path)
