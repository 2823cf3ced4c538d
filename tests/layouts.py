"""Weight files as other projects save them, with torchvision's and timm's networks inside."""

import functools
import pickle
import re
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import timm
import torch
import torchvision
from torch import nn
from torchvision.transforms.functional import normalize
from weights import moco_checkpoint, randomise_norms_

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
Tensors = dict[str, torch.Tensor]


@functools.cache
def states(name: str) -> tuple[Tensors, Tensors]:
    """The state dicts of two different torchvision networks of one kind."""
    build = getattr(torchvision.models, name)
    return tuple(randomise_norms_(build(weights=None)).state_dict() for _ in range(2))


def prefixed(prefix: str, state: Tensors) -> Tensors:
    return {prefix + name: tensor for name, tensor in state.items()}


def body(state: Tensors) -> Tensors:
    return {name: tensor for name, tensor in state.items() if not name.startswith("fc.")}


def layers(*names: str) -> Tensors:
    """Tensors that are no part of a backbone."""
    return {name: torch.rand(4, 4) for name in names}


def positions(state: Tensors) -> Tensors:
    """The names of `nn.Sequential(*list(resnet.children())[:-1])`."""
    number = {"conv1": "0", "bn1": "1", **{f"layer{i}": f"{i + 3}" for i in range(1, 5)}}
    renamed = {}
    for name, tensor in body(state).items():
        first, _, rest = name.partition(".")
        renamed[f"{number[first]}.{rest}"] = tensor
    return renamed


def caffe2(state: Tensors) -> Tensors:
    """Caffe2's names; its norms are a scale and a shift, and its stem has a bias."""
    blobs = {"conv1_b": torch.zeros(64), "fc1000_w": torch.rand(4, 4), "fc1000_b": torch.rand(4)}
    stem = {"conv1.weight": "conv1_w", "bn1.weight": "res_conv1_bn_s", "bn1.bias": "res_conv1_bn_b"}
    pattern = r"layer(\d)\.(\d+)\.(conv|bn|downsample\.)(\d)\.(weight|bias)"
    for name, tensor in state.items():
        if match := re.fullmatch(pattern, name):
            layer, block, kind, number, leaf = match.groups()
            norm = kind == "bn" or (kind, number) == ("downsample.", "1")
            branch = "1" if kind == "downsample." else "2" + "abc"[int(number) - 1]
            leaf = {"weight": "bn_s", "bias": "bn_b"}[leaf] if norm else "w"
            blobs[f"res{int(layer) + 1}_{block}_branch{branch}_{leaf}"] = tensor
        elif name in stem:
            blobs[stem[name]] = tensor
    return blobs


@dataclass(frozen=True)
class Sample:
    """A file of one format.

    Attributes:
        format: key of `table.FORMATS`.
        content: (state dict of one torchvision network, of another) -> what is saved.
        file: its name. `.pkl` holds NumPy arrays.
        arch: torchvision's name of the networks.
        mean, std: what images on the 0-1 scale are normalised with, in the order of `channels`.
        stride_in_1x1: whether the strides are moved to the first convolutions.
        exported: which of the two networks is exported by default.
        unsafe: the project saves more than tensors and plain Python.
    """

    format: str
    content: Callable[[Tensors, Tensors], Any]
    file: str = "checkpoint.pth"
    arch: str = "resnet18"
    mean: tuple[float, ...] = IMAGENET[0]
    std: tuple[float, ...] = IMAGENET[1]
    channels: str = "RGB"
    stride_in_1x1: bool = False
    exported: int = 0
    unsafe: bool = False

    def save(self, folder: Path) -> Path:
        content = self.content(*states(self.arch))
        path = folder / self.file
        if self.file.endswith(".pkl"):
            path.write_bytes(pickle.dumps({n: t.numpy() for n, t in content.items()}, protocol=2))
        elif self.file.endswith(".safetensors"):
            safetensors.torch.save_file(content, path)
        else:
            torch.save(content, path)
        return path

    @torch.no_grad()
    def features(self, images: torch.Tensor) -> torch.Tensor:
        """What the network gave its project for uint8 RGB images: features of the last stage."""
        net = getattr(torchvision.models, self.arch)(weights=None)
        net.load_state_dict(states(self.arch)[self.exported])
        for name, module in net.named_modules():
            if self.format == "caffe2" and isinstance(module, nn.BatchNorm2d):
                module.running_mean.zero_()
                module.running_var.fill_(1 - module.eps)
            if self.stride_in_1x1 and re.fullmatch(r"layer[234]\.0", name):
                module.conv1.stride, module.conv2.stride = module.conv2.stride, module.conv1.stride
        x = images if self.channels == "RGB" else images.flip(1)
        x = normalize(x.double() / 255, self.mean, self.std)
        last: list[torch.Tensor] = []
        net.layer4.register_forward_hook(lambda module, inputs, output: last.append(output))
        net.double().eval()(x)
        return last[0]


