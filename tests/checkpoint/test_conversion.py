"""Conversion of weight files into detectron2 backbones."""

import dataclasses
import hashlib
import pickle

import numpy as np
import pytest
import torch
import torchvision
from detectron2 import model_zoo
from detectron2.checkpoint import DetectionCheckpointer
from detectron2.config import get_cfg
from detectron2.modeling import build_backbone, build_model
from weights import RGB, moco_checkpoint, torchvision_resnet

from moco_d2.checkpoint import CheckError, WeightsError, convert
from moco_d2.checkpoint.naming import NAMINGS
from moco_d2.checkpoint.table import FORMATS


@pytest.fixture(autouse=True)
def few_threads():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def moco_r18(tmp_path_factory):
    path = tmp_path_factory.mktemp("moco") / "model_final.pth"
    torch.save(moco_checkpoint(18), path)
    return path


@pytest.fixture(scope="module")
def exported_r50(tmp_path_factory):
    """A MoCo checkpoint of a R-50 and what was exported from it."""
    root = tmp_path_factory.mktemp("r50")
    checkpoint = moco_checkpoint(50)
    torch.save(checkpoint, root / "model_final.pth")
    report = convert(str(root / "model_final.pth"), str(root / "out.pkl"))
    return checkpoint, report, root / "out.pkl"


def backbone_of(checkpoint, encoder="encoder_q"):
    prefix = f"{encoder}.backbone."
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in checkpoint["model"].items()
        if name.startswith(prefix)
    }


def assert_plain(value):
    """Exact types: a numpy scalar is a subclass of some of these."""
    if type(value) is dict:
        for key, item in value.items():
            assert type(key) is str
            assert_plain(item)
    elif type(value) is list:
        for item in value:
            assert_plain(item)
    else:
        assert type(value) in (str, int, float, bool, type(None))


def test_exported_file_holds_arrays_under_plain_names_and_where_they_come_from(exported_r50):
    checkpoint, report, path = exported_r50
    content = pickle.loads(path.read_bytes())
    expected = backbone_of(checkpoint)
    assert list(content["model"]) == list(expected)
    for name, array in content["model"].items():
        assert type(array) is np.ndarray
        np.testing.assert_array_equal(array, expected[name].numpy())
    assert {"stem.conv1.weight", "res2.0.conv1.norm.running_mean"} <= set(content["model"])
    assert content.pop("model")
    assert_plain(content)
    assert content["matching_heuristics"] is True
    assert content["__author__"] == "moco_d2"
    assert content["input"] == RGB
    source = path.parent / "model_final.pth"
    assert content["source"] == {
        "file": "model_final.pth",
        "sha256": hashlib.sha256(source.read_bytes()).hexdigest(),
        "format": "moco_d2",
        "encoder": "query",
        "iteration": 99,
        "epochs": 1.5,
        "epoch": None,
        "architecture": checkpoint["recipe"]["backbone"],
    }
    assert (report.exported, report.expected) == (318, 318)


def test_report_counts_tensors_and_says_why_some_were_dropped(exported_r50):
    text = str(exported_r50[1])
    assert "318 of 318 backbone tensors exported, 329 dropped" in text
    for detail in ("4 projection head", "322 key encoder", "3 dictionary of keys"):
        assert detail in text
    assert "largest difference to the features of the source: " in text


DETECTORS = {
    "FPN": ("COCO-Detection/faster_rcnn_R_50_FPN_1x.yaml", ["backbone.bottom_up."]),
    "C4": ("COCO-Detection/faster_rcnn_R_50_C4_1x.yaml", ["backbone.", "roi_heads."]),
}


@pytest.mark.parametrize("norm", ["FrozenBN", "BN"])
@pytest.mark.parametrize("kind", DETECTORS)
def test_detectron2_alone_loads_every_backbone_tensor(exported_r50, kind, norm):
    zoo, prefixes = DETECTORS[kind]
    checkpoint, _, path = exported_r50
    cfg = get_cfg()
    cfg.merge_from_file(model_zoo.get_config_file(zoo))
    cfg.MODEL.DEVICE = "cpu"
    cfg.MODEL.RESNETS.NORM = norm
    model = build_model(cfg)
    left = DetectionCheckpointer(model).load(str(path), checkpointables=[])
    assert "model" not in left
    state, filled = model.state_dict(), 0
    for name, tensor in backbone_of(checkpoint).items():
        places = [p + name for p in prefixes if p + name in state]
        if name.endswith("num_batches_tracked") and norm == "FrozenBN":
            assert not places
            continue
        assert len(places) == 1
        assert torch.equal(state[places[0]], tensor)
        filled += 1
    assert filled == (265 if norm == "FrozenBN" else 318)


