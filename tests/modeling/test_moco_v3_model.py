"""MoCo v3 as a whole: the step of Algorithm 1 in float64, heads, and where gradients go."""

import numpy as np
import pytest
import torch
from detectron2.layers import ShapeSpec
from detectron2.modeling import Backbone, build_model
from support import random_views, tiny_pretrain_config
from torch import nn

from moco_d2.modeling.batch_norm import BatchNormGroups, GroupedBatchNorm1d
from moco_d2.modeling.encoder import Encoder
from moco_d2.modeling.heads import build_predictor, build_projection_head
from moco_d2.modeling.moco_v3 import MoCoV3

MEAN, STD, N = [120.0, 110.0, 100.0], [60.0, 50.0, 40.0], 12


class PixelBackbone(Backbone):
    """A linear map of each pixel and a ReLU: short enough to write down again."""

    def __init__(self, channels: int = 6):
        super().__init__()
        self.conv = nn.Conv2d(3, channels, 1, bias=False)
        self.channels = channels

    def forward(self, x):
        return {"out": torch.relu(self.conv(x))}

    def output_shape(self):
        return {"out": ShapeSpec(channels=self.channels, stride=1)}


def make_model(group=0, layers=2, last_norm=False, temperature=0.5, parts=1):
    torch.manual_seed(0)
    head = build_projection_head("mlp_bn", 6, 10, 4, layers)
    encoder = Encoder(PixelBackbone(), "out", head, BatchNormGroups(group, parts=2 * parts))
    return MoCoV3(
        encoder=encoder,
        predictor=build_predictor(4, 10, last_norm),
        temperature=temperature,
        pixel_mean=MEAN,
        pixel_std=STD,
    ).double()


def make_batch(seed=1):
    return {"views": random_views(N, 5, seed)}


def parameters(model):
    return {name: p.detach().numpy().copy() for name, p in model.named_parameters()}


class Reference:
    """The loss of a step in NumPy float64: MoCo v3, Algorithm 1 and App. A."""

    def __init__(self, model, group, layers, last_norm):
        self.group, self.layers, self.last_norm = group or N, layers, last_norm
        self.temperature = model.temperature

    def norm(self, x, weight=1.0, bias=0.0):
        y = np.empty_like(x)
        for start in range(0, len(x), self.group):
            part = x[start : start + self.group]
            y[start : start + self.group] = (part - part.mean(0)) / np.sqrt(part.var(0) + 1e-5)
        return y * weight + bias

    def mlp(self, x, p, name, layers, last_norm):
        for layer in range(layers):  # of nn.Sequential: linear, norm, ReLU, linear, ...
            x = x @ p[f"{name}.{3 * layer}.weight"].T
            if layer < layers - 1:
                bn = f"{name}.{3 * layer + 1}"
                x = np.maximum(self.norm(x, p[f"{bn}.weight"], p[f"{bn}.bias"]), 0)
        return self.norm(x) if last_norm else x

    def encode(self, images, p, encoder):
        x = (images.numpy() - np.reshape(MEAN, (3, 1, 1))) / np.reshape(STD, (3, 1, 1))
        kernel = p[f"{encoder}.backbone.conv.weight"][:, :, 0, 0]
        x = np.maximum(np.einsum("nchw,oc->nohw", x, kernel), 0).mean((2, 3))
        return self.mlp(x, p, f"{encoder}.head", self.layers, True)

    def keys(self, views, p):
        return [unit(self.encode(x, p, "encoder_k")) for x in views]

    def loss(self, views, p, keys):
        total = 0.0
        for x, k in zip(views, keys[::-1], strict=True):
            q = self.encode(x, p, "encoder_q")
            q = unit(self.mlp(q, p, "predictor", 2, self.last_norm))
            total += 2 * self.temperature * cross_entropy_of_the_diagonal(q @ k.T, self.temperature)
        return total


def unit(x):
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def cross_entropy_of_the_diagonal(similarity, temperature):
    logits = similarity / temperature
    return (np.log(np.exp(logits).sum(1)) - np.diag(logits)).mean()