def detectron2_names(state: Tensors) -> Tensors:
    """detectron2's names for a torchvision network."""
    names = {f"layer{i}.": f"res{i + 1}." for i in range(1, 5)}
    renamed = {}
    for name, tensor in body(state).items():
        stem = "" if name.startswith("layer") else "stem."
        for old, new in names.items():
            name = name.replace(old, new)
        name = re.sub(r"downsample\.0", "shortcut", name)
        name = re.sub(r"downsample\.1", "shortcut.norm", name)
        renamed[stem + re.sub(r"bn(\d)", r"conv\1.norm", name)] = tensor
    return renamed


def _recipe(meta_architecture: str) -> dict:
    return {**moco_checkpoint(18)["recipe"], "meta_architecture": meta_architecture}


def _moco_d2(q: Tensors, k: Tensors) -> dict:
    state = prefixed("module.encoder_q.backbone.", detectron2_names(q))
    state |= prefixed("module.encoder_k.backbone.", detectron2_names(k))
    state |= layers("module.encoder_q.head.0.weight", "module.encoder_k.head.0.weight")
    state |= layers("module.dictionary.keys")
    return {"model": state, "iteration": 9, "recipe": _recipe("MoCo")}


def _moco_d2_v3(q: Tensors, k: Tensors) -> dict:
    state = prefixed("encoder_q.backbone.", detectron2_names(q))
    state |= prefixed("encoder_k.backbone.", detectron2_names(k))
    state |= layers("encoder_q.head.0.weight", "encoder_k.head.0.weight", "predictor.0.weight")
    return {"model": state, "iteration": 9, "recipe": _recipe("MoCoV3")}


def _classifier(q: Tensors, k: Tensors) -> dict:
    state = prefixed("backbone.", detectron2_names(q)) | layers(
        "classifier.weight", "classifier.bias"
    )
    return {"model": state, "iteration": 9, "recipe": _recipe("ImageClassifier")}


def _moco(q: Tensors, k: Tensors) -> dict:
    state = prefixed("module.encoder_q.", body(q)) | prefixed("module.encoder_k.", body(k))
    for name in ("fc.0.weight", "fc.0.bias", "fc.2.weight", "fc.2.bias"):
        state |= layers(f"module.encoder_q.{name}", f"module.encoder_k.{name}")
    state |= layers("module.queue", "module.queue_ptr")
    return {"epoch": 200, "arch": "resnet18", "state_dict": state, "optimizer": {"state": {}}}


def _moco_v3(q: Tensors, k: Tensors) -> dict:
    state = prefixed("module.base_encoder.", body(q))
    state |= prefixed("module.momentum_encoder.", body(k))
    state |= layers("module.base_encoder.fc.0.weight", "module.base_encoder.fc.1.running_mean")
    state |= layers("module.momentum_encoder.fc.0.weight", "module.predictor.0.weight")
    return {"epoch": 300, "arch": "resnet18", "state_dict": state, "scaler": {"scale": 65536.0}}


def _simsiam(q: Tensors, k: Tensors) -> dict:
    state = prefixed("module.encoder.", body(q))
    state |= layers("module.encoder.fc.0.weight", "module.encoder.fc.6.bias")
    state |= layers("module.predictor.0.weight", "module.predictor.3.bias")
    return {"epoch": 100, "arch": "resnet18", "state_dict": state, "optimizer": {}}