def test_detectron2_alone_loads_pth_output(moco_r18, tmp_path):
    output = tmp_path / "out.pth"
    convert(str(moco_r18), str(output))
    content = torch.load(output, weights_only=True)
    assert all(isinstance(t, torch.Tensor) for t in content["model"].values())
    cfg = get_cfg()
    cfg.MODEL.DEVICE = "cpu"
    cfg.MODEL.RESNETS.DEPTH, cfg.MODEL.RESNETS.RES2_OUT_CHANNELS = 18, 64
    cfg.MODEL.RESNETS.OUT_FEATURES, cfg.MODEL.RESNETS.NORM = ["res5"], "BN"
    backbone = build_backbone(cfg)
    DetectionCheckpointer(backbone).load(str(output), checkpointables=[])
    source = backbone_of(torch.load(moco_r18, weights_only=True))
    for name, tensor in backbone.state_dict().items():
        assert torch.equal(tensor, source[name])


def test_key_encoder_is_exported_on_request(moco_r18, tmp_path):
    report = convert(str(moco_r18), str(tmp_path / "key.pkl"), encoder="key")
    content = pickle.loads((tmp_path / "key.pkl").read_bytes())
    checkpoint = torch.load(moco_r18, weights_only=True)
    for name, tensor in backbone_of(checkpoint, "encoder_k").items():
        np.testing.assert_array_equal(content["model"][name], tensor.numpy())
    assert report.source["encoder"] == "key"
    assert "query encoder" in report.dropped.values()


def test_checkpoint_of_ddp_and_of_a_cut_backbone(tmp_path):
    checkpoint = moco_checkpoint(18, last="res4")
    checkpoint["model"] = {f"module.{n}": t for n, t in checkpoint["model"].items()}
    torch.save(checkpoint, tmp_path / "cut.pth")
    report = convert(str(tmp_path / "cut.pth"), str(tmp_path / "cut.pkl"))
    names = pickle.loads((tmp_path / "cut.pkl").read_bytes())["model"]
    assert report.exported == len(names) == 90
    assert not any(name.startswith("res5") for name in names)


@pytest.mark.parametrize("depth, tensors", [(18, 120), (50, 318)])
def test_torchvision_resnet(tmp_path, depth, tensors):
    network = torchvision_resnet(depth)
    torch.save(network.state_dict(), tmp_path / "tv.pth")
    report = convert(str(tmp_path / "tv.pth"), str(tmp_path / "tv.pkl"))
    assert (report.exported, report.expected, len(report.dropped)) == (tensors, tensors, 2)
    assert report.input == RGB
    assert report.source["architecture"]["depth"] == depth
    assert report.difference <= 1e-5


def test_torchvision_resnext(tmp_path):
    network = torchvision.models.resnext50_32x4d(weights=None)
    torch.save(network.state_dict(), tmp_path / "tv.pth")
    report = convert(str(tmp_path / "tv.pth"), str(tmp_path / "tv.pkl"))
    architecture = report.source["architecture"]
    assert (architecture["num_groups"], architecture["width_per_group"]) == (32, 4)


def test_files_without_step_counters_are_whole(tmp_path):
    state = torchvision_resnet(18).state_dict()
    state = {n: t for n, t in state.items() if not n.endswith("num_batches_tracked")}
    torch.save(state, tmp_path / "old.pth")
    report = convert(str(tmp_path / "old.pth"), str(tmp_path / "old.pkl"))
    assert (report.exported, report.expected) == (100, 100)


def test_converted_file_converts_again_and_remembers_its_origin(moco_r18, tmp_path):
    convert(str(moco_r18), str(tmp_path / "a.pkl"))
    report = convert(str(tmp_path / "a.pkl"), str(tmp_path / "b.pth"))
    first = pickle.loads((tmp_path / "a.pkl").read_bytes())
    second = torch.load(tmp_path / "b.pth", weights_only=True)
    for name, array in first["model"].items():
        np.testing.assert_array_equal(second["model"][name].numpy(), array)
    assert second["input"] == first["input"]
    kept = ("encoder", "iteration", "epochs", "architecture")
    assert {k: second["source"][k] for k in kept} == {k: first["source"][k] for k in kept}
    assert report.source["format"] == "detectron2"