@pytest.mark.parametrize(
    ("group", "layers", "last_norm"), [(0, 2, False), (0, 3, True), (4, 2, False)]
)
def test_two_steps_equal_algorithm_1_in_float64(group, layers, last_norm):
    """Loss, its gradient by differences of the reference's loss, and the key encoder's update."""
    model = make_model(group, layers, last_norm).train()
    for p in model.encoder_k.parameters():  # as in the middle of a run
        p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(5)))
    reference = Reference(model, group, layers, last_norm)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.5)
    rng = np.random.default_rng(3)
    for seed in (1, 2):
        batch, before = make_batch(seed), parameters(model)
        keys = reference.keys(batch["views"], before)
        loss = model(batch)["loss_contrastive"]
        expected = reference.loss(batch["views"], before, keys)
        np.testing.assert_allclose(loss.item(), expected, rtol=1e-10)
        optimizer.zero_grad()
        loss.backward()
        for name, p in model.named_parameters():
            if name.startswith("encoder_k."):
                continue
            step = 1e-6 * rng.standard_normal(p.shape)
            up, down = ({**before, name: before[name] + s * step} for s in (1, -1))
            views = batch["views"]
            change = reference.loss(views, up, keys) - reference.loss(views, down, keys)
            np.testing.assert_allclose(
                2 * (p.grad.numpy() * step).sum(), change, rtol=1e-4, atol=1e-11, err_msg=name
            )
        optimizer.step()
        moved = parameters(model)
        model.finish_step(0.9)
        for name, value in parameters(model).items():
            expected = moved[name]
            if name.startswith("encoder_k."):
                query = moved[name.replace("encoder_k.", "encoder_q.")]
                expected = 0.9 * before[name] + 0.1 * query
            np.testing.assert_allclose(value, expected, rtol=1e-12, atol=1e-15)


def test_a_part_finds_its_own_keys_in_the_batch():
    """Queries 4 to 6 of a batch of 9 against all of its keys."""
    rng = np.random.default_rng(0)
    model = make_model(temperature=0.2)
    q, keys = rng.standard_normal((3, 5)), unit(rng.standard_normal((9, 5)))
    logits = unit(q) @ keys.T / 0.2
    own = logits[np.arange(3), [4, 5, 6]]
    expected = 2 * 0.2 * (np.log(np.exp(logits).sum(1)) - own).mean()
    loss = model.contrastive_loss(torch.from_numpy(q), torch.from_numpy(keys), slice(4, 7))
    np.testing.assert_allclose(loss.item(), expected, rtol=1e-12)


def test_parts_of_a_step_have_its_loss_gradients_and_running_statistics():
    whole, parted = make_model(group=4).train(), make_model(group=4, parts=3).train()
    whole(make_batch())["loss_contrastive"].backward()
    for part in parted.split_step(make_batch(), 3):
        (parted(part)["loss_contrastive"] / 3).backward()
    expected = dict(whole.named_parameters())
    for name, p in parted.named_parameters():
        if p.requires_grad:
            np.testing.assert_allclose(p.grad, expected[name].grad, rtol=1e-9, atol=1e-12)
    buffers = dict(whole.named_buffers())
    moved = [name for name in buffers if name.endswith("running_mean")]
    assert {name.split(".")[0] for name in moved} == {"encoder_q", "encoder_k", "predictor"}
    for name, buffer in parted.named_buffers():
        np.testing.assert_allclose(buffer, buffers[name], rtol=1e-9, err_msg=name)
    assert int(buffers["encoder_q.head.1.num_batches_tracked"]) == 1


def test_running_statistics_move_once_per_step_towards_the_mean_over_both_views():
    model = make_model().train()
    hidden = []
    model.encoder_q.head[0].register_forward_hook(lambda module, args, y: hidden.append(y.detach()))
    model(make_batch())
    assert len(hidden) == 2
    mean = torch.stack([y.mean(0) for y in hidden]).mean(0)
    torch.testing.assert_close(model.encoder_q.head[1].running_mean, 0.1 * mean)


@pytest.mark.parametrize(
    ("layers", "last_norm", "projector", "predictor"),
    [
        (2, False, ["Linear", "BN", "ReLU", "Linear", "BN"], ["Linear", "BN", "ReLU", "Linear"]),
        (
            3,
            True,
            ["Linear", "BN", "ReLU", "Linear", "BN", "ReLU", "Linear", "BN"],
            ["Linear", "BN", "ReLU", "Linear", "BN"],
        ),
    ],
)
def test_heads_have_the_layers_of_the_official_code(layers, last_norm, projector, predictor):
    """MoCo_ResNet and MoCo_ViT of facebookresearch/moco-v3: 4096 wide, 256 at the end, no biases,
    and at the end a norm without scale and shift."""
    cfg = tiny_pretrain_config(
        MODEL__META_ARCHITECTURE="MoCoV3",
        MODEL__MOCO__HEAD="mlp_bn",
        MODEL__MOCO__HEAD_LAYERS=layers,
        MODEL__MOCO__DIM=256,
        MODEL__MOCO__MLP_DIM=4096,
        MODEL__MOCO__PREDICTOR_LAST_NORM=last_norm,
        MODEL__BN_GROUP_SIZE=0,
    )
    model = build_model(cfg)
    widths = []
    for head, kinds in ((model.encoder_q.head, projector), (model.predictor, predictor)):
        names = ["BN" if isinstance(m, GroupedBatchNorm1d) else type(m).__name__ for m in head]
        assert names == kinds
        linear = [m for m in head if isinstance(m, nn.Linear)]
        assert all(m.bias is None for m in linear)
        widths.append([linear[0].in_features, *(m.out_features for m in linear)])
        for m in head[:-1]:
            assert not isinstance(m, GroupedBatchNorm1d) or m.affine
        assert kinds[-1] == "Linear" or not head[-1].affine
    # res3 of the tiny R-18 has 128 channels.
    assert widths == [[128, *[4096] * (layers - 1), 256], [256, 4096, 256]]