def _swav(q: Tensors, k: Tensors) -> dict:
    state = prefixed("module.", body(q)) | layers("module.projection_head.0.weight")
    return state | layers("module.projection_head.3.bias", "module.prototypes.weight")


def _byol(q: Tensors, k: Tensors) -> dict:
    heads = layers("projetion.net.0.weight", "projetion.net.1.running_mean")
    return {
        "online_network_state_dict": prefixed("encoder.", positions(q)) | heads,
        "target_network_state_dict": prefixed("encoder.", positions(k)) | heads,
        "optimizer_state_dict": {"state": {}, "param_groups": []},
    }


def _byol_pytorch(q: Tensors, k: Tensors) -> dict:
    state = prefixed("net.", q) | prefixed("online_encoder.net.", q)
    state |= prefixed("target_encoder.net.", k)
    return state | layers("online_encoder.projector.0.weight", "online_predictor.0.weight")


def _dino(q: Tensors, k: Tensors) -> dict:
    student = prefixed("module.backbone.", body(q)) | layers("module.head.mlp.0.weight")
    teacher = prefixed("backbone.", body(k)) | layers("head.last_layer.weight_g")
    loss = {"center": torch.rand(1, 4)}
    arguments = Namespace(arch="resnet18")
    return {"student": student, "teacher": teacher, "epoch": 9, "args": arguments, "l": loss}


def _barlowtwins(q: Tensors, k: Tensors) -> dict:
    state = prefixed("module.backbone.", body(q)) | layers("module.projector.0.weight")
    state |= layers("module.bn.running_mean", "module.bn.running_var")
    return {"epoch": 1000, "model": state, "optimizer": {}}


def _vissl(q: Tensors, k: Tensors) -> dict:
    trunk = prefixed("_feature_blocks.", body(q))
    model = {"trunk": trunk, "heads": layers("0.clf.0.weight", "0.clf.0.bias")}
    loss = layers("queue", "queue_ptr")
    return {"classy_state_dict": {"base_model": {"model": model}, "loss": loss}, "iteration": 5}


def _vissl_trunk(q: Tensors, k: Tensors) -> dict:
    return {"model_state_dict": prefixed("_feature_blocks.", body(q))}


def _mmselfsup(q: Tensors, k: Tensors) -> dict:
    state = prefixed("backbone.", body(q)) | prefixed("encoder_k.module.0.", body(k))
    state |= layers("neck.mlp.0.weight", "encoder_k.module.1.mlp.0.weight", "encoder_k.steps")
    return {"meta": {"epoch": 200}, "state_dict": state | layers("queue", "queue_ptr")}


def _mm_byol(q: Tensors, k: Tensors) -> dict:
    state = prefixed("backbone.", body(q)) | prefixed("target_net.module.0.", body(k))
    state |= layers("neck.fc0.weight", "target_net.module.1.fc0.weight", "target_net.steps")
    return {"meta": {}, "state_dict": state | layers("head.predictor.fc0.weight")}


def _openselfsup(q: Tensors, k: Tensors) -> dict:
    state = prefixed("encoder_q.0.", body(q)) | prefixed("encoder_k.0.", body(k))
    state |= prefixed("backbone.", body(q)) | layers("encoder_q.1.mlp.0.weight", "queue")
    state |= layers("encoder_k.1.mlp.0.weight", "neck.mlp.0.weight", "queue_ptr")
    return {"meta": {"epoch": 200}, "state_dict": state}


def _densecl(q: Tensors, k: Tensors) -> dict:
    content = _openselfsup(q, k)
    content["state_dict"] |= layers("encoder_q.1.mlp2.0.weight", "queue2", "queue2_ptr")
    return content


def _mmpretrain(q: Tensors, k: Tensors) -> dict:
    state = prefixed("backbone.", body(q)) | layers("head.fc.weight", "head.fc.bias")
    return {"meta": {}, "state_dict": state}


def _lightly(q: Tensors, k: Tensors) -> dict:
    state = prefixed("backbone.", positions(q)) | prefixed("backbone_momentum.", positions(k))
    state |= layers("projection_head.layers.0.weight")
    return state | layers("projection_head_momentum.layers.0.weight")


