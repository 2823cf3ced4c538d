"""Weights bring their input convention into a detector's config, or the run stops."""

import argparse

import pytest
import torch
from layouts import SAMPLES
from weights import RGB

from moco_d2.checkpoint import convention_of, convert
from moco_d2.engine.setup import run, setup
from moco_d2.engine.transfer import TransferTrainer

CONFIG = "configs/transfer/coco_R50_FPN_1x.yaml"
MSRA = {
    "format": "BGR",
    "pixel_mean": [103.53, 116.28, 123.675],
    "pixel_std": [1.0, 1.0, 1.0],
    "stride_in_1x1": True,
}


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """MSRA's and torchvision's supervised ResNets, converted."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("weights")
    converted = {}
    for name in ("caffe2", "torchvision, backbone only"):
        source = SAMPLES[name].save(folder)
        converted[name.partition(",")[0]] = str(folder / f"{name}.out.pkl")
        convert(str(source), str(folder / f"{name}.out.pkl"))
    return converted


def effective(path, *opts, config=CONFIG):
    opts = ["MODEL.WEIGHTS", path, "MODEL.DEVICE", "cpu", *opts]
    return setup(
        argparse.Namespace(config_file=config, opts=opts, eval_only=False, resume=False), 1
    )


def test_each_file_gets_its_own_convention_from_the_same_config(weights):
    cfg, notes = effective(weights["torchvision"])
    assert convention_of(cfg) == RGB
    assert not [note for note in notes if "stated by MODEL.WEIGHTS" in note]

    cfg, notes = effective(weights["caffe2"])
    assert convention_of(cfg) == MSRA
    log = TransferTrainer.describe(cfg, 1, notes)
    for line in (
        "INPUT.FORMAT: RGB -> BGR (stated by MODEL.WEIGHTS)",
        "MODEL.PIXEL_MEAN: [123.675, 116.28, 103.53] -> [103.53, 116.28, 123.675]",
        "MODEL.PIXEL_STD: [58.395, 57.12, 57.375] -> [1.0, 1.0, 1.0]",
        "MODEL.RESNETS.STRIDE_IN_1X1: False -> True",
    ):
        assert line in log


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("INPUT.FORMAT", "RGB", "BGR"),
        ("MODEL.PIXEL_STD", "[58.395, 57.12, 57.375]", r"\[1.0, 1.0, 1.0\]"),
        ("MODEL.RESNETS.STRIDE_IN_1X1", "False", "True"),
    ],
)
def test_a_command_that_contradicts_the_weights_stops(weights, key, value, expected):
    with pytest.raises(ValueError, match=f"expect {key} {expected}, and the config says") as error:
        effective(weights["caffe2"], key, value)
    assert "set INPUT.FOLLOW_WEIGHTS False" in str(error.value)


def test_a_command_that_agrees_with_the_weights_runs(weights):
    cfg, _ = effective(weights["caffe2"], "INPUT.FORMAT", "BGR")
    assert convention_of(cfg) == MSRA


def test_a_config_file_that_contradicts_the_weights_stops(weights, tmp_path, capsys):
    path = tmp_path / "mine.yaml"
    base = f"_BASE_: {__file__.partition('tests')[0]}{CONFIG}\n"
    path.write_text(base + "INPUT:\n  FORMAT: 'BGR'\nOUTPUT_DIR: '" + str(tmp_path / "out") + "'\n")
    argv = ["--config", str(path), "MODEL.WEIGHTS", weights["torchvision"]]
    assert run(argv, "") == 2
    assert "expect INPUT.FORMAT RGB, and the config says BGR" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_config_wins_when_it_is_told_to(weights):
    cfg, notes = effective(
        weights["caffe2"], "INPUT.FOLLOW_WEIGHTS", "False", "INPUT.FORMAT", "RGB"
    )
    assert convention_of(cfg) == RGB
    assert "input: as the config says; INPUT.FOLLOW_WEIGHTS is False" in notes