def test_gradients_reach_query_encoder_and_predictor_only():
    model = make_model(last_norm=True).train()
    model(make_batch())["loss_contrastive"].backward()
    trained = [*model.encoder_q.parameters(), *model.predictor.parameters()]
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in trained)
    assert all(p.grad is None and not p.requires_grad for p in model.encoder_k.parameters())
    assert len(trained) + len([*model.encoder_k.parameters()]) == len([*model.parameters()])


def test_the_predictor_maps_queries_only():
    model, batch = make_model().train(), make_batch()
    calls = []
    model.predictor.register_forward_hook(lambda module, args, y: calls.append(len(y)))
    model(batch)
    assert calls == [N, N]
    keys = [model.encode_keys(view) for view in batch["views"]]
    with torch.no_grad():
        model.predictor[0].weight.mul_(-1)
    for before, view in zip(keys, batch["views"], strict=True):
        assert torch.equal(model.encode_keys(view), before)
    assert keys[0].norm(dim=1).numpy() == pytest.approx(1)


def test_the_two_views_are_exchangeable():
    """The loss is symmetric."""
    batch = make_batch()
    losses = [
        make_model().train()({"views": views})["loss_contrastive"].item()
        for views in (batch["views"], batch["views"][::-1])
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


def test_the_contract_of_forwards():
    """A list of dicts is its batch; evaluation gives unit features; steps must be finished."""
    batch = make_batch()
    samples = [{"views": [view[i] for view in batch["views"]]} for i in range(N)]
    model = make_model().train()
    loss = model(batch)["loss_contrastive"]
    with pytest.raises(RuntimeError, match="without MoCoV3.finish_step"):
        model(batch)
    model.finish_step(0.9)
    assert torch.equal(make_model().train()(samples)["loss_contrastive"], loss)
    with pytest.raises(RuntimeError, match="without a training forward"):
        model.finish_step(0.9)
    model.eval()
    features = model({"image": batch["views"][0]})
    assert features.shape == (N, 6)
    np.testing.assert_allclose(features.norm(dim=1).detach(), 1, rtol=1e-6)
    with pytest.raises(ValueError, match="MoCoV3 takes images as uint8"):
        model({"image": batch["views"][0].float()})


@pytest.mark.parametrize("depth", [18, 50])
def test_residual_blocks_begin_as_the_identity(depth):
    options = {
        "MODEL__META_ARCHITECTURE": "MoCoV3",
        "MODEL__RESNETS__DEPTH": depth,
        "MODEL__RESNETS__RES2_OUT_CHANNELS": 64 if depth == 18 else 256,
        "MODEL__RESNETS__OUT_FEATURES": ["res2"],
    }
    last = "conv2" if depth == 18 else "conv3"
    for zero in (False, True):
        cfg = tiny_pretrain_config(MODEL__RESNETS__ZERO_INIT_RESIDUAL=zero, **options)
        model = build_model(cfg).double()
        for encoder in (model.encoder_q, model.encoder_k):
            for block in encoder.backbone.res2:
                scales = {n: m.norm.weight for n, m in block.named_children() if "conv" in n}
                assert (scales.pop(last) == (0 if zero else 1)).all()
                assert all((scale == 1).all() for scale in scales.values())
        if zero:
            block = model.encoder_q.backbone.res2[-1].eval()
            x = torch.rand(2, block.in_channels, 4, 4, dtype=torch.float64)
            assert torch.equal(block(x), x)


def test_a_head_of_less_than_two_layers_is_refused():
    with pytest.raises(ValueError, match="MODEL.MOCO.HEAD_LAYERS is 1"):
        build_model(tiny_pretrain_config(MODEL__MOCO__HEAD_LAYERS=1))
