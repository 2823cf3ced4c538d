"""MoCo v3's own files load into this project's models: the features of an independent forward."""

import numpy as np
import pytest
import timm
import torch
import torchvision
from layouts import IMAGENET, save_vit, vits
from support import tiny_pretrain_config
from torch import nn
from torchvision.transforms.functional import normalize
from weights import RGB, randomise_norms_

from moco_d2.checkpoint import CheckError, load_backbone, load_pretraining_weights_
from moco_d2.checkpoint.loading import convention_of_weights
from moco_d2.modeling.moco import MoCo

IMAGES = torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8)
VIT_S = {"MODEL__VIT__EMBED_DIM": 384, "MODEL__VIT__NUM_HEADS": 12}


def save(net: nn.Module, head: str, path) -> str:
    """As main_moco.py does: a DDP module of two encoders with projectors, and a predictor."""
    state = {}
    for encoder in ("base_encoder", "momentum_encoder"):
        sign = 1 if encoder == "base_encoder" else -1
        state |= {f"module.{encoder}.{n}": sign * t for n, t in net.state_dict().items()}
        state[f"module.{encoder}.{head}.0.weight"] = torch.rand(4, 4)
    state["module.predictor.0.weight"] = torch.rand(4, 4)
    torch.save({"epoch": 300, "arch": "x", "state_dict": state, "optimizer": {}}, path)
    return str(path)


def features(model: MoCo) -> torch.Tensor:
    """Not normalised to length 1."""
    model.double().eval()
    with torch.no_grad():
        return model.encoder_q.features(model.normalise(IMAGES))


def vit_config(**changes):
    options = {
        "MODEL__BACKBONE__NAME": "build_vit_backbone",
        **VIT_S,
        "MODEL__VIT__IMG_SIZE": 64,
        "MODEL__VIT__CLASS_TOKEN": True,
        "INPUT__VIEWS__SIZE": 64,
    }
    return tiny_pretrain_config(**{**options, **changes})


def test_a_vit_s_with_its_class_token(tmp_path):
    """The whole of ViT-S, for images of 64 pixels, and its features by timm's forward."""
    torch.manual_seed(0)
    net = timm.models.vision_transformer.VisionTransformer(
        img_size=64, embed_dim=384, depth=12, num_heads=12, num_classes=0
    )
    net.cls_token.data.normal_()
    net.norm.weight.data.uniform_(0.5, 2)
    net.norm.bias.data.normal_()
    path = save(net, "head", tmp_path / "vit-s-300ep.pth.tar")
    with torch.no_grad():
        expected = net.double().eval()(normalize(IMAGES.double() / 255, *IMAGENET))

    model = MoCo(vit_config())
    report = load_pretraining_weights_(model, path)
    assert report.loaded == 2 * (4 + 12 * 12 + 2)  # both encoders: stem and token, blocks, norm
    np.testing.assert_allclose(features(model), expected, rtol=0, atol=1e-5)
    assert expected.std() > 0.1


def test_a_vit_backbone_alone(tmp_path):
    path = str(save_vit("moco_v3_vit", tmp_path))
    assert convention_of_weights(path) == RGB
    backbone, images = load_backbone(path).double(), torch.rand(2, 3, 48, 48, dtype=torch.float64)
    with torch.no_grad():
        tokens = backbone(images)["class_token"].flatten(1)
        np.testing.assert_allclose(tokens, vits(384, 12)[0].double()(images), rtol=0, atol=1e-5)


def test_a_vit_that_is_not_the_files_is_refused(tmp_path):
    path = str(save_vit("moco_v3_vit", tmp_path))
    size = {"MODEL__VIT__DEPTH": 2, "MODEL__VIT__IMG_SIZE": 48, "INPUT__VIEWS__SIZE": 48}
    with pytest.raises(CheckError, match="ViT with 12 heads, and this model's has 6"):
        load_pretraining_weights_(MoCo(vit_config(**size, MODEL__VIT__NUM_HEADS=6)), path)
    pooled = MoCo(vit_config(**size, MODEL__VIT__CLASS_TOKEN=False))
    with pytest.raises(CheckError, match="pos_embed is 1x10x384 where 1x9x384 is needed"):
        load_pretraining_weights_(pooled, path)


def test_a_resnet_50(tmp_path):
    torch.manual_seed(0)
    net = randomise_norms_(torchvision.models.resnet50(weights=None))
    net.fc = nn.Identity()
    path = save(net, "fc", tmp_path / "r-50-300ep.pth.tar")
    assert convention_of_weights(path) == RGB
    model = MoCo(
        tiny_pretrain_config(
            MODEL__RESNETS__DEPTH=50,
            MODEL__RESNETS__RES2_OUT_CHANNELS=256,
            MODEL__RESNETS__OUT_FEATURES=["res5"],
        )
    )
    assert load_pretraining_weights_(model, path).loaded == 2 * (
        265 + 53
    )  # both encoders: weights, BN counters
    with torch.no_grad():
        expected = net.double().eval()(normalize(IMAGES.double() / 255, *IMAGENET))
    np.testing.assert_allclose(features(model), expected, rtol=0, atol=1e-4)
    assert expected.std() > 0.01
