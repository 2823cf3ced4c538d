"""The whole job on the built-in data: render, pretrain, export, fine-tune, compare."""

import json
import os
import platform
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

import numpy as np
import torch
from detectron2.config import CfgNode, get_cfg
from tabulate import tabulate

from moco_d2.checkpoint import convert
from moco_d2.config import add_moco_config
from moco_d2.data.synthetic import render_demo_data
from moco_d2.engine.trainer import PretrainTrainer
from moco_d2.visualization.curves import draw_pretraining_curves, read_metrics
from moco_d2.visualization.detections import draw_detections
from moco_d2.visualization.views import draw_view_pairs

REPOSITORY = Path(__file__).resolve().parent.parent
PRETRAIN_CONFIG = REPOSITORY / "configs/demo/moco_pretrain.yaml"
TRANSFER_CONFIG = REPOSITORY / "configs/demo/scenes_faster_rcnn_R18_FPN.yaml"
SETS_LEFT_OUT = ("novel_train", "novel_test", "figures_train", "figures_test")
METRICS = {"AP": "bbox/AP", "AP50": "bbox/AP50"}  # title in the table -> key in metrics.json


@dataclass
class Job:
    """A run of tools/train_net.py in a process of its own, watched through its metrics.json."""

    title: str
    config: Path
    output: Path
    max_iter: int
    options: list[str] = field(default_factory=list)
    processes: int = 1
    _reported: int = -1

    def start(self) -> None:
        shutil.rmtree(self.output, ignore_errors=True)
        self.output.mkdir(parents=True)
        command = [sys.executable, str(REPOSITORY / "tools/train_net.py"), "--config", self.config]
        command += ["--num-gpus", self.processes, *self.options, "OUTPUT_DIR", self.output]
        self._log = open(self.output / "stdout.txt", "w")  # noqa: SIM115 (closed by `finished`)
        self._process = subprocess.Popen(
            [str(word) for word in command],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            # Several processes of one thread beat one process of several.
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def finished(self) -> bool:
        """Whether the process has ended; prints what is new, and fails when the process did."""
        code = self._process.poll()
        self._report()
        if code is None:
            return False
        self._log.close()
        if code != 0:
            tail = (self.output / "stdout.txt").read_text().splitlines()[-15:]
            raise RuntimeError(f"{self.title} failed with exit code {code}:\n" + "\n".join(tail))
        return True

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()

    def _report(self) -> None:
        path = self.output / "metrics.json"
        records = read_metrics(path) if path.exists() else []
        records = [r for r in records if "total_loss" in r]
        if not records or records[-1]["iteration"] <= self._reported:
            return
        last = records[-1]
        self._reported = last["iteration"]
        words = [f"  {self.title}: {self._reported + 1}/{self.max_iter}"]
        words.append(f"loss {last['total_loss']:.3f}")
        if "[metric]contrastive_acc1" in last:
            words.append(f"(chance {last['[metric]chance_level']:.3f})")
            words.append(f"contrastive accuracy {last['[metric]contrastive_acc1']:.0f} %")
        words.append(f"{last.get('eta_seconds', 0):.0f} s left")
        print("  ".join(words), flush=True)

    def results(self) -> dict[str, float]:
        last = read_metrics(self.output / "metrics.json")[-1]
        return {title: last[key] for title, key in METRICS.items()}


def run_jobs(jobs: list[Job], at_once: int) -> None:
    """Run jobs, some at the same time, until all have ended or one has failed."""
    waiting, running = list(jobs), []
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                running.append(waiting.pop(0))
                running[-1].start()
            time.sleep(1)
            running = [job for job in running if not job.finished()]
    finally:
        for job in running:
            job.stop()


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
    cores = len(os.sched_getaffinity(0))

    _headline(1, "render the built-in data set")
    sizes = {**dict.fromkeys(SETS_LEFT_OUT, 0), **(sizes or {})}
    render_demo_data(str(root / "datasets/moco_demo"), sizes=sizes)

    _headline(2, "pretrain without labels: MoCo v2, ResNet-18")
    cfg = _config(PRETRAIN_CONFIG, options)
    iterations = cfg.SOLVER.MAX_ITER
    processes = max(n for n in (1, 2, 4) if n <= cores)  # 4 BN groups, so up to 4 processes
    started = time.time()
    run_jobs(
        [Job("pretraining", PRETRAIN_CONFIG, root / "pretrain", iterations, options, processes)],
        at_once=1,
    )
    pretrain_seconds = time.time() - started
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
    jobs = {
        (title, trial): Job(
            f"{title}, run {trial}",
            TRANSFER_CONFIG,
            root / f"transfer/{folder}/trial_{trial}",
            iterations,
            [*common, "MODEL.WEIGHTS", str(weights), "SEED", str(trial)],
        )
        for trial in range(1, trials + 1)
        for title, folder, weights in (("random", "random", ""), ("MoCo v2", "moco", backbone))
    }
    run_jobs(list(jobs.values()), at_once=cores)

    _headline(6, "draw what happened")
    pictures = {
        "views": root / "view_pairs.png",
        "curves": root / "pretraining_curves.png",
        "detections": root / "detections.png",
    }
    draw_view_pairs(cfg, str(pictures["views"]))
    draw_pretraining_curves(str(root / "pretrain/metrics.json"), str(pictures["curves"]))
    detectors = {title: _trained(jobs[title, 1].output) for title in knn}
    draw_detections(detectors, "moco_demo_scenes_test", str(pictures["detections"]))

    results = {
        "date": date.today().isoformat(),
        "machine": f"{_processor()}, {cores} cores, torch {torch.__version__}",
        "seconds": {"pretraining": pretrain_seconds, "all": time.time() - begin},
        "pretraining_iterations": cfg.SOLVER.MAX_ITER,
        "trials": trials,
        "rows": [
            {
                "init": title,
                "kNN": knn[title],
                **_spread([jobs[title, t].results() for t in range(1, trials + 1)]),
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
    for metric in METRICS:
        values = [trial[metric] for trial in trials]
        std = float(np.std(values, ddof=1)) if len(values) > 1 else None
        summary[metric] = {"mean": float(np.mean(values)), "std": std, "values": values}
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


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