@pytest.mark.parametrize(
    "depth, wrong",
    [
        (50, {"stride_in_1x1": True}),
        (18, {"format": "BGR"}),
        (18, {"pixel_std": [1.0, 1.0, 1.0]}),
        (18, {"pixel_mean": [103.53, 116.28, 123.675]}),
    ],
)
def test_forward_check_catches_a_wrong_convention(tmp_path, monkeypatch, depth, wrong):
    """torchvision's network against detectron2's, built from what the written file states."""
    torch.save(torchvision_resnet(depth).state_dict(), tmp_path / "tv.pth")
    entry = dataclasses.replace(FORMATS["torchvision"], convention={**RGB, **wrong})
    monkeypatch.setitem(FORMATS, "torchvision", entry)
    with pytest.raises(CheckError, match="other features than the source"):
        convert(str(tmp_path / "tv.pth"), str(tmp_path / "tv.pkl"))
    assert [p.name for p in tmp_path.iterdir()] == ["tv.pth"]


def test_forward_check_catches_swapped_tensors(tmp_path, monkeypatch):
    torch.save(torchvision_resnet(18).state_dict(), tmp_path / "tv.pth")
    swap = ((r"^res2\.0\.conv1\.", "x."), (r"^res2\.0\.conv2\.", "res2.0.conv1."))
    swap += ((r"^x\.", "res2.0.conv2."),)
    naming = NAMINGS["torchvision"]
    naming = dataclasses.replace(naming, to_detectron2=naming.to_detectron2 + swap)
    monkeypatch.setitem(NAMINGS, "torchvision", naming)
    with pytest.raises(CheckError, match="other features than the source"):
        convert(str(tmp_path / "tv.pth"), str(tmp_path / "tv.pkl"))


def test_not_a_number_fails_the_forward_check(tmp_path):
    checkpoint = moco_checkpoint(18)
    checkpoint["model"]["encoder_q.backbone.res3.0.conv1.weight"][0] = float("nan")
    torch.save(checkpoint, tmp_path / "nan.pth")
    with pytest.raises(CheckError, match="nan"):
        convert(str(tmp_path / "nan.pth"), str(tmp_path / "nan.pkl"))


NAME = "encoder_q.backbone.res3.1.conv2.weight"


def renamed(state):
    state[NAME.replace("conv2", "conv9")] = state.pop(NAME)


def reshaped(state):
    state[NAME] = state[NAME].reshape(128, 128, 9, 1)


def missing(state):
    del state[NAME]


def left_over(state):
    state["encoder_q.backbone.res3.7.conv9.weight"] = torch.zeros(1)


def outside(state):
    state["teacher.weight"] = torch.zeros(1)


@pytest.mark.parametrize(
    "damage, message",
    [
        (renamed, f"missing: {NAME}; not used: {NAME.replace('conv2', 'conv9')}"),
        (reshaped, f"wrong shape: {NAME} is 128x128x9x1 where 128x128x3x3 is needed"),
        (missing, f"missing: {NAME}"),
        (left_over, "not used: encoder_q.backbone.res3.7.conv9.weight"),
        (outside, "not used: teacher.weight"),
    ],
)
def test_damaged_checkpoint_is_refused_by_name(moco_r18, tmp_path, damage, message):
    checkpoint = torch.load(moco_r18, weights_only=True)
    damage(checkpoint["model"])
    torch.save(checkpoint, tmp_path / "bad.pth")
    with pytest.raises(CheckError, match=message):
        convert(str(tmp_path / "bad.pth"), str(tmp_path / "bad.pkl"))
    assert [p.name for p in tmp_path.iterdir()] == ["bad.pth"]


@pytest.mark.parametrize(
    "key, message",
    [
        ("conv1.weight", "without a convolution stem.conv1.weight"),
        ("layer1.0.conv2.weight", "without a convolution res2.0.conv2.weight"),
        ("layer2.3.conv2.weight", "missing: layer2.3.conv2.weight"),
        ("layer4.2.bn3.bias", "missing: layer4.2.bn3.bias"),
    ],
)
def test_torchvision_file_with_a_tensor_missing_is_refused_by_name(tmp_path, key, message):
    state = torchvision_resnet(50).state_dict()
    del state[key]
    torch.save(state, tmp_path / "tv.pth")
    with pytest.raises(CheckError, match=message):
        convert(str(tmp_path / "tv.pth"), str(tmp_path / "tv.pkl"))


