"""Features of frozen backbones are those of the networks that the weights come from."""

import pytest
import torch
import torch.nn.functional as F
from layouts import SAMPLES, VIT_SAMPLES, save_vit, vits
from support import random_views, tiny_pretrain_config, tiny_vit_options
from torchvision.transforms.functional import normalize
from weights import moco_checkpoint

from moco_d2.checkpoint import convert
from moco_d2.engine.identity import RunIdentity
from moco_d2.evaluation.frozen_features import features_from_file, random_features
from moco_d2.modeling.moco import MoCo

IMAGES = {"image": random_views(2, 64, 0)[0]}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("moco") / "moco.pth"
    torch.save(moco_checkpoint(18), path)
    return str(path)


@torch.no_grad()
@pytest.mark.parametrize("name", ["moco_v3", "byol"])
def test_an_official_resnets_features_are_its_own(name, tmp_path):
    sample = SAMPLES[name]
    network = features_from_file(str(sample.save(tmp_path)))
    expected = sample.features(IMAGES["image"]).mean(dim=(2, 3))
    torch.testing.assert_close(network.double()(IMAGES), expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("name", ["moco_v3_vit", "timm_vit"])
def test_a_vit_with_a_class_token_gives_the_tokens_features(name, tmp_path):
    """The official layout, and timm's, against timm's own forward."""
    _, number, channels, heads, (mean, std), stated = VIT_SAMPLES[name]
    network = features_from_file(str(save_vit(name, tmp_path)), **stated)
    images = {"image": random_views(2, 48, 0)[0]}
    expected = vits(channels, heads)[number].double()(
        normalize(images["image"].double() / 255, mean, std)
    )
    torch.testing.assert_close(network.double()(images), expected, rtol=0, atol=1e-5)
    network.check_size(48)
    with pytest.raises(ValueError, match="50 pixels .* patches of 16; give a multiple"):
        network.check_size(50)


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, tiny_vit_options()], ids=["ResNet to res3", "ViT"])
def test_own_checkpoints_give_what_their_evaluation_sees(options, tmp_path):
    cfg = tiny_pretrain_config(**options)
    model, recipe = MoCo(cfg).eval(), RunIdentity(cfg, num_images=100).state_dict()
    path = str(tmp_path / "own.pth")
    torch.save({"model": model.state_dict(), "iteration": 9, "recipe": recipe}, path)
    shown = {"image": random_views(2, 32, 1)[0]}
    ours = features_from_file(path)(shown)
    assert (ours.norm(dim=1) - 1).abs().max() > 0.01  # as they are, for linear heads
    torch.testing.assert_close(F.normalize(ours, dim=1), model(shown), rtol=0, atol=1e-5)


@torch.no_grad()
def test_the_fingerprint_tells_features_apart_and_not_files(checkpoint, tmp_path):
    own = features_from_file(checkpoint)
    exported = str(tmp_path / "exported.pkl")
    convert(checkpoint, exported)
    assert features_from_file(exported).fingerprint == own.fingerprint
    key = features_from_file(checkpoint, encoder="key")
    assert key.fingerprint != own.fingerprint
    assert not torch.equal(key(IMAGES), own(IMAGES))
    std = {"pixel_std": [1.0, 1.0, 1.0]}
    assert features_from_file(checkpoint, convention=std).fingerprint != own.fingerprint


@torch.no_grad()
def test_random_features_depend_on_the_seed_alone():
    cfg = tiny_pretrain_config()
    first, again, other = (random_features(cfg, seed) for seed in (0, 0, 1))
    assert first.fingerprint == again.fingerprint != other.fingerprint
    assert torch.equal(first(IMAGES), again(IMAGES))
    assert first(IMAGES).shape == (2, 128)  # res3 of a ResNet-18
    assert not any(p.requires_grad for p in first.parameters()) and not first.training
