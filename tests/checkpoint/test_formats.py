"""Every format of the table, as its project saves it: detected, converted, and checked."""

import sys

import numpy as np
import pytest
import torch
from layouts import SAMPLES, VIT_SAMPLES, detectron2_names, save_vit, states

from moco_d2.checkpoint import WeightsError, convert, load_backbone, read_backbone
from moco_d2.checkpoint.files import read_weight_file
from moco_d2.checkpoint.table import FORMATS, format_rows


@pytest.fixture(autouse=True)
def few_threads():
    torch.set_num_threads(1)


def test_every_format_has_a_sample():
    in_samples = {sample.format for sample in SAMPLES.values()} | set(VIT_SAMPLES)
    assert in_samples | {"detectron2_vit"} == set(FORMATS)  # the last is in test_vit.py


def counted(state) -> int:
    return sum(not name.endswith("num_batches_tracked") for name in state)


@pytest.mark.parametrize("name", SAMPLES)
def test_a_file_of_the_format_is_converted(name, tmp_path):
    sample = SAMPLES[name]
    path = str(sample.save(tmp_path))
    output = str(tmp_path / "auto.pkl")
    auto = convert(path, output, unsafe_pickle=sample.unsafe)
    detected = sample.format if FORMATS[sample.format].detected else "torchvision"
    assert auto.source["format"] == detected
    in_file = read_weight_file(path, unsafe_pickle=sample.unsafe).state
    of_format = [n for n, entry in FORMATS.items() if entry.detected and entry.matches(in_file)]
    assert of_format == [detected]
    assert auto.difference <= 1e-5
    assert auto.exported == auto.expected

    backbone = states(sample.arch)[sample.exported]
    wanted = {n: t for n, t in backbone.items() if not n.startswith("fc.")}
    assert counted(read_weight_file(output).state) == counted(wanted)
    assert set(auto.mapped) | set(auto.dropped) == set(in_file)
    assert not set(auto.mapped) & set(auto.dropped)
    assert len(auto.mapped) + len(auto.added) == auto.exported

    images = torch.randint(0, 256, (1, 3, 64, 64), dtype=torch.uint8)
    loaded = load_backbone(output).double()
    convention = loaded.input_convention
    x = images if convention["format"] == "RGB" else images.flip(1)
    mean, std = (torch.tensor(convention[k]).view(3, 1, 1) for k in ("pixel_mean", "pixel_std"))
    with torch.no_grad():
        features = loaded((x.double() - mean) / std)["res5"]
    np.testing.assert_allclose(features, sample.features(images), rtol=0, atol=1e-4)


FIRST_OF_EACH = {sample.format: name for name, sample in reversed(SAMPLES.items())}


@pytest.mark.parametrize("name", FIRST_OF_EACH.values())
def test_a_file_of_the_format_is_converted_when_it_is_forced(name, tmp_path):
    sample = SAMPLES[name]
    path = str(sample.save(tmp_path))
    unsafe = sample.unsafe
    forced = convert(
        path, str(tmp_path / "o.pth"), source_format=sample.format, unsafe_pickle=unsafe
    )
    assert forced.source["format"] == sample.format
    assert forced.difference <= 1e-5
    assert forced.exported == forced.expected == len(forced.mapped) + len(forced.added)


TWO_ENCODERS = [
    *("moco_d2", "moco_d2 v3", "moco", "moco_v3", "byol", "byol_pytorch", "dino", "mmselfsup"),
    *("mmselfsup byol", "openselfsup", "densecl", "lightly", "lightly benchmark", "solo"),
    *("pixpro", "pycontrast"),
]


@pytest.mark.parametrize("name", TWO_ENCODERS)
def test_the_other_encoder_is_read_on_request(name, tmp_path):
    sample = SAMPLES[name]
    path = str(sample.save(tmp_path))
    first, other = FORMATS[sample.format].encoders
    read = read_backbone(path, encoder=other, unsafe_pickle=sample.unsafe)
    weights = detectron2_names(states(sample.arch)[1 - sample.exported])
    assert read.encoder == other
    assert set(read.tensors) == set(weights)
    assert all(torch.equal(tensor, weights[n]) for n, tensor in read.tensors.items())
    assert f"{first} encoder" in read.dropped.values()


def test_an_encoder_that_is_not_there_is_refused(tmp_path):
    path = str(SAMPLES["lightly dino"].save(tmp_path))
    with pytest.raises(WeightsError, match="no tensor of the key encoder's backbone"):
        read_backbone(path, encoder="key")
    path = str(SAMPLES["simsiam"].save(tmp_path))
    with pytest.raises(WeightsError, match="SimSiam, official has no key encoder"):
        read_backbone(path, encoder="key")


def test_a_forced_format_must_fit(tmp_path):
    path = str(SAMPLES["moco"].save(tmp_path))
    with pytest.raises(WeightsError, match="is not SwAV.*: it has no tensors of such names"):
        read_backbone(path, source_format="swav")
    with pytest.raises(WeightsError, match="there is no format 'mocov9'; known: moco_d2, "):
        read_backbone(path, source_format="mocov9")


def test_the_table_says_what_is_known_of_each_format():
    rows = {name: row for name, *row in format_rows()}
    assert list(rows) == list(FORMATS)
    assert (
        rows["swav"][2] == "RGB, mean 123.675/116.28/103.53, std 58.14/57.12/57.375, stride in 3x3"
    )
    assert rows["caffe2"][2] == "BGR, mean 103.53/116.28/123.675, std 1/1/1, stride in 1x1"
    assert rows["dino"][1] == "key, query"
    assert rows["detectron2"][1:] == ["one", "stated by the file"]


def test_a_notebook_gets_a_ready_backbone_from_any_file(tmp_path):
    sample = SAMPLES["moco"]
    backbone = load_backbone(str(sample.save(tmp_path)), encoder="query")
    assert not backbone.training
    assert backbone.input_convention["format"] == "RGB"
    assert backbone.output_shape()["res5"].stride == 32
    wanted = detectron2_names(states(sample.arch)[0])
    assert all(torch.equal(t, wanted[n]) for n, t in backbone.state_dict().items())


def test_optional_packages_are_named_when_they_are_needed(tmp_path, monkeypatch):
    path = str(SAMPLES["timm, safetensors"].save(tmp_path))
    vit = str(save_vit("moco_v3_vit", tmp_path))
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(WeightsError, match="need the package safetensors: pip install"):
        read_backbone(path)
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(WeightsError, match="timm's own network: pip install timm"):
        read_backbone(vit)
    path = str(SAMPLES["timm"].save(tmp_path))
    assert convert(path, str(tmp_path / "o.pkl"), source_format="timm").difference <= 1e-5
