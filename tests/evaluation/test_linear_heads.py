"""Linear heads trained at once: each is what it would be alone, and what ImageClassifier trains."""

import jobs
import numpy as np
import torch
from support import tiny_pretrain_config

from moco_d2.data.streams import SampleStream
from moco_d2.engine.classification import ClassificationTrainer
from moco_d2.engine.distributed import unwrap
from moco_d2.evaluation import linear_heads
from moco_d2.evaluation.features import feature_batches
from moco_d2.evaluation.linear_heads import LinearHeads, standardise, train_heads

FEATURES, CLASSES = 12, 5


def data(count=70):
    rng = np.random.default_rng(3)
    labels = rng.integers(0, CLASSES, count)
    features = rng.normal(size=(count, FEATURES)) + rng.normal(size=(CLASSES, FEATURES))[labels]
    return torch.from_numpy(features), torch.from_numpy(labels)


def reference(features, labels, rate, epochs, batch_size, seed, weight):
    """SGD with momentum 0.9 on the mean cross-entropy, x 0.1 at 60 and 80 % of the steps."""
    features, labels = features.numpy(), labels.numpy()
    bias, momentum_w, momentum_b = np.zeros(CLASSES), 0, 0
    stream, steps = SampleStream(len(features), seed), epochs * len(features) // batch_size
    for step in range(steps):
        batch = stream.samples(step * batch_size, batch_size)
        x, y = features[batch], labels[batch]
        scores = x @ weight + bias
        exponentials = np.exp(scores - scores.max(1, keepdims=True))
        error = exponentials / exponentials.sum(1, keepdims=True)
        error[np.arange(batch_size), y] -= 1
        momentum_w = 0.9 * momentum_w + x.T @ error / batch_size
        momentum_b = 0.9 * momentum_b + error.mean(0)
        decay = 0.1 ** ((step >= round(0.6 * steps)) + (step >= round(0.8 * steps)))
        weight = weight - rate * batch_size / 256 * decay * momentum_w
        bias = bias - rate * batch_size / 256 * decay * momentum_b
    return weight, bias


def test_each_head_is_the_one_trained_alone():
    features, labels = data()
    rates = (0.01, 1.0, 30.0)
    options = {"classes": CLASSES, "epochs": 6, "batch_size": 16, "seed": 4}
    together = train_heads(features, labels, learning_rates=rates, **options)
    begin = LinearHeads.create(FEATURES, CLASSES, 1, seed=4, like=features).weight[:, 0].numpy()
    assert 0.005 < begin.std() < 0.015
    for i, rate in enumerate(rates):
        weight, bias = reference(features, labels, rate, 6, 16, 4, begin)
        np.testing.assert_allclose(together.weight[:, i].numpy(), weight, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(together.bias[i].numpy(), bias, rtol=1e-9, atol=1e-12)
        alone = train_heads(features, labels, learning_rates=(rate,), **options)
        torch.testing.assert_close(together.weight[:, i], alone.weight[:, 0], rtol=1e-9, atol=1e-12)
        scores = features @ together.weight[:, i] + together.bias[i]
        ranked = torch.cat(list(together.ranked(features, 2)))[:, i]
        assert torch.equal(ranked, scores.argsort(dim=1, descending=True, stable=True)[:, :2])


def test_ranked_classes_keep_no_others_in_memory(monkeypatch):
    monkeypatch.setattr(linear_heads, "_LOGITS", 20 * 2 * CLASSES)
    features, _ = data()
    heads = LinearHeads.create(FEATURES, CLASSES, 2, seed=0, like=features)
    parts = list(heads.ranked(features, 3))
    assert [len(part) for part in parts] == [20, 20, 20, 10]
    assert all(part.untyped_storage().nbytes() == part.nbytes for part in parts)


def test_a_set_smaller_than_a_batch_is_one_batch():
    features, labels = data(20)
    done = []
    heads = train_heads(
        features, labels, classes=CLASSES, learning_rates=(2.0,), epochs=3, progress=done.append
    )
    assert done == [1, 1, 1]
    begin = LinearHeads.create(FEATURES, CLASSES, 1, seed=0, like=features).weight[:, 0].numpy()
    weight, _ = reference(features, labels, 2.0, 3, 20, 0, begin)
    np.testing.assert_allclose(heads.weight[:, 0].numpy(), weight, rtol=1e-9, atol=1e-12)


def test_standardised_features_have_mean_0_and_std_1_over_the_other_set():
    features, _ = data()
    features[:, 3] = 7.0
    train, val = features[:50], features[50:]
    done = standardise(train, train).numpy()
    np.testing.assert_allclose(done.mean(0), 0, atol=1e-12)
    np.testing.assert_allclose(np.delete(done.std(0), 3), 1)
    other = (val.numpy() - train.numpy().mean(0)) / np.where(
        np.arange(FEATURES) == 3, 1, train.numpy().std(0)
    )
    np.testing.assert_allclose(standardise(val, train).numpy(), other)


def test_the_head_is_the_one_that_the_published_protocol_trains(tmp_path):
    """On the same views, features from the store and ImageClassifier with a frozen backbone give
    the same head from the same start: lr 30 for 256 images, steps at 60 and 80 %."""
    images = jobs.draw_images(tmp_path / "images")
    cfg = tiny_pretrain_config(
        tmp_path / "run",
        "configs/pretrain/linear_R_50_100ep.yaml",
        DATASETS__TRAIN=(str(images),),
        DATASETS__TEST=(),
        INPUT__VIEWS__QUERY="center_crop",
        MODEL__CLASSIFIER__RANDOM_BACKBONE=True,
        SOLVER__MAX_ITER=20,
        SOLVER__STEPS=(12, 16),
    )
    trainer = ClassificationTrainer(cfg)
    model = unwrap(trainer.model)
    head = model.encoder.head
    options = {"seed": cfg.SEED, "like": head.weight.detach()}
    begin = LinearHeads.create(head.in_features, 2, 1, **options).weight[:, 0]
    with torch.no_grad():
        head.weight.copy_(begin.T)

    index = trainer.training_images(trainer.cfg)

    def pooled(batch):
        return model.encoder.features(model.normalise(batch["image"]))

    with torch.no_grad():
        batches = feature_batches(
            pooled,
            index,
            np.arange(len(index)),
            size=32,
            batch_size=16,
            pixel_mean=trainer.cfg.MODEL.PIXEL_MEAN,
        )
        features = torch.cat([part for _, part in batches])
    ours = train_heads(
        features,
        torch.from_numpy(index.labels),
        classes=2,
        learning_rates=(30.0,),
        epochs=11,  # 20 batches of 16 of 30 images
        batch_size=16,
        seed=cfg.SEED,
    )
    trainer.train()
    assert (head.weight - begin.T).abs().max() > 0.01
    torch.testing.assert_close(ours.weight[:, 0].T, head.weight.detach(), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(ours.bias[0], head.bias.detach(), rtol=1e-3, atol=1e-4)