def test_another_depth_is_refused(tmp_path):
    checkpoint = moco_checkpoint(18)
    checkpoint["recipe"]["backbone"]["depth"] = 34
    torch.save(checkpoint, tmp_path / "a.pth")
    with pytest.raises(CheckError, match="missing: encoder_q.backbone.res2.2.conv1.weight"):
        convert(str(tmp_path / "a.pth"), str(tmp_path / "a.pkl"))
    state = torchvision_resnet(18).state_dict()
    state = {n: t for n, t in state.items() if not n.startswith("layer3.1.")}
    torch.save(state, tmp_path / "b.pth")
    with pytest.raises(CheckError, match=r"blocks per stage \[2, 2, 1, 2\]"):
        convert(str(tmp_path / "b.pth"), str(tmp_path / "b.pkl"))


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"name": "build_vit_backbone"}, "only backbones that build_resnet_backbone makes"),
        ({"depth": 77}, "cannot build the ResNet"),
        ({"res2_out_channels": 256}, "Must set MODEL.RESNETS.RES2_OUT_CHANNELS = 64"),
        ({"out_features": ["res9"]}, "are no stages of a ResNet"),
        ({"depth": None}, "does not state 'depth'"),
    ],
)
def test_a_backbone_that_cannot_be_built_is_refused(moco_r18, tmp_path, wrong, message):
    checkpoint = torch.load(moco_r18, weights_only=True)
    checkpoint["recipe"]["backbone"].update(wrong)
    torch.save(checkpoint, tmp_path / "bad.pth")
    with pytest.raises(WeightsError, match=message):
        convert(str(tmp_path / "bad.pth"), str(tmp_path / "bad.pkl"))


def test_convention_is_not_guessed(tmp_path):
    backbone = backbone_of(moco_checkpoint(18))
    torch.save({"model": backbone}, tmp_path / "d2.pth")
    with pytest.raises(WeightsError, match="does not state its input convention"):
        convert(str(tmp_path / "d2.pth"), str(tmp_path / "d2.pkl"))


def test_unknown_formats_and_encoders_are_refused(tmp_path):
    torch.save({"a": torch.zeros(1)}, tmp_path / "other.pth")
    with pytest.raises(WeightsError, match="are of no known format: a; known: moco_d2"):
        convert(str(tmp_path / "other.pth"), str(tmp_path / "out.pkl"))
    torch.save(torchvision_resnet(18).state_dict(), tmp_path / "tv.pth")
    with pytest.raises(WeightsError, match="has no key encoder"):
        convert(str(tmp_path / "tv.pth"), str(tmp_path / "out.pkl"), encoder="key")


def test_existing_output_is_kept_without_force(moco_r18, tmp_path):
    output = tmp_path / "out.pkl"
    output.write_text("precious")
    with pytest.raises(WeightsError, match="exists; name another file, or replace it with --force"):
        convert(str(moco_r18), str(output))
    assert output.read_text() == "precious"
    convert(str(moco_r18), str(output), force=True)
    assert len(pickle.loads(output.read_bytes())["model"]) == 120


def test_forced_conversion_that_fails_keeps_the_existing_output(tmp_path):
    checkpoint = moco_checkpoint(18)
    checkpoint["model"]["encoder_q.backbone.res3.0.conv1.weight"][0] = float("inf")
    torch.save(checkpoint, tmp_path / "bad.pth")
    (tmp_path / "out.pkl").write_text("precious")
    with pytest.raises(CheckError):
        convert(str(tmp_path / "bad.pth"), str(tmp_path / "out.pkl"), force=True)
    assert (tmp_path / "out.pkl").read_text() == "precious"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad.pth", "out.pkl"]


def test_impossible_outputs_are_refused_before_reading(moco_r18, tmp_path):
    for output, message in (
        (tmp_path / "out.bin", "must end in .pkl or .pth"),
        (tmp_path / "nowhere" / "out.pkl", "does not exist"),
        (moco_r18, "is the source itself"),
    ):
        with pytest.raises(WeightsError, match=message):
            convert(str(moco_r18), str(output), force=True)
