"""MoCo on an encoder small enough to write down again, in float64 NumPy."""

import numpy as np
import torch
from support import TinyBackbone, random_views
from torch import nn

from moco_d2.modeling.batch_norm import BatchNormGroups
from moco_d2.modeling.dictionary import KeyQueue
from moco_d2.modeling.encoder import Encoder
from moco_d2.modeling.moco import MoCo

MEAN, STD = [120.0, 110.0, 100.0], [60.0, 50.0, 40.0]


def make_moco(
    group=4, shuffle=True, dictionary=None, temperature=0.2, seed=0, symmetric=False, forwards=1
):
    torch.manual_seed(seed)
    groups = BatchNormGroups(group, parts=forwards)
    return MoCo(
        encoder=Encoder(TinyBackbone(), "out", nn.Linear(8, 6), groups),
        dictionary=dictionary or KeyQueue(20, 6, seed),
        temperature=temperature,
        shuffle=shuffle,
        seed=seed,
        pixel_mean=MEAN,
        pixel_std=STD,
        symmetric=symmetric,
    ).double()


def make_batch(n=16, iteration=3, seed=1):
    return {
        "views": random_views(n, 12, seed),
        "position": torch.arange(iteration * n, (iteration + 1) * n),
    }


class Reference:
    """The tiny encoder and one step of Algorithm 1 in NumPy float64."""

    def __init__(self, encoder):
        self.p = {k: v.detach().numpy().copy() for k, v in encoder.named_parameters()}

    def conv(self, x, weight, stride):
        n, _, h, w = x.shape
        x = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
        out = np.zeros((n, len(weight), (h + stride - 1) // stride, (w + stride - 1) // stride))
        for i in range(out.shape[2]):
            for j in range(out.shape[3]):
                patch = x[:, :, i * stride : i * stride + 3, j * stride : j * stride + 3]
                out[:, :, i, j] = np.einsum("nchw,ochw->no", patch, weight)
        return out

    def norm(self, x, weight, bias, group):
        y = np.empty_like(x)
        for start in range(0, len(x), group):
            part = x[start : start + group]
            mean, var = part.mean((0, 2, 3), keepdims=True), part.var((0, 2, 3), keepdims=True)
            y[start : start + group] = (part - mean) / np.sqrt(var + 1e-5)
        return y * weight[:, None, None] + bias[:, None, None]

    def encode(self, images, group):
        x = (images.numpy() - np.reshape(MEAN, (3, 1, 1))) / np.reshape(STD, (3, 1, 1))
        for i, stride in ((1, 2), (2, 1)):
            x = self.conv(x, self.p[f"backbone.conv{i}.weight"], stride)
            x = self.norm(
                x, self.p[f"backbone.norm{i}.weight"], self.p[f"backbone.norm{i}.bias"], group
            )
            x = np.maximum(x, 0)
        z = x.mean((2, 3)) @ self.p["head.weight"].T + self.p["head.bias"]
        return z / np.linalg.norm(z, axis=1, keepdims=True)
