"""The recorded benchmark: its plans can run, and what was recorded comes out again."""

import json
import runpy
from dataclasses import replace
from pathlib import Path

import pytest

from moco_d2.data.synthetic import SETS, render_demo_data
from moco_d2.errors import UserError
from moco_d2.transfer import grids
from moco_d2.transfer.grids import Grid, Variant
from moco_d2.transfer.recorded import (
    PLANS,
    Part,
    copy_results,
    rerun_cell,
    run_recorded,
    use_data_of,
)

ROOT = Path(__file__).parents[2]
TINY = (
    "SOLVER.IMS_PER_BATCH 8 SOLVER.MAX_ITER 2 SOLVER.WARMUP_ITERS 1 MODEL.BN_GROUP_SIZE 4 "
    "MODEL.MOCO.QUEUE_SIZE 16 TEST.KNN.BANK_SIZE 24 LOG_PERIOD 1"
)
PARTS = [(plan, name) for plan in PLANS for name in PLANS[plan]]


@pytest.fixture(scope="module")
def datasets(tmp_path_factory):
    root = tmp_path_factory.mktemp("datasets")
    sizes = {**dict.fromkeys(SETS, 2), "objects_train": 992}  # 62 of each class
    render_demo_data(str(root / "moco_demo"), sizes=sizes, workers=1)
    return str(root)


@pytest.mark.parametrize("plan, name", PARTS)
def test_a_part_can_run_and_names_the_command_that_does_the_same(
    plan, name, datasets, tmp_path, monkeypatch
):
    monkeypatch.setenv("DETECTRON2_DATASETS", datasets)
    part = PLANS[plan][name]
    assert part.seeds == (3 if plan == "full" else 1)
    once = replace(part, seeds=1).ablation(tmp_path)
    cells = once.cells()
    assert once.problems == []
    assert len({cell.name for cell in cells}) == len(cells) > 2

    seen = []
    main = runpy.run_path(str(ROOT / "tools/ablate.py"))["main"]
    monkeypatch.setitem(main.__globals__, "run_ablation", lambda *args: seen.append(args) or 0)
    monkeypatch.chdir(ROOT)
    tool, *words = part.command(Path("output/there"), 2, validate=True).split()
    assert tool == "tools/ablate.py" and main(words) == 0
    ((given, jobs, _),) = seen
    expected = part.ablation(Path("output/there").resolve(), validate=True)
    assert jobs == 2 and given.validate
    for field in ("root", "grids", "seeds", "num_gpus"):
        assert getattr(given, field) == getattr(expected, field)
    assert list(given.options) == list(expected.options)
    assert list(given.detect_options) == list(expected.detect_options)
    assert [str(ROOT / path) for path in given.detect] == list(expected.detect)


def test_a_recorded_cell_runs_again_bit_for_bit(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("DETECTRON2_DATASETS", "elsewhere")  # restored after it was changed
    grid = Grid("Does it run?", "", (Variant("t0.2", {"MODEL.MOCO.TEMPERATURE": "0.2"}),))
    monkeypatch.setitem(grids.GRIDS, "tiny", grid)
    parts = {"part": Part(("tiny",), 1, tuple(TINY.split()))}
    output, docs = str(tmp_path / "output"), str(tmp_path / "docs")
    use_data_of(output, {**dict.fromkeys(SETS, 0), "objects_train": 24, "objects_val": 12})
    with pytest.raises(UserError, match="has no part with a results.json"):
        copy_results(output, docs)
    assert run_recorded(parts, output, jobs=1) == 0

    (copy,) = copy_results(output, docs)
    text = (copy / "results.json").read_text() + (copy / "report.md").read_text()
    assert str(tmp_path) not in text and str(ROOT) not in text
    results = json.loads((copy / "results.json").read_text())
    (cell,) = results["cells"]
    assert set(cell["metrics"]) == {"knn/top1", "contrastive_acc1"}
    assert "tools/train_net.py --config configs/demo/moco_pretrain.yaml" in cell["command"]
    pictures = {path.name for path in (copy / "plots").iterdir()}
    assert "tiny-bars.png" in pictures

    # Of two recorded numbers one is wrong: the other comes out again, to the last bit.
    cell["metrics"]["contrastive_acc1"] += 1e-9
    (copy / "results.json").write_text(json.dumps(results))
    assert not rerun_cell(parts, output, "tiny/t0.2/trial_1", docs)
    lines = capsys.readouterr().out.splitlines()
    verdicts = {line.split()[1]: line.split()[0] for line in lines if line.count("  ") >= 3}
    assert verdicts == {"knn/top1": "same", "contrastive_acc1": "DIFFERS"}
    for name in ("tiny/t0.2/trial_2", "other/t0.2/trial_1"):
        with pytest.raises(UserError, match="no (finished )?cell '(tiny|other)/t0.2/trial"):
            rerun_cell(parts, output, name, docs)


def test_an_unfinished_part_is_not_copied(tmp_path):
    task = {"name": "tiny", "metric": "knn/top1", "metrics": ["knn/top1"], "inits": ["a", "b"]}
    cell = {"task": "tiny", "init": "a", "trial": 1, "status": "done", "metrics": {}}
    content = {"trials": 1, "tasks": [task], "cells": [cell], "summary": [{"init": "a"}]}
    (tmp_path / "output/part").mkdir(parents=True)
    (tmp_path / "output/part/results.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="part is not finished: run the same benchmark again"):
        copy_results(str(tmp_path / "output"), str(tmp_path / "docs"))
    assert not (tmp_path / "docs").exists()
