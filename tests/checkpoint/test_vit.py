"""Vision transformers: every format, head counts, positions, and the way to detectors."""

import numpy as np
import pytest
import timm
import torch
from layouts import STATED_HALF, VIT_SAMPLES, layers, save_vit, vit, vit_features, vits
from support import sincos_reference
from torch import nn
from torchvision.models import VisionTransformer

from moco_d2.checkpoint import CheckError, WeightsError, convert, load_backbone, read_backbone
from moco_d2.checkpoint.files import read_weight_file
from moco_d2.checkpoint.vit import has_fixed_positions

IMAGES = torch.randint(0, 256, (2, 3, 48, 48), dtype=torch.uint8)


@pytest.fixture(autouse=True)
def few_threads():
    torch.set_num_threads(1)


def features(backbone):
    mean, std = (
        torch.tensor(backbone.input_convention[k]).double().view(3, 1, 1)
        for k in ("pixel_mean", "pixel_std")
    )
    with torch.no_grad():
        return backbone.double()((IMAGES.double() - mean) / std)["last_feat"]


@pytest.mark.parametrize("name", VIT_SAMPLES)
def test_a_file_of_the_format_is_converted(name, tmp_path):
    _, exported, channels, heads, (mean, std), stated = VIT_SAMPLES[name]
    source, out = str(save_vit(name, tmp_path)), str(tmp_path / "out.pkl")
    auto = convert(source, out, **stated)
    forced = convert(source, str(tmp_path / "forced.pth"), source_format=name, **stated)
    assert auto.source["format"] == name
    assert auto.mapped == forced.mapped
    assert max(auto.difference, forced.difference) <= 1e-5
    assert auto.source["architecture"]["num_heads"] == heads
    unsafe = stated.get("unsafe_pickle", False)
    in_file = read_weight_file(source, unsafe_pickle=unsafe).state
    assert set(auto.mapped) | set(auto.dropped) == set(in_file)
    assert sum(why == "not used by detectron2" for why in auto.dropped.values()) == 3

    net = vits(channels, heads)[exported]
    expected = vit_features(net, IMAGES, mean, std)
    np.testing.assert_allclose(features(load_backbone(out)), expected, rtol=0, atol=1e-4)


def test_timm_gets_class_token_and_norm_where_the_source_has_them(tmp_path):
    source, out = str(save_vit("moco_v3_vit", tmp_path)), str(tmp_path / "timm.safetensors")
    report = convert(source, out, target="timm")
    net = vits(384, 12)[0].float()
    written = read_weight_file(out).state
    assert set(written) == set(net.state_dict()) == set(report.mapped.values())
    assert all(torch.equal(t, written[n]) for n, t in net.state_dict().items())
    options = {"img_size": 48, "num_heads": 12, "depth": 2, "num_classes": 0}
    model = timm.create_model("vit_small_patch16_224", checkpoint_path=out, **options).eval()
    images = torch.rand(1, 3, 48, 48)
    with torch.no_grad():
        torch.testing.assert_close(model(images), net(images))


@pytest.mark.parametrize("target", ["timm", "torchvision"])
@pytest.mark.parametrize("full", [True, False], ids=["ViT-S", "small"])
def test_there_and_back_again(tmp_path, full, target):
    if full:
        options = {"img_size": 32, "num_heads": 12, "num_classes": 0}
        net = timm.create_model("vit_small_patch16_224", **options)
    else:
        net = vits(384, 12)[0].float()
    state = {f"module.base_encoder.{n}": t for n, t in net.state_dict().items()}
    torch.save({"state_dict": state, "epoch": 300}, tmp_path / "vit-s-300ep.pth.tar")
    names = ("a.pkl", "b.pth" if full else "b.safetensors", "c.pkl")
    a, b, c = (str(tmp_path / name) for name in names)
    convert(str(tmp_path / "vit-s-300ep.pth.tar"), a)
    convert(a, b, target=target)
    convert(b, c)
    before, after = read_weight_file(a), read_weight_file(c)
    assert len(before.state) == 3 + 12 * (12 if full else 2)
    assert list(before.state) == list(after.state)
    assert all(torch.equal(t, after.state[n]) for n, t in before.state.items())
    assert before.meta["input"] == after.meta["input"]
    assert before.meta["source"]["architecture"] == after.meta["source"]["architecture"]
    assert before.meta["source"]["architecture"]["img_size"] == (32 if full else 48)
    assert after.meta["source"]["epoch"] == 300


