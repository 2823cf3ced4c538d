"""ViTs: what they start from, what their features are, and what trains in them."""

import math
import sys
from functools import partial

import numpy as np
import pytest
import timm
import torch
from detectron2.modeling import build_backbone
from detectron2.modeling.backbone.vit import ViT
from support import random_views, sincos_reference, tiny_pretrain_config, tiny_vit_options
from torch import nn

from moco_d2.errors import UserError
from moco_d2.modeling.moco import MoCo
from moco_d2.modeling.vit import freeze_patch_projection_, sincos_positions
from moco_d2.modeling.vit_layers import DropPath, Mlp
from moco_d2.solver.build import build_pretrain_optimizer


def config(**overrides):
    return tiny_pretrain_config(**{**tiny_vit_options(), **overrides})


def backbone(seed=0, **overrides):
    torch.manual_seed(seed)
    return build_backbone(config(**overrides))


def timm_vit(state, img_size, heads, **options):
    """timm's network with the same weights: an independent forward of MoCo v3's."""
    channels = state["patch_embed.proj.weight"].shape[0]
    net = timm.models.vision_transformer.VisionTransformer(
        img_size=img_size,
        patch_size=state["patch_embed.proj.weight"].shape[-1],
        embed_dim=channels,
        depth=len({name.split(".")[1] for name in state if name.startswith("blocks.")}),
        num_heads=heads,
        norm_layer=partial(nn.LayerNorm, eps=1e-6),
        num_classes=0,
        fc_norm=False,
        **options,
    ).double()
    net.load_state_dict(state, strict=not options)
    return net.eval()


@pytest.mark.parametrize(("side", "channels"), [(1, 4), (3, 48), (14, 384)])
def test_positions_are_the_papers(side, channels):
    table = sincos_positions(side, channels)
    np.testing.assert_allclose(table, sincos_reference(side, channels), rtol=0, atol=1e-14)


@pytest.mark.parametrize("token", [False, True])
def test_initial_weights_are_those_of_moco_v3(token):
    """A uniform distribution between -b and b has the standard deviation b / sqrt(3)."""
    vit = backbone(MODEL__VIT__CLASS_TOKEN=token, MODEL__VIT__EMBED_DIM=192)
    bounds = {  # b^2 = 6 / (inputs + outputs)
        "patch_embed.proj": 3 * 16 * 16 + 192,
        "blocks.1.attn.qkv": 192 + 192,  # three layers of this size
        "blocks.1.attn.proj": 192 + 192,
        "blocks.1.mlp.fc1": 192 + 768,
        "blocks.1.mlp.fc2": 768 + 192,
    }
    for name, fan_sum in bounds.items():
        module, bound = vit.get_submodule(name), math.sqrt(6 / fan_sum)
        assert module.weight.abs().max() <= bound
        assert float(module.weight.std()) == pytest.approx(bound / math.sqrt(3), rel=0.02)
        assert not module.bias.any()
    expected = sincos_reference(2, 192)
    if token:
        expected = np.concatenate([np.zeros((1, 192)), expected])
        assert 0 < vit.cls_token.abs().max() < 1e-5
    np.testing.assert_allclose(vit.pos_embed[0].detach(), expected, rtol=0, atol=1e-7)
    assert [n for n, p in vit.named_parameters() if not p.requires_grad] == ["pos_embed"]


@pytest.mark.parametrize("token", [False, True])
def test_features_are_those_of_an_independent_vit(token):
    """Average pooling right after the last block, or the class token after the norm."""
    model = MoCo(config(MODEL__VIT__CLASS_TOKEN=token)).double().eval()
    vit = model.encoder_q.backbone
    for parameter in vit.parameters():
        nn.init.normal_(parameter, std=0.2)
    images = torch.rand(3, 3, 32, 32, dtype=torch.float64)
    options = {} if token else {"class_token": False, "global_pool": "avg"}
    reference = timm_vit(vit.state_dict(), 32, 4, **options)
    if not token:
        reference.norm = nn.Identity()
    with torch.no_grad():
        expected = reference(images)
        torch.testing.assert_close(model.encoder_q.features(images), expected)


