"""The transfer benchmark from a plan to a report."""

import os
import signal
import sys
from datetime import date
from pathlib import Path

from tabulate import tabulate

from moco_d2.engine.signals import Stopped
from moco_d2.errors import UserError
from moco_d2.transfer.cells import DONE, Cell, write_results
from moco_d2.transfer.checks import check
from moco_d2.transfer.machine import environment, places
from moco_d2.transfer.plan import Plan, describe, few_words, refuse
from moco_d2.transfer.progress import Progress, duration, paces
from moco_d2.transfer.report import report
from moco_d2.transfer.runner import check_plans, only_runner, run_cells
from moco_d2.transfer.sharing import copy_result, same_runs

TITLE = "Transfer benchmark"


def run_benchmark(plan: Plan, at_once: int, command: str, dry_run: bool = False) -> int:
    """Check and print a plan, then run it and report.

    Args:
        at_once: runs at the same time.
        command: the command line, for the record.
        dry_run: stop after printing.

    Returns:
        how many cells failed.

    Raises:
        UserError: something in the plan cannot work.
        Stopped: on a signal; the same command goes on.
    """
    slots = places(at_once, plan.num_gpus, plan.on_gpu)
    sizes = check(plan, at_once)
    refuse(plan.problems)
    print(plan_text(plan, sizes, at_once), flush=True)
    if dry_run:
        return 0
    about = {**describe(plan), "title": TITLE, "command": command}
    with only_runner(plan.root):
        return run_and_report(plan.root, plan.cells, slots, about)


def run_and_report(root: Path, cells: list[Cell], slots: list[dict[str, str]], about: dict) -> int:
    """Run cells, keep results.json up to date, and write the report; returns how many failed.

    Cells that are the same run under several names, as the recipe that several grids share, are
    run once.

    Args:
        slots: see `run_cells`.
        about: arguments of `write_results`, but for environment and date.
    """
    about = {**about, "environment": environment(), "date": date.today().isoformat()}
    check_plans(cells)
    copies = same_runs(cells)
    to_run = [cell for cell in cells if cell.name in copies]
    progress = Progress(to_run, len(slots))

    def show(cell: Cell) -> None:
        for copy in copies[cell.name]:
            copy_result(cell, copy)
        write_results(root, cells, **about)

    def ended(cell: Cell) -> None:
        result = cell.result
        print(f"{cell.name}: {result['status']} {result['error'] or ''}".rstrip(), flush=True)
        if result["status"] == DONE:
            _remove_intermediate_checkpoints(cell.folder)
        show(cell)

    write_results(root, cells, **about)
    for cell in to_run:
        if cell.status == DONE:
            show(cell)
    try:
        failed = run_cells(to_run, slots, watch=progress.watch, ended=ended)
    except Stopped as stop:
        name = signal.Signals(stop.number).name
        print(f"{progress.line()}\nstopped by {name}; the same command goes on", flush=True)
        raise
    print(progress.line(), flush=True)
    print(f"report: {os.path.relpath(report(root))}", flush=True)
    for cell in failed:
        print(f"failed: {cell.name}: {cell.result['error']}", file=sys.stderr)
    return len(failed)


def plan_text(plan: Plan, sizes: dict[str, str], at_once: int) -> str:
    """What is going to be done, and what it will cost as far as that is known."""
    tasks = []
    for task in plan.tasks:
        cfg = plan.config(task)
        iterations, batch = cfg.SOLVER.MAX_ITER, cfg.SOLVER.IMS_PER_BATCH
        train, test = (
            "\n".join(f"{name} ({sizes[name]})" for name in names)
            for names in (cfg.DATASETS.TRAIN, cfg.DATASETS.TEST)
        )
        metric = describe(plan)["tasks"][plan.tasks.index(task)]["metric"]
        tasks.append((task.name, train, test, f"{iterations} x {batch}", metric))
    inits = [(i.name, i.kind, i.weights or "none", i.sha256[:12] or "-") for i in plan.inits]
    done = sum(cell.status == DONE for cell in plan.cells)
    left = [cell for cell in plan.cells if cell.status != DONE]
    iterations = sum(cell.iterations - cell.iterations_done() for cell in left)
    kind = "GPU(s)" if plan.on_gpu else "CPU process(es)"
    few = [f"few labels: {words}"] if (words := few_words(plan.few_labels)) else []
    counts = f"{len(plan.tasks)} task(s) x {len(plan.inits)} initialisation(s) x {plan.trials}"
    return "\n".join(
        [
            tabulate(tasks, ("task", "trained on", "tested on", "iterations x images", "metric")),
            "",
            tabulate(inits, ("initialisation", "kind", "weights", "SHA-256")),
            "",
            f"{counts} trial(s) = {len(plan.cells)} cells in {plan.root}, {done} of them done",
            *few,
            f"each on {plan.num_gpus} {kind}, {at_once} at a time",
            f"to do: {iterations} iterations; {_time(plan, left, at_once)}",
            f"disk: {sizes['disk']}",
        ]
    )


def _time(plan: Plan, left: list[Cell], at_once: int) -> str:
    """What the cells so far let expect. Nothing is guessed from other machines."""
    measured = paces(plan.cells)
    if not left:
        return "nothing is left to run"
    unknown = sorted({cell.group for cell in left} - measured.keys())
    if unknown:
        return f"their time is not known before a cell of {', '.join(unknown)} has run here"
    seconds = sum((c.iterations - c.iterations_done()) * measured[c.group] for c in left)
    shown = ", ".join(f"{group} {pace:.3g} s" for group, pace in measured.items())
    return f"some {duration(seconds / at_once)}, by what was measured here per iteration: {shown}"


def _remove_intermediate_checkpoints(folder: Path) -> None:
    for path in folder.rglob("model_final.pth"):
        for old in path.parent.glob("model_[0-9]*.pth"):
            old.unlink()


def rebuild_report(folder: str) -> Path:
    """The report of what a folder holds now; see `moco_d2.transfer.report.report`."""
    if not Path(folder).is_dir():
        raise UserError(f"there is no folder {folder}")
    return report(folder)
