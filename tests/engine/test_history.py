"""`metrics.json` and its smoothing windows across a resume."""

import json
from types import SimpleNamespace

import pytest
from detectron2.utils.events import EventStorage
from hypothesis import given
from hypothesis import strategies as st

from moco_d2.engine.history import ScalarHistory, forget_metrics


def lines(*iterations):
    return [json.dumps({"iteration": i, "loss": i / 7}) + "\n" for i in iterations]


@pytest.mark.parametrize(
    ("written", "after", "kept"),
    [
        (lines(1, 3, 5, 7), 3, 2),
        (lines(1, 3, 5, 7), 7, 4),
        (lines(1, 3), -1, 0),
        # An evaluation in iteration 4 is written with iteration 5.
        (lines(1, 3, 5, 4), 3, 2),
        # Killed while it wrote.
        ([*lines(1, 3), '{"iteration": 5, "lo'], 5, 2),
        # An earlier run in the same folder.
        (lines(1, 3, 5, 7, 1, 3, 5), 3, 6),
        # Started anew after it was killed before its first checkpoint.
        ([*lines(1, 3, 5), '{"iteration": 7, "lo'], None, 3),
        ([*lines(1, 3, 5), '{"iteration": 7}'], None, 3),
        ([*lines(1, 3, 5), "not a line of metrics\n"], None, 4),
    ],
)
def test_lines_that_will_be_written_again_are_cut_off(tmp_path, written, after, kept):
    path = tmp_path / "metrics.json"
    path.write_text("".join(written))
    with open(path, "a") as writer:  # held open by the writer of the resumed run
        forget_metrics(str(path), after)
        writer.write("next\n")
    assert path.read_text() == "".join([*written[:kept], "next\n"])


def test_without_metrics_there_is_nothing_to_forget(tmp_path):
    forget_metrics(str(tmp_path / "metrics.json"), 3)
    assert not (tmp_path / "metrics.json").exists()


@given(period=st.integers(1, 6), saved_in=st.integers(0, 20), end=st.integers(1, 12))
def test_smoothed_values_do_not_notice_a_resume(period, saved_in, end):
    """At each later time of writing, what is written is what an uninterrupted run writes."""

    def put(storage, first, last):
        for i in range(first, last):
            storage.iter = i
            storage.put_scalar("loss", (i * 37 % 11) / 3)
            if i % 4 == 3:
                storage.put_scalar("accuracy", i / 5, smoothing_hint=False)

    def unwritten(storage, after):
        values = storage.latest_with_smoothing_hint(period).items()
        return {name: entry for name, entry in values if entry[1] > after}

    last = saved_in + 1 + end
    with EventStorage() as whole:
        put(whole, 0, saved_in + 1)
        state = ScalarHistory(SimpleNamespace(storage=whole), period).state_dict()
        before = ScalarHistory(None, period).written(saved_in)
        at_save = unwritten(whole, before)
        put(whole, saved_in + 1, last)
    with EventStorage(saved_in + 1) as resumed:
        history = ScalarHistory(SimpleNamespace(storage=resumed), period)
        history.load_state_dict(state)
        history.restore(resumed)
        assert unwritten(resumed, before) == at_save
        put(resumed, saved_in + 1, last)
    written = ScalarHistory(None, period).written(last - 1)
    assert unwritten(resumed, max(before, written)) == unwritten(whole, max(before, written))
