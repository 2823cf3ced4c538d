"""The benchmarks run, on as little as they can, and write the ratios under their names."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

from moco_d2.benchmark.photos import write_photographs
from moco_d2.benchmark.timing import Timing, ratio, time_in_turns, timing_table

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("benchmark", ROOT / "tools/benchmark.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def measure(tool, tmp_path, *arguments: str) -> dict:
    path = tmp_path / "ratios.json"
    assert tool.main([*arguments, "--repeats", "1", "--json", str(path)]) == 0
    return json.loads(path.read_text())


def test_pipeline_and_key_update(tool, tmp_path, capsys):
    ratios = measure(tool, tmp_path, "pipeline", "ema", "--count", "4")
    assert {"vs_torchvision_pil", "over_decode"} <= ratios["pipeline"].keys()
    assert ratios["pipeline"]["over_decode"] > 1  # decoding is a part of it
    assert ratios["ema"].keys() == {"vs_loop"} and ratios["ema"]["vs_loop"] > 0
    output = capsys.readouterr().out
    for way in ("moco_d2", "torchvision + PIL", "torchvision v2 on tensors", "decoding alone"):
        assert way in output


def test_without_albumentations_one_line_says_so(tool, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "albumentations", None)
    ratios = measure(tool, tmp_path, "pipeline", "--count", "2")
    assert "vs_albumentations" not in ratios["pipeline"]
    assert "albumentations is not installed: pip install albumentations" in capsys.readouterr().out


def test_step(tool, tmp_path):
    ratios = measure(tool, tmp_path, "step", "--batch", "2", "--size", "32")
    assert ratios["step"].keys() == {"over_bare"} and ratios["step"]["over_bare"] > 0


def test_monitors(tool, tmp_path):
    ratios = measure(tool, tmp_path, "monitors", "--batch", "2", "--size", "32")["monitors"]
    assert ratios.keys() == {"watched_step", "at_default_period"}
    assert ratios["at_default_period"] == pytest.approx(1 + (ratios["watched_step"] - 1) / 100)


def test_shuffle(tool, tmp_path):
    ratios = measure(tool, tmp_path, "shuffle", "--batch", "2", "--size", "16")
    assert ratios["shuffle"].keys() == {"vs_float_all_gather"}


def test_index(tool, tmp_path, capsys):
    ratios = measure(tool, tmp_path, "index", "--files", "12000")
    assert ratios["index"].keys() == {"mb", "second_start_s"}
    assert 12_000 * 20 / 1e6 < ratios["index"]["mb"] < 100
    assert "12000" in capsys.readouterr().out


def test_images_of_ones_own(tool, tmp_path, capsys):
    (tmp_path / "photos").mkdir()
    paths = write_photographs(str(tmp_path / "photos"), count=2, size=(300, 250))
    assert len(paths) == len({Path(path).read_bytes() for path in paths}) == 2
    assert measure(tool, tmp_path, "pipeline", "--images", str(tmp_path / "photos"))["pipeline"]
    for path in paths:
        Path(path).rename(path.replace(".jpg", ".png"))
    assert tool.main(["pipeline", "--images", str(tmp_path / "photos")]) == 2
    assert "holds no JPEG: name a folder that does" in capsys.readouterr().err


def test_ways_take_turns_and_the_first_round_does_not_count():
    order, now = [], iter(range(1000))
    ways = {name: lambda name=name: order.append(name) for name in "ab"}
    timings = time_in_turns(ways, repeats=3, units=2, clock=lambda: float(next(now)))
    assert "".join(order) == "abababab"
    np.testing.assert_array_equal(timings["a"].seconds, [0.5] * 3)


def test_ratios_are_medians_over_repeats():
    timings = {
        "slow": Timing("slow", np.array([0.4, 0.9, 4.0])),
        "fast": Timing("fast", np.array([0.2, 0.3, 0.5])),
    }
    assert ratio(timings, "slow", "fast") == pytest.approx(3.0)
    assert "250.000 - 400.000" in timing_table(timings, "unit", "fast")