def _lightly_benchmark(q: Tensors, k: Tensors) -> dict:
    state = prefixed("backbone.", body(q)) | prefixed("key_backbone.", body(k))
    state |= layers("projection_head.layers.0.weight", "key_projection_head.layers.0.weight")
    state |= layers("criterion.memory_bank.bank", "online_classifier.linear.weight")
    return {"epoch": 99, "global_step": 50, "state_dict": state}


def _lightly_dino(q: Tensors, k: Tensors) -> dict:
    state = prefixed("backbone.", body(q)) | prefixed("student_backbone.", body(k))
    state |= layers("projection_head.layers.0.weight", "student_projection_head.layers.0.weight")
    return {"epoch": 99, "state_dict": state | layers("criterion.center")}


def _solo(q: Tensors, k: Tensors) -> dict:
    state = prefixed("backbone.", body(q)) | prefixed("momentum_backbone.", body(k))
    state |= layers("classifier.weight", "classifier.bias", "projector.0.weight", "queue")
    state |= layers("momentum_projector.0.weight", "predictor.0.weight", "queue_ptr")
    return {"epoch": 400, "global_step": 50, "state_dict": state}


def _pixpro(q: Tensors, k: Tensors) -> dict:
    state = prefixed("module.encoder.", body(q)) | prefixed("module.encoder_k.", body(k))
    for name in ("projector", "projector_k"):
        state |= layers(f"module.{name}.linear1.weight")
    state |= layers("module.value_transform.weight")
    return {"opt": Namespace(amp_opt_level="O1"), "model": state, "epoch": 100}


def _pycontrast(q: Tensors, k: Tensors) -> dict:
    return {
        "model": prefixed("module.encoder.", body(q)) | layers("module.head.0.weight"),
        "model_ema": prefixed("encoder.", body(k)) | layers("head.0.weight"),
        "contrast": {"memory": torch.rand(4, 4)},
        "epoch": 200,
    }


def _timm(q: Tensors, k: Tensors) -> dict:
    return {"arch": "resnet18", "state_dict": q, "state_dict_ema": k, "epoch": 3}


def _detectron2_file(q: Tensors, k: Tensors) -> dict:
    convention = {"format": "RGB", "stride_in_1x1": False}
    for key, values in zip(("pixel_mean", "pixel_std"), IMAGENET, strict=True):
        convention[key] = [255 * v for v in values]
    return {"model": detectron2_names(q), "input": convention, "matching_heuristics": True}


