"""Cells: what they read, write and notice."""

import json
import sys

import pytest

from moco_d2.transfer.cells import (
    Cell,
    is_result,
    training_step,
    write_results,
)
from moco_d2.transfer.sharing import copy_result, same_runs

NAN = float("nan")


@pytest.fixture
def cell(tmp_path):
    folder = tmp_path / "voc/random/trial_1"
    step = training_step("train", "a.yaml", folder, ["SEED", 1], iterations=4)
    return Cell(tmp_path, "voc", "random", 1, 1, (step,), {"SOLVER.MAX_ITER": 4}, {"a.pkl": "0a"})


def log(cell, *records):
    cell.folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(record) for record in records]
    (cell.folder / "metrics.json").write_text("\n".join(lines) + "\n")


def test_a_cell_is_a_resumable_run_in_its_folder(cell, tmp_path):
    assert cell.folder == tmp_path / "voc/random/trial_1"
    program, script, *arguments = cell.steps[0].command
    assert program == sys.executable and script.endswith("tools/train_net.py")
    assert "--resume" in arguments and arguments[-2:] == ["OUTPUT_DIR", str(cell.folder)]


def test_the_last_finite_results_of_evaluations_are_what_a_cell_measured(cell):
    log(
        cell,
        {"iteration": 1, "total_loss": 2.0, "rpn/num_pos_anchors": 3.0},
        {"iteration": 1, "bbox/AP": 1.0, "bbox/AP50": 2.0},
        {"iteration": 3, "total_loss": 1.0, "bbox/AP": 4.5, "bbox/APs": NAN, "segm/AP": NAN},
    )
    assert cell.iterations_done() == 4
    assert cell.measured() == {"bbox/AP": 4.5, "bbox/AP50": 2.0, "segm/AP": 0.0}
    assert is_result("some_set/segm/AP") and not is_result("bbox") and not is_result("lr")


def test_results_hold_the_cells_that_have_ended(cell, tmp_path):
    other = Cell(tmp_path, "voc", "moco", 1, 1)
    broken = Cell(tmp_path, "voc", "moco", 2, 2)
    log(cell, {"iteration": 3, "total_loss": 1.0, "bbox/AP": 4.5})
    cell.write_plan(1, 12.34)
    cell.write_result()
    broken.write_result("there is no weight file a.pkl")
    about = {"command": "c", "environment": {}, "date": "2020-01-01", "tasks": [], "inits": []}
    write_results(tmp_path, [cell, other, broken], title="t", trials=2, **about)
    cells = json.loads((tmp_path / "results.json").read_text())["cells"]
    assert [(c["folder"], c["status"]) for c in cells] == [
        ("voc/random/trial_1", "done"),
        ("voc/moco/trial_2", "failed"),
    ]
    assert cells[0]["metrics"] == {"bbox/AP": 4.5} and cells[0]["seconds"] == 12.3
    assert cells[1]["error"] == "there is no weight file a.pkl" and cells[1]["metrics"] == {}


def test_the_same_run_under_two_names_is_run_once_and_shown_twice(cell, tmp_path):
    def named(group, seed, **inputs):
        return Cell(tmp_path, group, "x", 1, seed, cell.steps, inputs, cell.files)

    first, again = named("a", 1, lr=0.1), named("b", 1, lr=0.1)
    others = [named("c", 2, lr=0.1), named("d", 1, lr=0.2)]
    groups = same_runs([first, again, *others])
    assert groups == {"a/x/trial_1": [again], "c/x/trial_1": [], "d/x/trial_1": []}
    log(first, {"iteration": 3, "total_loss": 1.0})
    first.write_plan(1, 7.0)
    first.write_result()
    copy_result(first, again)
    assert again.result == {**first.result, "task": "b", "same_run_as": "a/x/trial_1"}
    assert (again.folder / "metrics.json").read_text() == (
        first.folder / "metrics.json"
    ).read_text()
    assert again.replanned() is None
    # A later command that names only the copy, or names it first, has nothing to run.
    assert list(same_runs([again, first]).items()) == [("b/x/trial_1", [first])]


def test_a_cell_notices_that_its_plan_has_changed(cell):
    assert cell.replanned() is None and cell.steps_done() == 0
    cell.write_plan(1, 2.0)
    assert cell.replanned() is None and cell.steps_done() == 1
    cell.files["a.pkl"] = "1b"
    assert cell.replanned() == 'a.pkl was "0a" and is "1b"'
    cell.files["a.pkl"] = "0a"
    cell.inputs["SOLVER.MAX_ITER"] = 5
    assert cell.replanned() == "SOLVER.MAX_ITER was 4 and is 5"
