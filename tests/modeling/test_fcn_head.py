"""FCNHead on a dilated ResNet: shapes, dilations, and the network against one of torch's layers."""

import functools

import numpy as np
import pytest
import torch
import torchvision
from detectron2.config import get_cfg
from detectron2.layers import ShapeSpec
from detectron2.modeling import build_model
from torch import nn
from weights import randomise_norms_

import moco_d2.modeling.fcn_head  # noqa: F401 (registers)
from moco_d2 import add_moco_config
from moco_d2.modeling.fcn_head import FCNHead, upsample

CLASSES = 21


@functools.cache
def segmentor() -> nn.Module:
    """The network of the VOC config, with norms that differ."""
    torch.manual_seed(0)
    cfg = get_cfg()
    add_moco_config(cfg)
    cfg.merge_from_file("configs/transfer/voc_semseg_FCN_R50_30k.yaml")
    cfg.MODEL.DEVICE = "cpu"
    cfg.MODEL.RESNETS.NORM = cfg.MODEL.SEM_SEG_HEAD.NORM = "BN"
    return randomise_norms_(build_model(cfg))


def torchvision_fcn(state: dict[str, torch.Tensor]) -> nn.Module:
    """torchvision's R50 and four more layers, after A.5 of the paper, with given weights."""
    resnet = torchvision.models.resnet50(weights=None)
    for block in resnet.layer4:
        block.conv2.stride, block.conv2.dilation, block.conv2.padding = (1, 1), (2, 2), (2, 2)
    resnet.layer4[0].downsample[0].stride = (1, 1)
    body = nn.Sequential(*list(resnet.children())[:-2])
    convs = (
        nn.Conv2d(2048, 256, 3, padding=6, dilation=6, bias=False),
        nn.Conv2d(256, 256, 3, padding=6, dilation=6, bias=False),
    )
    norms, predictor = (nn.BatchNorm2d(256), nn.BatchNorm2d(256)), nn.Conv2d(256, CLASSES, 1)
    resnet.load_state_dict(
        {name: state[detectron2_name(name)] for name in body_names(resnet)}, strict=False
    )
    for i in (0, 1):
        convs[i].weight.data = state[f"sem_seg_head.conv{i + 1}.weight"]
        prefix = f"sem_seg_head.conv{i + 1}.norm."
        norms[i].load_state_dict({name: state[prefix + name] for name in norms[i].state_dict()})
    predictor.weight.data = state["sem_seg_head.predictor.weight"]
    predictor.bias.data = state["sem_seg_head.predictor.bias"]
    relu = nn.ReLU()
    head = nn.Sequential(convs[0], norms[0], relu, convs[1], norms[1], relu, predictor)
    return nn.Sequential(body, head)


def body_names(resnet):
    return [name for name in resnet.state_dict() if not name.startswith("fc.")]


def detectron2_name(name):
    if name.startswith(("conv1", "bn1")):
        name = "backbone.stem." + name
    else:
        stage, rest = name.removeprefix("layer").split(".", 1)
        name = f"backbone.res{int(stage) + 1}.{rest}"
    name = name.replace("downsample.0", "shortcut").replace("downsample.1", "shortcut.norm")
    for i in (1, 2, 3):
        name = name.replace(f".bn{i}", f".conv{i}.norm")
    return name


def test_only_res5_is_dilated_and_the_stride_is_16():
    model = segmentor()
    assert model.backbone.output_shape()["res5"].stride == 16
    dilated = [
        name
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Conv2d) and layer.dilation != (1, 1)
    ]
    assert dilated == [f"backbone.res5.{i}.conv2" for i in range(3)] + [
        "sem_seg_head.conv1",
        "sem_seg_head.conv2",
    ]
    assert {model.backbone.res5[i].conv2.dilation for i in range(3)} == {(2, 2)}
    assert {model.backbone.res5[i].conv2.stride for i in range(3)} == {(1, 1)}
    head = model.sem_seg_head
    assert head.conv1.dilation == head.conv2.dilation == head.conv1.padding == (6, 6)
    assert head.ignore_value == 255
    shapes = {name: tuple(p.shape) for name, p in head.named_parameters()}
    assert shapes == {
        "conv1.weight": (256, 2048, 3, 3),
        "conv1.norm.weight": (256,),
        "conv1.norm.bias": (256,),
        "conv2.weight": (256, 256, 3, 3),
        "conv2.norm.weight": (256,),
        "conv2.norm.bias": (256,),
        "predictor.weight": (CLASSES, 256, 1, 1),
        "predictor.bias": (CLASSES,),
    }


