"""The runner: order, failures, signals and locks, with commands of the shell as runs."""

import json
import os
import signal
import time
from pathlib import Path

import jobs
import pytest

from moco_d2.checkpoint.files import sha256
from moco_d2.errors import UserError
from moco_d2.transfer.cells import Cell, Step
from moco_d2.transfer.progress import Progress, duration
from moco_d2.transfer.runner import only_runner, run_cells

RECORD = '{"iteration": 1, "total_loss": 1.0, "bbox/AP": %s}'


def shell(name, script, folder=None):
    return Step(name, ("sh", "-c", script), folder, iterations=2 if folder else 0)


def make(root, name, *scripts):
    cell = Cell(root, "task", name, 1, 1)
    steps = [shell(f"step{i}", script, cell.folder) for i, script in enumerate(scripts)]
    cell.steps = tuple(steps)
    return cell


def measure(root, name, value):
    cell = make(root, name, "")
    return make(root, name, f"echo '{RECORD % value}' > {cell.folder}/metrics.json")


def test_a_failure_stops_nothing_else_and_is_told_in_a_line(tmp_path):
    cells = [
        measure(tmp_path, "first", 3.5),
        make(tmp_path, "broken", "echo 'error: no such file a.pkl' >&2; exit 2"),
        make(tmp_path, "raising", "printf 'Traceback\\nKeyError: 7\\n\\033[0m'; exit 1"),
        make(tmp_path, "killed", "kill -KILL $$"),
        make(tmp_path, "garbled", f"echo '[1]' > {tmp_path}/task/garbled/trial_1/metrics.json"),
        measure(tmp_path, "last", 4.5),
    ]
    ended = []
    failed = run_cells(cells, [{}, {}], ended=lambda cell: ended.append(cell.variant))
    assert {cell.variant for cell in failed} == {"broken", "raising", "killed", "garbled"}
    assert sorted(ended) == sorted(cell.variant for cell in cells)
    results = {cell.variant: cell.result for cell in cells}
    assert results["first"]["metrics"] == {"bbox/AP": 3.5}
    assert results["last"]["status"] == "done" and results["last"]["error"] is None
    assert results["broken"]["error"].startswith("no such file a.pkl; see ")
    assert results["raising"]["error"].startswith("KeyError: 7; see ")
    assert results["killed"]["error"].startswith("killed by SIGKILL")
    assert results["garbled"]["error"].startswith("line 1 of ")
    assert "1 of 1 cells" in Progress(cells[:1], 1).line() and "failed" in Progress(cells, 1).line()


def test_a_second_start_skips_what_is_done_and_repeats_what_failed(tmp_path):
    good = make(tmp_path, "good", f"echo x >> {tmp_path}/good")
    bad = make(tmp_path, "bad", f"echo x >> {tmp_path}/once", f"echo x >> {tmp_path}/bad; exit 1")
    for _ in range(2):
        assert run_cells([good, bad], [{}]) == [bad]
    counts = {name: len((tmp_path / name).read_text()) // 2 for name in ("good", "once", "bad")}
    assert counts == {"good": 1, "once": 1, "bad": 2}
    good.inputs = {"SOLVER.MAX_ITER": 9}
    with pytest.raises(UserError, match="task/good/trial_1 was run with another plan: SOLVER.MAX"):
        run_cells([good], [{}])


def test_places_are_handed_to_the_runs_that_go_on_at_the_same_time(tmp_path):
    cells = [make(tmp_path, f"c{i}", f"echo $PLACE > {tmp_path}/{i}; sleep 0.5") for i in range(4)]
    run_cells(cells, [{"PLACE": "a"}, {"PLACE": "b"}])
    assert sorted((tmp_path / str(i)).read_text().strip() for i in range(4)) == ["a", "a", "b", "b"]


def test_a_file_swapped_after_the_check_fails_the_cells_that_need_it(tmp_path):
    (tmp_path / "w.pkl").write_bytes(b"good")
    cells = [measure(tmp_path, "needs", 1.0), measure(tmp_path, "other", 2.0)]
    cells[0].files = {str(tmp_path / "w.pkl"): sha256(str(tmp_path / "w.pkl"))}
    (tmp_path / "w.pkl").write_bytes(b"corrupt")
    assert run_cells(cells, [{}]) == cells[:1]
    assert "w.pkl is not the file any more that was checked" in cells[0].result["error"]


# A run that on SIGTERM takes a moment to save, and then says so.
SAVING = """
trap 'sleep 0.6; echo saved >> $LOG; exit 143' TERM
echo begun >> $LOG
while :; do sleep 0.05; done
"""


def run_one(root: Path, script: str) -> None:
    cell = Cell(root, "task", "a", 1, 1, (Step("run", ("sh", "-c", script)),))
    run_cells([cell], [{"LOG": str(root / "log")}])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_runs_save_and_end_with_their_runner(tmp_path, number):
    log = tmp_path / "log"
    runner = jobs.start_function(run_one, tmp_path, SAVING)
    deadline = time.monotonic() + 60
    while not log.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(runner.pid, number)
    assert jobs.finish([runner]) == [130 if number == signal.SIGINT else -signal.SIGKILL]
    assert not (tmp_path / "task/a/trial_1/cell.json").exists()
    (tmp_path / "task/a/trial_1/plan.json").unlink()
    # The folder is locked until the run that was left has saved: only then the next one begins.
    run_one(tmp_path, "echo again >> $LOG")
    assert log.read_text().split() == ["begun", "saved", "again"]


def test_a_folder_has_one_runner(tmp_path):
    another = pytest.raises(UserError, match="another command is running in")
    with only_runner(tmp_path), another, only_runner(tmp_path):
        pass
    with only_runner(tmp_path):
        pass


def test_time_left_follows_from_the_pace_of_the_group(tmp_path):
    cells = [
        Cell(tmp_path, g, v, 1, 1, (shell("run", "", tmp_path),))
        for g, v in (("slow", "a"), ("slow", "b"), ("fast", "a"), ("fast", "b"))
    ]
    for cell, seconds in ((cells[0], 80.0), (cells[2], 8.0)):
        cell.write_plan(1, seconds)
        cell.write_result()
    assert Progress(cells, at_once=1).line() == "2 of 4 cells done, 88 s left"
    assert [duration(s) for s in (12, 190, 7500, 356400)] == [
        "12 s",
        "3 min",
        "2 h 05 min",
        "4 d 3 h",
    ]
    assert json.loads((cells[0].folder / "cell.json").read_text())["seconds"] == 80.0