BGR = {"channels": "BGR", "mean": (103.53 / 255, 116.28 / 255, 123.675 / 255)}
SAMPLES = {
    "moco_d2": Sample("moco_d2", _moco_d2),
    "moco_d2 v3": Sample("moco_d2", _moco_d2_v3),
    "moco_d2_classifier": Sample("moco_d2_classifier", _classifier),
    "moco": Sample("moco", _moco, "moco_v2_200ep_pretrain.pth.tar"),
    "moco R-50": Sample("moco", _moco, "moco_v2_200ep_pretrain.pth.tar", "resnet50"),
    "moco_v3": Sample("moco_v3", _moco_v3, "r-50-300ep.pth.tar"),
    "simsiam": Sample("simsiam", _simsiam, "checkpoint_0099.pth.tar"),
    "swav": Sample("swav", _swav, "swav.pth.tar", std=(0.228, 0.224, 0.225)),
    "byol": Sample("byol", _byol, "model.pth", mean=(0.0,) * 3, std=(1.0,) * 3),
    "byol_pytorch": Sample("byol_pytorch", _byol_pytorch, "learner.pt"),
    "dino": Sample("dino", _dino, exported=1, unsafe=True),
    "barlowtwins": Sample("barlowtwins", _barlowtwins),
    "vissl": Sample("vissl", _vissl, "model_final_checkpoint_phase199.torch"),
    "vissl trunk": Sample("vissl", _vissl_trunk, "rn50.torch"),
    "mmselfsup": Sample("mmselfsup", _mmselfsup, "epoch_200.pth"),
    "mmselfsup byol": Sample("mmselfsup", _mm_byol, "epoch_200.pth"),
    "openselfsup": Sample("openselfsup", _openselfsup, "epoch_200.pth"),
    "densecl": Sample("densecl", _densecl, "epoch_200.pth"),
    "mmpretrain": Sample("mmpretrain", _mmpretrain, "resnet18.pth"),
    "lightly": Sample("lightly", _lightly),
    "lightly benchmark": Sample("lightly", _lightly_benchmark, "epoch=99.ckpt"),
    "lightly dino": Sample("lightly", _lightly_dino, "epoch=99.ckpt"),
    "solo": Sample("solo", _solo, "mocov2plus.ckpt"),
    "pixpro": Sample("pixpro", _pixpro, "ckpt_epoch_100.pth", unsafe=True),
    "pycontrast": Sample("pycontrast", _pycontrast, "InfoMin_200.pth"),
    "torchvision": Sample("torchvision", lambda q, k: q, "resnet34.pth", "resnet34"),
    "torchvision, backbone only": Sample("torchvision", lambda q, k: body(q), "resnet50.pth"),
    "torchvision ResNeXt": Sample("torchvision", lambda q, k: q, arch="resnext50_32x4d"),
    "torchvision wide": Sample("torchvision", lambda q, k: q, arch="wide_resnet50_2"),
    "timm": Sample("timm", _timm, "checkpoint-3.pth.tar"),
    "timm, safetensors": Sample("timm", lambda q, k: q, "model.safetensors"),
    "detectron2": Sample("detectron2", _detectron2_file, "backbone.pth"),
    "caffe2": Sample(
        "caffe2",
        lambda q, k: caffe2(q),
        "R-50.pkl",
        "resnet50",
        std=(1 / 255,) * 3,
        stride_in_1x1=True,
        **BGR,
    ),
    "caffe2 ResNeXt": Sample(
        "caffe2",
        lambda q, k: caffe2(q),
        "X-101-32x8d.pkl",
        "resnext50_32x4d",
        std=(57.375 / 255, 57.12 / 255, 58.395 / 255),
        **BGR,
    ),
}


def vit(number: int, channels: int = 384, heads: int = 12, class_token: bool = True) -> nn.Module:
    """A small timm ViT for images of 48 pixels, all of whose tensors are random."""
    torch.manual_seed(number)
    net = timm.models.vision_transformer.VisionTransformer(
        img_size=48,
        patch_size=16,
        embed_dim=channels,
        depth=2,
        num_heads=heads,
        class_token=class_token,
        global_pool="token" if class_token else "avg",
        fc_norm=False,
        num_classes=0,
        norm_layer=functools.partial(nn.LayerNorm, eps=1e-6),
    )
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.1)
    return net.eval()


@torch.no_grad()
def vit_features(net: nn.Module, images: torch.Tensor, mean, std) -> torch.Tensor:
    """The patch tokens behind the blocks, without a class token: (N, C, 3, 3)."""
    x = normalize(images.double() / 255, mean, std)
    net = net.double()
    tokens = net.patch_embed(x) + net.pos_embed[:, -9:]
    for block in net.blocks:
        tokens = block(tokens)
    return tokens.transpose(1, 2).unflatten(2, (3, 3))


def mm_vit(state: Tensors) -> Tensors:
    """mmpretrain's names for a timm ViT."""
    renamed = {}
    for name, tensor in state.items():
        name = name.replace("patch_embed.proj.", "patch_embed.projection.")
        name = name.replace(".mlp.fc1.", ".ffn.layers.0.0.").replace(".mlp.fc2.", ".ffn.layers.1.")
        name = re.sub(r"^blocks\.(\d+)\.norm", r"layers.\1.ln", name)
        name = re.sub(r"^blocks\.", "layers.", name)
        renamed[re.sub(r"^norm\.", "ln1.", name)] = tensor
    return renamed


def _moco_v3_vit(q: Tensors, k: Tensors) -> dict:
    state = prefixed("module.base_encoder.", q) | prefixed("module.momentum_encoder.", k)
    state |= layers("module.base_encoder.head.0.weight", "module.momentum_encoder.head.0.weight")
    return {
        "epoch": 300,
        "arch": "vit_small",
        "state_dict": state | layers("module.predictor.0.weight"),
    }


