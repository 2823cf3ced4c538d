"""The input convention of weights, stated by files and applied to configs."""

import pickle

import numpy as np
import pytest
import torch
from detectron2.config import get_cfg
from weights import RGB

from moco_d2.checkpoint import (
    WeightsError,
    apply_input_convention,
    convention_of,
    read_input_convention,
)
from moco_d2.checkpoint.convention import SavedConvention

BGR = {
    "format": "BGR",
    "pixel_mean": [103.53, 116.28, 123.675],
    "pixel_std": [1.0, 1.0, 1.0],
    "stride_in_1x1": True,
}


def test_detectron2_defaults_are_the_bgr_convention():
    assert convention_of(get_cfg()) == BGR


def test_applying_a_convention_sets_the_config_and_says_what_changed():
    cfg = get_cfg()
    lines = apply_input_convention(cfg, RGB)
    assert convention_of(cfg) == RGB
    assert (cfg.INPUT.FORMAT, cfg.MODEL.RESNETS.STRIDE_IN_1X1) == ("RGB", False)
    assert lines == [
        "INPUT.FORMAT: BGR -> RGB",
        "MODEL.PIXEL_MEAN: [103.53, 116.28, 123.675] -> [123.675, 116.28, 103.53]",
        "MODEL.PIXEL_STD: [1.0, 1.0, 1.0] -> [58.395, 57.12, 57.375]",
        "MODEL.RESNETS.STRIDE_IN_1X1: True -> False",
    ]
    assert apply_input_convention(cfg, RGB) == []
    assert len(apply_input_convention(cfg, BGR)) == 4
    assert convention_of(cfg) == BGR


def test_files_state_their_convention_or_none(tmp_path):
    tensors = {"w": torch.zeros(2)}
    for content, expected in (
        ({"model": tensors, "input": BGR}, BGR),
        ({"model": tensors, "recipe": {"input": RGB}}, RGB),
        ({"model": tensors}, None),
        (tensors, None),
    ):
        torch.save(content, tmp_path / "x.pth")
        assert read_input_convention(str(tmp_path / "x.pth")) == expected
    arrays = {"model": {"w": np.zeros(2)}, "__author__": "someone", "matching_heuristics": True}
    (tmp_path / "x.pkl").write_bytes(pickle.dumps(arrays))
    assert read_input_convention(str(tmp_path / "x.pkl")) is None


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"format": "L"}, "unknown image format 'L'"),
        ({"pixel_mean": [1.0, 2.0]}, "a number per channel"),
        ({"pixel_std": [1.0, 0.0, 1.0]}, "standard deviation 0 or less"),
        ({"extra": 1}, "has the keys format, pixel_mean, pixel_std, stride_in_1x1"),
    ],
)
def test_a_convention_that_makes_no_sense_is_refused(wrong, message):
    with pytest.raises(WeightsError, match=message):
        apply_input_convention(get_cfg(), {**RGB, **wrong})


def test_a_run_resumes_only_under_its_own_convention():
    SavedConvention(RGB).load_state_dict(SavedConvention(RGB).state_dict())
    with pytest.raises(WeightsError, match="trained with INPUT.FORMAT BGR, the config says RGB"):
        SavedConvention(RGB).load_state_dict(SavedConvention(BGR).state_dict())
