"""The transfer benchmark: what it refuses, and a killed one that goes on."""

import json
import os
import signal
import time
from pathlib import Path

import jobs
import pytest
import torch
from weights import detectron2_resnet

from moco_d2.data.synthetic import SETS, render_demo_data
from moco_d2.engine import setup
from moco_d2.errors import UserError
from moco_d2.transfer import machine
from moco_d2.transfer.benchmark import run_benchmark
from moco_d2.transfer.cells import read_json
from moco_d2.transfer.checks import check
from moco_d2.transfer.plan import describe, make_plan, refuse
from moco_d2.transfer.runner import run_cells

TASK = "configs/demo/scenes_faster_rcnn_R18_FPN.yaml"
SETTINGS = {
    "MODEL.DEVICE": "cpu",
    "MODEL.ROI_HEADS.SCORE_THRESH_TEST": "0.0",
    "DATALOADER.NUM_WORKERS": "0",
    "LOG_PERIOD": "1",
    "SOLVER.IMS_PER_BATCH": "2",
    "SOLVER.MAX_ITER": "6",
    "SOLVER.STEPS": "(4,)",
    "SOLVER.WARMUP_ITERS": "2",
    "SOLVER.CHECKPOINT_PERIOD": "2",
}
OPTIONS = [word for pair in SETTINGS.items() for word in pair]


@pytest.fixture(scope="module")
def datasets(tmp_path_factory):
    root = tmp_path_factory.mktemp("datasets")
    sizes = {**dict.fromkeys(SETS, 0), "scenes_train": 8, "scenes_test": 4}
    render_demo_data(str(root / "moco_demo"), sizes=sizes, workers=1)
    return str(root)


def plan_of(root, *inits, **how):
    return make_plan(str(root), [TASK], inits, how.pop("trials", 1), options=OPTIONS, **how)


def test_a_plan_has_a_cell_for_each_task_initialisation_and_trial(exported, tmp_path):
    plan = plan_of(tmp_path, "random", f"supervised_a={exported}", f"m={exported}", trials=2)
    assert plan.problems == []
    names = [cell.name.partition("/")[2] for cell in plan.cells]
    inits = ("random", "supervised_a", "m")
    assert names == [f"{i}/trial_{k}" for k in (1, 2) for i in inits]  # all once, then again
    assert [init["kind"] for init in describe(plan)["inits"]] == [
        "random",
        "supervised",
        "pretrained",
    ]
    assert describe(plan)["tasks"][0]["metrics"] == ["bbox/AP", "bbox/AP50", "bbox/AP75"]
    command = plan.cells[5].steps[0].command
    options = dict(zip(command[-6::2], command[-5::2], strict=True))
    assert options == {
        "MODEL.WEIGHTS": exported,
        "SEED": "2",
        "OUTPUT_DIR": str(plan.cells[5].folder),
    }
    assert plan.cells[5].inputs["SOLVER.MAX_ITER"] == 6


def test_all_that_cannot_work_is_listed_at_once(exported, tmp_path, monkeypatch):
    monkeypatch.setenv("DETECTRON2_DATASETS", str(tmp_path / "nowhere"))
    torch.save({"model": detectron2_resnet(34, "res4").state_dict()}, tmp_path / "r34.pth")
    (tmp_path / "corrupt.pkl").write_bytes(b"not a pickle")
    plan = make_plan(
        str(tmp_path / "out"),
        [TASK, "voc_0712", TASK],
        [
            "random",
            f"other={tmp_path}/r34.pth",
            f"bad={tmp_path}/corrupt.pkl",
            "gone=x.pkl",
            "?=y",
        ],
        trials=0,
        options=["SEED", "3", "DATALOADER.SAMPLER_TRAIN", "TrainingSampler"],
    )
    check(plan, at_once=1)
    with pytest.raises(UserError) as refusal:
        refuse(plan.problems)
    text = str(refusal.value)
    for problem in (
        "there is no task 'voc_0712': give the path of a config, or ",
        "--tasks has scenes_faster_rcnn_R18_FPN more than once",
        "there is no weight file x.pkl",
        "--init '?=y': a name is of letters",
        "--trials is 0",
        "are each run's own",
        "R18_FPN from bad: ",
        "corrupt.pkl",
        "from other: r34.pth does not fit the backbone",
        "moco_demo_scenes_train is not in",
    ):
        assert problem in text, problem
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("tasks", "num_gpus", "options", "problem"),
    [
        ([TASK], 0, [], "--num-gpus is 0; it must be at least 1"),
        ([TASK], 1, ["SOLVER.MAX_ITER"], "'SOLVER.MAX_ITER' are no pairs of KEY VALUE"),
        (
            ["configs/demo/moco_v1.yaml"],
            1,
            ["DATASETS.TRAIN", "('moco_demo_scenes_train',)", "DATASETS.TEST", "()"],
            "trains a MoCo, which is no transfer task",
        ),
    ],
)
def test_what_is_no_benchmark_is_one_problem(
    datasets, tmp_path, monkeypatch, tasks, num_gpus, options, problem
):
    monkeypatch.setenv("DETECTRON2_DATASETS", datasets)
    plan = make_plan(str(tmp_path), tasks, ["random"], 1, num_gpus, options)
    assert len(plan.problems) == 1 and problem in plan.problems[0]
    assert plan.cells == []