def _dino_vit(q: Tensors, k: Tensors) -> dict:
    student = prefixed("module.backbone.", q) | layers("module.head.mlp.0.weight")
    teacher = prefixed("backbone.", k) | layers("head.last_layer.weight_g")
    return {"student": student, "teacher": teacher, "epoch": 9, "args": Namespace(arch="vit_small")}


def _mmselfsup_vit(q: Tensors, k: Tensors) -> dict:
    state = prefixed("backbone.", mm_vit(q)) | layers(
        "neck.fc0.weight", "head.predictor.fc0.weight"
    )
    state |= prefixed("momentum_encoder.module.0.", mm_vit(k))
    return {"state_dict": state | layers("momentum_encoder.module.1.fc0.weight")}


def _solo_vit(q: Tensors, k: Tensors) -> dict:
    state = prefixed("backbone.", q) | prefixed("momentum_backbone.", k)
    state |= layers("classifier.weight", "projector.0.weight", "momentum_projector.0.weight")
    return {"epoch": 400, "state_dict": state | layers("predictor.0.weight")}


def _mmpretrain_vit(q: Tensors, k: Tensors) -> dict:
    return {"state_dict": prefixed("backbone.", mm_vit(q)) | layers("head.layers.head.weight")}


def _torchvision_vit(q: Tensors, k: Tensors) -> Tensors:
    fixed = {
        "cls_token": "class_token",
        "pos_embed": "encoder.pos_embedding",
        "patch_embed.proj.weight": "conv_proj.weight",
        "patch_embed.proj.bias": "conv_proj.bias",
        "norm.weight": "encoder.ln.weight",
        "norm.bias": "encoder.ln.bias",
    }
    parts = {"norm1": "ln_1", "norm2": "ln_2", "attn.proj": "self_attention.out_proj"}
    parts |= {"mlp.fc1": "mlp.0", "mlp.fc2": "mlp.3"}
    state = layers("heads.head.weight", "heads.head.bias")
    for name, tensor in q.items():
        if name in fixed:
            state[fixed[name]] = tensor
            continue
        _, block, part = name.split(".", 2)
        part, _, leaf = part.rpartition(".")
        new = (
            f"self_attention.in_proj_{leaf}" if part == "attn.qkv" else f"{parts.get(part)}.{leaf}"
        )
        state[f"encoder.layers.encoder_layer_{block}.{new}"] = tensor
    return state


HALF = ((0.5,) * 3, (0.5,) * 3)
# Format -> content, number of the network that is exported, its channels and heads, mean and std,
# and what has to be stated of it.
STATED_HALF = {"format": "RGB", "pixel_mean": [127.5] * 3, "pixel_std": [127.5] * 3}
VIT_SAMPLES = {
    "moco_v3_vit": (_moco_v3_vit, 0, 384, 12, IMAGENET, {}),
    "dino_vit": (_dino_vit, 1, 384, 6, IMAGENET, {"unsafe_pickle": True}),
    "mmselfsup_vit": (_mmselfsup_vit, 0, 384, 12, IMAGENET, {}),
    "mmpretrain_vit": (_mmpretrain_vit, 0, 768, 12, HALF, {"convention": STATED_HALF}),
    "solo_vit": (_solo_vit, 0, 384, 6, IMAGENET, {"num_heads": 6}),
    "torchvision_vit": (_torchvision_vit, 0, 768, 12, IMAGENET, {}),
    "timm_vit": (lambda q, k: q, 0, 384, 6, HALF, {"convention": STATED_HALF}),
}


@functools.cache
def vits(channels: int, heads: int) -> tuple[nn.Module, nn.Module]:
    return vit(0, channels, heads), vit(1, channels, heads)


def save_vit(name: str, folder: Path) -> Path:
    """Write the sample of a format, as its project does."""
    content, _, channels, heads, _, _ = VIT_SAMPLES[name]
    path = folder / f"{name}.pth"
    torch.save(content(*(net.float().state_dict() for net in vits(channels, heads))), path)
    return path
