"""MoCo as a whole: the step of Algorithm 1 in float64, and who shares BN statistics with whom."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from detectron2.modeling import build_model
from support import random_views, tiny_pretrain_config
from tiny_moco import Reference, make_batch, make_moco

from moco_d2.modeling.shuffle import shuffle_permutation


def test_a_step_equals_algorithm_1_in_float64():
    """Forward with shuffled keys, SGD, enqueue, key encoder update: two steps against NumPy."""
    moco, group, tau, m, lr = make_moco(), 4, 0.2, 0.9, 0.5
    # Keys of a copy that has moved away from the queries, as in the middle of a run.
    for p in moco.encoder_k.parameters():
        p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(5)))
    moco.train()
    optimizer = torch.optim.SGD(moco.encoder_q.parameters(), lr)
    queue = list(moco.dictionary.keys.numpy().copy())
    for iteration in (3, 4):
        batch = make_batch(iteration=iteration, seed=iteration)
        query, key = Reference(moco.encoder_q), Reference(moco.encoder_k)
        q = query.encode(batch["views"][0], group)
        permutation = shuffle_permutation(16, 0, iteration)
        shuffled = key.encode(batch["views"][1][torch.from_numpy(permutation)], group)
        k = np.empty_like(shuffled)
        k[permutation] = shuffled
        pos = (q * k).sum(1, keepdims=True)
        logits = np.hstack([pos, q @ np.stack(queue).T]) / tau
        expected = (np.log(np.exp(logits).sum(1)) - logits[:, 0]).mean()

        loss = moco(batch)["loss_contrastive"]
        np.testing.assert_allclose(loss.item(), expected, rtol=1e-9)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        moved = Reference(moco.encoder_q).p
        moco.finish_step(m)

        slot = (iteration - 3) * 16
        for i in range(16):
            queue[(slot + i) % 20] = k[i]
        np.testing.assert_allclose(moco.dictionary.keys.numpy(), np.stack(queue), rtol=1e-7)
        for name, value in Reference(moco.encoder_k).p.items():
            np.testing.assert_allclose(value, m * key.p[name] + (1 - m) * moved[name], rtol=1e-9)
    assert int(moco.dictionary.pointer) == 32 % 20


def test_nothing_but_the_query_encoder_takes_a_gradient():
    moco = make_moco().train()
    moco(make_batch())["loss_contrastive"].backward()
    assert all(p.grad is not None for p in moco.encoder_q.parameters())
    assert all(p.grad is None and not p.requires_grad for p in moco.encoder_k.parameters())


def images_sharing_statistics(shuffle, iteration=3):
    """For each position, the positions whose image changes its key, found by changing images.

    Returns:
        list of frozensets, the BN group of each key as positions, and of each query.
    """
    moco = make_moco(shuffle=shuffle).eval().double()
    moco.train()
    n, batch = 16, make_batch(iteration=iteration)

    def keys_and_queries(views):
        with torch.no_grad():
            q = F.normalize(moco.encoder_q(moco.normalise(views[0])), dim=1)
            return moco.encode_keys(views[1], iteration), q

    base = keys_and_queries(batch["views"])
    groups = ([set() for _ in range(n)], [set() for _ in range(n)])
    for changed in range(n):
        views = [view.clone() for view in batch["views"]]
        for view in views:
            view[changed] = 255 - view[changed]
        for kind, (before, after) in enumerate(zip(base, keys_and_queries(views), strict=True)):
            for i in ((before - after).abs().amax(1) > 1e-12).nonzero()[:, 0].tolist():
                groups[kind][i].add(changed)
    return groups


def test_shuffle_decides_which_images_share_statistics():
    """Off, a key shares statistics with exactly the images its query does; on, with others."""
    consecutive = [set(range(i // 4 * 4, i // 4 * 4 + 4)) for i in range(16)]
    keys, queries = images_sharing_statistics(shuffle=False)
    assert keys == queries == consecutive

    keys, queries = images_sharing_statistics(shuffle=True)
    permutation = shuffle_permutation(16, 0, 3)
    slot = np.argsort(permutation)
    expected = [set(permutation[slot[i] // 4 * 4 : slot[i] // 4 * 4 + 4]) for i in range(16)]
    assert queries == consecutive
    assert keys == expected
    assert keys != consecutive

    other, _ = images_sharing_statistics(shuffle=True, iteration=4)
    assert other != keys


def test_list_of_dicts_gives_the_loss_of_the_collated_batch():
    batch = make_batch()
    samples = [
        {"views": [batch["views"][0][i], batch["views"][1][i]], "position": batch["position"][i]}
        for i in range(16)
    ]
    losses = [make_moco().train()(b)["loss_contrastive"] for b in (batch, samples)]
    assert torch.equal(*losses)


def test_evaluation_returns_normalised_backbone_features_of_the_images_in_order():
    moco = make_moco().eval()
    images = make_batch()["views"][0]
    with torch.no_grad():
        features = moco({"image": images})
        one_by_one = torch.cat([moco([{"image": image}]) for image in images])
    assert features.shape == (16, 8)
    np.testing.assert_allclose(features.norm(dim=1).numpy(), 1, rtol=1e-6)
    np.testing.assert_allclose(features.numpy(), one_by_one.numpy(), rtol=1e-5, atol=1e-7)


def test_two_forwards_without_finish_step_are_an_error():
    moco = make_moco().train()
    moco(make_batch())
    with pytest.raises(RuntimeError, match="KeyEncoderUpdate"):
        moco(make_batch(iteration=4))


def test_finish_step_needs_a_forward():
    with pytest.raises(RuntimeError, match="without a training forward"):
        make_moco().finish_step(0.9)


def test_float_images_are_refused():
    batch = make_batch()
    batch["views"][0] = batch["views"][0].float()
    with pytest.raises(ValueError, match=r"uint8 \(N, C, H, W\); got torch.float32"):
        make_moco().train()(batch)


@pytest.mark.parametrize("channels_last", [False, True])
def test_channels_last_changes_nothing_but_the_layout(channels_last):
    cfg = tiny_pretrain_config(MODEL__CHANNELS_LAST=channels_last)
    torch.manual_seed(0)
    model = build_model(cfg).train().double()
    batch = {"views": random_views(16, 32, 0), "position": torch.arange(16)}
    loss = model(batch)["loss_contrastive"].item()
    torch.manual_seed(0)
    plain = build_model(tiny_pretrain_config()).train().double()
    np.testing.assert_allclose(loss, plain(batch)["loss_contrastive"].item(), rtol=1e-9)


def test_an_unknown_head_is_refused_by_name():
    with pytest.raises(ValueError, match="MODEL.MOCO.HEAD is 'deep'"):
        build_model(tiny_pretrain_config(MODEL__MOCO__HEAD="deep"))


def test_works_under_detectron2s_own_trainer_with_one_hook():
    """Somebody's own train_net.py: DefaultTrainer, EventStorage, and KeyEncoderUpdate."""
    from detectron2.engine import SimpleTrainer

    from moco_d2.engine.hooks import KeyEncoderUpdate

    moco = make_moco()
    batches = [{"views": random_views(16, 12, i)} for i in range(3)]
    trainer = SimpleTrainer(moco, batches, torch.optim.SGD(moco.encoder_q.parameters(), 0.1))
    trainer.register_hooks([KeyEncoderUpdate(moco, 0.9)])
    before = [p.clone() for p in moco.encoder_k.parameters()]
    trainer.train(0, 3)
    assert int(moco.dictionary.pointer) == 48 % 20 and int(moco.dictionary.filled) == 20
    after = moco.encoder_k.parameters()
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert trainer.storage.history("[metric]contrastive_acc1").values()