def test_torchvision_gets_a_whole_network_where_the_source_has_one(tmp_path):
    """Class token and final norm included, it computes what the source's network does."""
    source, out = str(save_vit("moco_v3_vit", tmp_path)), str(tmp_path / "tv.pth")
    convert(source, out, target="torchvision")
    model = VisionTransformer(48, 16, 2, 12, 384, 1536).eval()
    model.heads = nn.Identity()
    model.load_state_dict(torch.load(out, weights_only=True)["state_dict"])
    images = torch.rand(1, 3, 48, 48)
    with torch.no_grad():
        torch.testing.assert_close(model(images), vits(384, 12)[0].float()(images))


def test_moco_v3s_vit_is_not_taken_for_timms_when_it_comes_in_timms_names(tmp_path):
    table = torch.from_numpy(sincos_reference(3, 384)).float()
    positions = torch.cat([torch.zeros(1, 384), table])[None]
    assert has_fixed_positions(positions)
    assert not has_fixed_positions(positions.flip(1))
    state = {**vit(0).state_dict(), "pos_embed": positions}
    torch.save({"state_dict": {f"module.{n}": t for n, t in state.items()}}, tmp_path / "x.pth")
    stated = {"convention": STATED_HALF}
    with pytest.raises(CheckError, match=r"12, timm's and DINO's 6\); state it with --num-heads"):
        read_backbone(str(tmp_path / "x.pth"), **stated)
    read = read_backbone(str(tmp_path / "x.pth"), num_heads=12, **stated)
    assert read.architecture["num_heads"] == 12


def save(state, path):
    torch.save({"state_dict": {f"base_encoder.{n}": t for n, t in state.items()}}, path)
    return str(path)


def without(name, state):
    return {n: t for n, t in state.items() if n != name}


STEM = {"patch_embed.proj.0.weight": torch.rand(48, 3, 3, 3)}
DAMAGES = {
    "no positions": (lambda s: without("pos_embed", s), "no ViT without pos_embed"),
    "a convolutional stem": (
        lambda s: without("patch_embed.proj.weight", s) | STEM,
        "detectron2's ViT has no convolutional stem",
    ),
    "positions of no square": (
        lambda s: {**s, "pos_embed": s["pos_embed"][:, :8]},
        "8 positions are no square",
    ),
    "a missing tensor": (
        lambda s: without("blocks.1.attn.proj.bias", s),
        "missing: base_encoder.blocks.1.attn.proj.bias",
    ),
    "layer scale": (
        lambda s: s | layers("blocks.0.ls1.gamma"),
        "not used: base_encoder.blocks.0.ls1.gamma",
    ),
    "transposed": (
        lambda s: {**s, "blocks.0.mlp.fc2.weight": s["blocks.0.mlp.fc2.weight"].T},
        "base_encoder.blocks.0.mlp.fc2.weight is 1536x384 where 384x1536 is needed",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files_are_refused(damage, tmp_path):
    change, message = DAMAGES[damage]
    source = save(change(vit(0).state_dict()), tmp_path / "x.pth")
    with pytest.raises(CheckError, match=message):
        convert(source, str(tmp_path / "out.pkl"))
    assert [p.name for p in tmp_path.iterdir()] == ["x.pth"]


def test_what_is_not_known_is_asked_for(tmp_path):
    source = str(save_vit("timm_vit", tmp_path))
    with pytest.raises(WeightsError, match=r"convention \(format, pixel_mean, pixel_std\), and"):
        read_backbone(source)
    source = str(save_vit("solo_vit", tmp_path))
    with pytest.raises(CheckError, match="384 channels cannot be seen in its tensors"):
        read_backbone(source)
    with pytest.raises(CheckError, match="384 channels cannot be split over 7 heads"):
        read_backbone(source, num_heads=7)
