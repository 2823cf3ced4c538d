"""tools/convert_weights.py as a command."""

import importlib.util
import json
import os
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from weights import detectron2_resnet, moco_checkpoint

from moco_d2.checkpoint import read_input_convention
from moco_d2.checkpoint.table import FORMATS

TOOL = Path(__file__).parents[2] / "tools" / "convert_weights.py"


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("convert_weights", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def checkpoint(tmp_path):
    torch.save(moco_checkpoint(18), tmp_path / "moco.pth")
    return str(tmp_path / "moco.pth")


def test_help_shows_examples_when_run_as_a_program():
    assert os.access(TOOL, os.X_OK)
    assert TOOL.read_text().startswith("#!/usr/bin/env python\n")
    out = subprocess.run(
        [sys.executable, TOOL, "--help"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(TOOL.parents[1])},
    )
    assert out.returncode == 0
    assert "tools/convert_weights.py output/pretrain/model_final.pth" in out.stdout
    assert "--encoder {query,key}" in out.stdout


def test_success_prints_the_report(tool, checkpoint, tmp_path, capsys):
    assert tool.main([checkpoint, str(tmp_path / "out.pkl"), "--encoder", "key"]) == 0
    out = capsys.readouterr().out
    assert "120 of 120 backbone tensors exported" in out
    assert "key encoder, ResNet-18 to res5" in out


@pytest.mark.parametrize("code", [1, 2])
def test_errors_are_one_line_and_an_exit_code(tool, checkpoint, tmp_path, capsys, code):
    output = tmp_path / "out.pkl"
    if code == 1:  # a check that fails
        content = torch.load(checkpoint, weights_only=True)
        del content["model"]["encoder_q.backbone.stem.conv1.weight"]
        torch.save(content, checkpoint)
    else:  # a file that exists
        output.write_text("precious")
    before = sorted(tmp_path.iterdir())
    assert tool.main([checkpoint, str(output)]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == before


def test_formats_are_listed(tool, capsys):
    assert tool.main(["--list-formats"]) == 0
    out = capsys.readouterr().out
    for name in FORMATS:
        assert f"\n{name} " in f"\n{out}"
    assert "encoders: query, key; input: RGB, mean 123.675/116.28/103.53" in out


def test_a_report_records_every_tensor(tool, checkpoint, tmp_path):
    out, report = str(tmp_path / "out.safetensors"), tmp_path / "report.json"
    assert tool.main([checkpoint, out, "--report", str(report)]) == 0
    content = json.loads(report.read_text())
    tensors = torch.load(checkpoint, weights_only=True)["model"]
    assert set(content["mapped"]) | set(content["dropped"]) == set(tensors)
    assert content["mapped"]["encoder_q.backbone.stem.conv1.weight"] == "stem.conv1.weight"
    assert content["dropped"]["dictionary.keys"] == "dictionary of keys"
    assert content["difference"] <= 1e-5
    assert content["source"]["sha256"] == sha256(Path(checkpoint).read_bytes()).hexdigest()
    assert content["input"]["format"] == "RGB"
    assert tool.main([checkpoint, str(tmp_path / "b.pkl"), "--report", str(report)]) == 2
    assert not (tmp_path / "b.pkl").exists()


def test_the_input_convention_can_be_stated(tool, tmp_path, capsys):
    """What a detectron2 file does not say of itself is asked for, and then believed."""
    torch.save({"model": detectron2_resnet(18).state_dict()}, tmp_path / "d2.pth")
    source, out = str(tmp_path / "d2.pth"), str(tmp_path / "out.pth")
    assert tool.main([source, out]) == 2
    assert "does not state its input convention (format, pixel_mean" in capsys.readouterr().err
    stated = ["--format", "BGR", "--pixel-mean", "103.53", "116.28", "123.675"]
    assert tool.main([source, out, *stated]) == 2
    assert "(pixel_std, stride_in_1x1)" in capsys.readouterr().err
    stated += ["--pixel-std", "1", "1", "1", "--stride-in-1x1", "yes"]
    assert tool.main([source, out, *stated]) == 0
    assert read_input_convention(out) == {
        "format": "BGR",
        "pixel_mean": [103.53, 116.28, 123.675],
        "pixel_std": [1.0, 1.0, 1.0],
        "stride_in_1x1": True,
    }
    assert tool.main([out, str(tmp_path / "b.pth"), "--format", "RGB"]) == 2
    assert "state the mean and the std in that order, too" in capsys.readouterr().err


def test_the_output_is_asked_for(tool, capsys):
    with pytest.raises(SystemExit, match="2"):
        tool.main(["x.pth"])
    assert "required: CHECKPOINT, OUT" in capsys.readouterr().err