@torch.no_grad()
def test_a_forward_is_that_of_the_same_layers_from_torch():
    model = segmentor().eval()
    image = torch.randint(0, 256, (3, 49, 65), dtype=torch.uint8)
    mean, std = (
        torch.tensor(values)[:, None, None]
        for values in ([123.675, 116.28, 103.53], [58.395, 57.12, 57.375])
    )
    reference = torchvision_fcn(model.state_dict()).eval()((image - mean)[None] / std)
    assert reference.shape == (1, CLASSES, 4, 5)
    (output,) = model([{"image": image}])
    assert output["sem_seg"].shape == (CLASSES, 49, 65)  # the picture's own size
    expected = reference[0]
    # 49 = 16 * 3 + 1 and 65 = 16 * 4 + 1: every 16th pixel is a value of the feature map.
    torch.testing.assert_close(output["sem_seg"][:, ::16, ::16], expected, rtol=1e-4, atol=1e-4)
    between = (expected[:, 1, 2] * 12 + expected[:, 1, 3] * 4) / 16
    torch.testing.assert_close(output["sem_seg"][:, 16, 36], between, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("size", [(47, 83), (64, 32), (33, 1)])
def test_pictures_of_any_size_are_segmented_at_that_size(size):
    image = torch.zeros((3, *size), dtype=torch.uint8)
    (output,) = segmentor().eval()([{"image": image, "height": size[0], "width": size[1]}])
    assert output["sem_seg"].shape == (CLASSES, *size)


def test_upsampling_puts_values_at_multiples_of_the_stride():
    ramp = 16.0 * torch.arange(4).reshape(1, 1, 1, 4).expand(1, 1, 3, 4)  # its own pixel column
    up = upsample(ramp, 16)
    assert up.shape == (1, 1, 48, 64)
    expected = np.minimum(np.arange(64), 48)  # to the right of the last value it is repeated
    np.testing.assert_allclose(up[0, 0].numpy(), np.tile(expected, (48, 1)), atol=1e-4)


def head_and_features(norm=""):
    torch.manual_seed(1)
    head = FCNHead({"res5": ShapeSpec(channels=6, stride=4)}, num_classes=3, conv_dims=5, norm=norm)
    return head.train(), {"res5": torch.randn(2, 6, 3, 3)}


def test_the_loss_is_the_mean_over_pixels_that_count():
    head, features = head_and_features()
    targets = torch.randint(0, 3, (2, 9, 11))
    targets[0, :, 7:] = targets[1, 4:] = 255
    nothing, losses = head(features, targets)
    assert nothing is None and set(losses) == {"loss_sem_seg"}
    logits = head.eval()(features)[0].detach().double().numpy()[:, :, :9, :11]
    log_likelihood = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    labels = targets.numpy()
    picked = np.take_along_axis(log_likelihood, np.minimum(labels, 2)[:, None], axis=1)[:, 0]
    assert losses["loss_sem_seg"].item() == pytest.approx(-picked[labels != 255].mean(), rel=1e-5)
    # Training starts from a guess.
    assert losses["loss_sem_seg"].item() == pytest.approx(np.log(3), abs=0.1)


def test_a_crop_in_which_no_pixel_counts_teaches_nothing():
    head, features = head_and_features()
    _, losses = head(features, torch.full((2, 12, 12), 255))
    losses["loss_sem_seg"].backward()
    assert losses["loss_sem_seg"].item() == 0
    assert all(not p.grad.any() for p in head.parameters())


def test_exactly_one_feature_map_is_taken():
    maps = {name: ShapeSpec(channels=4, stride=16) for name in ("res4", "res5")}
    for shapes in (maps, {}):
        with pytest.raises(ValueError, match=f"names {len(shapes)} of the backbone's: set it to"):
            FCNHead(shapes, num_classes=3)
