"""ImageClassifier against the formula of the loss, and what a frozen backbone does not do."""

import numpy as np
import pytest
import torch
from support import TinyBackbone, random_views
from torch import nn

from moco_d2.modeling.batch_norm import BatchNormGroups
from moco_d2.modeling.classifier import ImageClassifier, linear
from moco_d2.modeling.encoder import Encoder

CLASSES = 5


def classifier(smoothing=0.0, frozen=False, group=4, parts=1) -> ImageClassifier:
    torch.manual_seed(0)
    head = linear(8, CLASSES)
    encoder = Encoder(TinyBackbone(), "out", head, BatchNormGroups(group, parts=parts))
    model = ImageClassifier(
        encoder=encoder,
        label_smoothing=smoothing,
        freeze_backbone=frozen,
        pixel_mean=[120.0, 110.0, 100.0],
        pixel_std=[60.0, 50.0, 40.0],
    ).double()
    nn.init.normal_(head.bias)  # so that it counts
    return model


def step(count=8) -> dict:
    labels = torch.arange(count) * 3 % CLASSES
    return {"views": random_views(count, 12, 0)[:1], "label": labels}


def reference(features, weight, bias, labels, smoothing):
    """Cross-entropy of the softmax with targets (1 - e) [class = label] + e / K (Szegedy et al.,
    arXiv 1512.00567, Sec. 7), in float64, and its gradients by weight and bias."""
    logits = features @ weight.T + bias
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    target = (1 - smoothing) * np.eye(len(bias))[labels] + smoothing / len(bias)
    loss = -(target * np.log(p)).sum(1).mean()
    by_logits = (p - target) / len(labels)
    return loss, by_logits.T @ features, by_logits.sum(0)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("frozen", [False, True])
def test_loss_and_gradients_of_the_head(smoothing, frozen):
    model, batch = classifier(smoothing, frozen), step()
    with torch.no_grad():
        features = model.encoder.features(model.normalise(batch["views"][0])).numpy()
    head = model.encoder.head
    parameters = (head.weight.detach().numpy(), head.bias.detach().numpy())
    expected = reference(features, *parameters, batch["label"].numpy(), smoothing)
    loss = model(batch)["loss_classification"]
    loss.backward()
    for ours, theirs in zip(
        (loss.detach(), head.weight.grad, head.bias.grad), expected, strict=True
    ):
        np.testing.assert_allclose(ours.numpy(), theirs, rtol=1e-10, atol=1e-14)


def test_gradient_of_the_first_convolution_by_finite_differences():
    model, batch = classifier(0.1), step()
    weight = model.encoder.backbone.conv1.weight
    model(batch)["loss_classification"].backward()
    gradient, h = weight.grad[2, 1, 0, 1].item(), 1e-6
    losses = []
    for sign in (1, -1):
        with torch.no_grad():
            weight[2, 1, 0, 1] += sign * h
            losses.append(model(batch)["loss_classification"].item())
            weight[2, 1, 0, 1] -= sign * h
    assert gradient == pytest.approx((losses[0] - losses[1]) / (2 * h), rel=1e-5)
    assert abs(gradient) > 1e-6


def test_a_step_in_parts_is_the_undivided_step():
    """Two groups in two parts: loss, gradients and running statistics."""
    batch, whole, parts = step(), classifier(0.1), classifier(0.1, parts=2)
    loss = whole(batch)["loss_classification"]
    loss.backward()
    losses = [parts(part)["loss_classification"] for part in parts.split_step(batch, 2)]
    sum(losses).div(2).backward()
    torch.testing.assert_close(sum(losses) / 2, loss)
    for (name, ours), theirs in zip(parts.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, msg=name)
    for (name, ours), theirs in zip(parts.named_buffers(), whole.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, msg=name)


def test_a_frozen_backbone_stays_and_normalises_by_its_own_statistics():
    model, batch = classifier(frozen=True), step()
    before = {n: t.clone() for n, t in model.encoder.backbone.state_dict().items()}
    model.train()
    features = model.encoder.features(model.normalise(batch["views"][0]))
    alone = model.encoder.features(model.normalise(batch["views"][0][:1]))
    torch.testing.assert_close(alone, features[:1])  # whatever else is in the batch
    model(batch)["loss_classification"].backward()
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trained == ["encoder.head.weight", "encoder.head.bias"]
    assert all(p.grad is None for p in model.encoder.backbone.parameters())
    for name, tensor in model.encoder.backbone.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_evaluation_gives_normalised_features_and_logits():
    model, batch = classifier().eval(), step()
    images = {"image": batch["views"][0]}
    with torch.no_grad():
        raw = model.encoder.features(model.normalise(images["image"]))
        features = model(images)
    torch.testing.assert_close(features, (raw / raw.norm(dim=1, keepdim=True)).float())
    torch.testing.assert_close(model.logits(images), model.encoder.head(raw))


def test_detectron2s_list_of_dicts_is_the_same_step():
    model, batch = classifier(), step()
    samples = [
        {"views": [view], "label": int(label)}
        for view, label in zip(batch["views"][0], batch["label"], strict=True)
    ]
    assert model(samples) == model(batch)