def test_few_labels_reach_every_run_and_are_checked(datasets, tmp_path, monkeypatch):
    monkeypatch.setenv("DETECTRON2_DATASETS", datasets)
    plan = plan_of(tmp_path, "random", few_labels=0.5)
    assert plan.config(plan.tasks[0]).DATASETS.FEW_LABELS == 0.5
    assert "DATASETS.FEW_LABELS" in plan.cells[0].steps[0].command
    assert check(plan, 1)["moco_demo_scenes_train"] == "8 images" and not plan.problems
    plan = plan_of(tmp_path, "random", few_labels=9)
    check(plan, 1)
    assert "FEW_LABELS is 9, and there are only 8 images" in plan.problems[0]


def test_runs_at_the_same_time_have_gpus_of_their_own(monkeypatch):
    monkeypatch.setattr(machine.torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,6,5,4")
    shares = [place["CUDA_VISIBLE_DEVICES"] for place in machine.places(2, 2, on_gpu=True)]
    assert shares == ["7,6", "5,4"]
    assert not any("CUDA" in key for place in machine.places(9, 2, on_gpu=False) for key in place)
    with pytest.raises(UserError, match="--jobs 3 runs of --num-gpus 2 need 6 GPUs, and there are"):
        machine.places(3, 2, on_gpu=True)


def run(root: str, exported: str, datasets: str) -> None:
    os.environ["DETECTRON2_DATASETS"] = datasets
    plan = plan_of(root, "random", f"moco={exported}")
    run_benchmark(plan, at_once=1, command="a command")


def test_a_killed_benchmark_ends_as_one_that_was_not_disturbed(
    exported, datasets, tmp_path, monkeypatch, capsys
):
    process = jobs.start_function(run, str(tmp_path / "out"), exported, datasets)
    first = tmp_path / "out/scenes_faster_rcnn_R18_FPN/random/trial_1"
    deadline = time.monotonic() + 120
    while not (first / "last_checkpoint").exists():
        assert time.monotonic() < deadline and process.is_alive()
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    assert jobs.finish([process]) == [-signal.SIGKILL]
    assert not (first / "cell.json").exists()

    monkeypatch.setenv("DETECTRON2_DATASETS", datasets)
    plan = plan_of(tmp_path / "out", "random", f"moco={exported}")
    assert run_benchmark(plan, at_once=1, command="a command") == 0
    assert "2 of 2 cells done" in capsys.readouterr().out
    results = read_json(tmp_path / "out/results.json")
    assert results["command"] == "a command" and results["trials"] == 1
    assert {(row["init"], row["metric"]) for row in results["summary"]} == {
        (init, metric)
        for init in ("random", "moco")
        for metric in ("bbox/AP", "bbox/AP50", "bbox/AP75")
    }
    log = (first / "train.out").read_text()
    assert "Loading from" in log and "model_0000" in log  # it went on
    assert [path.name for path in first.glob("*.pth")] == ["model_final.pth"]
    assert (tmp_path / "out/report.html").stat().st_size > 1000

    # The same command without a disturbance, in this process.
    command = [*plan.cells[0].steps[0].command[2:-1], str(tmp_path / "whole")]
    assert setup.run(command, epilog="") == 0
    whole, cut = (Path(tmp_path / "whole"), first)
    states = [torch.load(p / "model_final.pth", weights_only=True)["model"] for p in (whole, cut)]
    for name, tensor in states[0].items():
        assert torch.equal(tensor, states[1][name]), name
    last = [json.loads((p / "metrics.json").read_text().splitlines()[-1]) for p in (whole, cut)]
    for name in last[0].keys() - jobs.TIMES:
        assert str(last[0][name]) == str(last[1][name]), name

    # A second start has nothing to do; another plan is not mixed into the same folder.
    assert run_cells(plan.cells, [{}]) == []
    plan.options = [*OPTIONS, "SOLVER.BASE_LR", "0.01"]
    other = make_plan(str(tmp_path / "out"), [TASK], ["random"], 1, 1, plan.options)
    with pytest.raises(UserError, match="another plan: SOLVER.BASE_LR was 0.02 and is 0.01"):
        run_cells(other.cells, [{}])
