"""tools/convert_weights.py as a command."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from weights import moco_checkpoint

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