@pytest.mark.parametrize("token", [False, True])
def test_gradients_reach_all_but_what_is_fixed(token):
    cfg = config(MODEL__VIT__CLASS_TOKEN=token, MODEL__MOCO__FREEZE_PATCH_PROJECTION=True)
    torch.manual_seed(0)
    model = MoCo(cfg).train()
    start = {n: p.clone() for n, p in model.named_parameters()}
    fixed = {
        f"encoder_q.backbone.{n}" for n in ("patch_embed.proj.weight", "patch_embed.proj.bias")
    }
    fixed.add("encoder_q.backbone.pos_embed")
    optimizer = build_pretrain_optimizer(cfg, model)
    trained = {p for group in optimizer.param_groups for p in group["params"]}
    names = {n for n, p in model.named_parameters() if p in trained}
    assert names == {n for n in start if n.startswith("encoder_q.")} - fixed

    model({"views": random_views(8, 32, seed=0)})["loss_contrastive"].backward()
    assert {n for n, p in model.named_parameters() if p.grad is not None} == names
    assert all(model.get_parameter(n).grad.any() for n in names)
    optimizer.step()
    model.finish_step(0.9)
    for name, parameter in model.named_parameters():
        moved = name.replace("encoder_k", "encoder_q") not in fixed
        assert torch.equal(parameter, start[name]) is not moved, name


def test_freezing_what_is_not_there_is_refused():
    with pytest.raises(UserError, match="FREEZE_PATCH_PROJECTION needs a ViT, and a ResNet has"):
        MoCo(tiny_pretrain_config(MODEL__MOCO__FREEZE_PATCH_PROJECTION=True))
    vit = backbone()
    freeze_patch_projection_(vit)
    assert not vit.patch_embed.proj.weight.requires_grad


def test_stand_ins_compute_what_timms_layers_do():
    torch.manual_seed(0)
    ours, theirs = Mlp(6, 10), timm.layers.Mlp(6, 10)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(4, 5, 6)
    assert torch.equal(ours(x), theirs(x))

    ours, theirs = DropPath(0.25), timm.layers.DropPath(0.25)
    for train in (True, False):
        torch.manual_seed(1)
        first = ours.train(train)(x)
        torch.manual_seed(1)
        torch.testing.assert_close(first, theirs.train(train)(x))
    kept = DropPath(0.25)(torch.ones(4000, 2, 3))
    assert kept.unique().tolist() == pytest.approx([0, 4 / 3])
    assert all(image.unique().numel() == 1 for image in kept[:50])  # per image
    assert float(kept.mean()) == pytest.approx(1, abs=0.04)  # 4 standard deviations


def test_no_timm_is_needed(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("timm.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "timm", None)  # as where it is not installed
    with pytest.raises(ImportError):
        ViT(img_size=32, depth=1)  # detectron2's own
    cfg = config()
    loss = MoCo(cfg).train()({"views": random_views(8, 32, seed=0)})["loss_contrastive"]
    assert loss.isfinite()
    cfg.MODEL.BACKBONE.NAME = "build_vit_sfp_backbone"
    cfg.MODEL.VIT.DROP_PATH, cfg.MODEL.FPN.NORM = 0.1, "LN"
    assert list(build_backbone(cfg)(torch.rand(1, 3, 64, 64))) == ["p2", "p3", "p4", "p5", "p6"]
    assert not [name for name in sys.modules if name.startswith("timm.")]


REFUSALS = {
    "heads": ({"NUM_HEADS": 5}, "EMBED_DIM 48 cannot be split over MODEL.VIT.NUM_HEADS 5"),
    "quarters": ({"EMBED_DIM": 6, "NUM_HEADS": 2}, "EMBED_DIM is 6; sines and cosines"),
    "positions": ({"IMG_SIZE": 40}, "IMG_SIZE 40 is no multiple of MODEL.VIT.PATCH_SIZE 16"),
    "views": ({"PATCH_SIZE": 12, "IMG_SIZE": 48}, "views of 32 pixels .* patches of 12"),
    "drop path": ({"DROP_PATH": 0.1}, r"DROP_PATH is 0.1, and is for detectors .* set it to 0.0"),
    "windows": ({"WINDOW_SIZE": 7}, "WINDOW_SIZE is 7, and is for detectors"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_be_built_is_refused(name):
    changes, message = REFUSALS[name]
    with pytest.raises(UserError, match=message):
        backbone(**{f"MODEL__VIT__{key}": value for key, value in changes.items()})
