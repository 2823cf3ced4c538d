"""Steps of MoCo with the other dictionaries and in both directions, on processes and in parts."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from detectron2.utils import comm
from support import run_processes
from tiny_moco import Reference, make_batch, make_moco

from moco_d2.engine.distributed import create_ddp_model, unwrap
from moco_d2.errors import UserError
from moco_d2.modeling.dictionary import InBatch, KeyQueue, MemoryBank
from moco_d2.modeling.shuffle import shuffle_permutation

IMAGES, NEGATIVES, TAU, GROUP = 40, 12, 0.2, 4


def memory_bank():
    return MemoryBank(IMAGES, 6, NEGATIVES, 0.5, seed=0)


def indexed_batch(iteration):
    """16 images of 40, of which one comes twice."""
    index = np.random.default_rng(iteration).permutation(IMAGES)[:16]
    index[11] = index[2]
    return make_batch(iteration=iteration, seed=iteration) | {"index": torch.from_numpy(index)}


def part_of(batch, rank, world_size):
    """A process's share of a batch."""
    share = {"views": [view.chunk(world_size)[rank] for view in batch["views"]]}
    return share | {k: v.chunk(world_size)[rank] for k, v in batch.items() if k != "views"}


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def loss_of(positive, negatives):
    """Eq. 1 from the scores of a positive and of a list of negatives."""
    scores = np.array([positive, *negatives]) / TAU
    return np.log(np.exp(scores - scores.max()).sum()) + scores.max() - scores[0]


def test_two_steps_with_a_memory_bank_equal_the_formulas():
    """Draws from (seed, iteration), own rows left out, v <- normalise(m v + (1 - m) q)."""
    moco = make_moco(dictionary=memory_bank()).train()
    bank = moco.dictionary.keys.numpy().copy()
    np.testing.assert_allclose(np.linalg.norm(bank, axis=1), 1, rtol=1e-6)
    met_own_row = False
    for iteration in (3, 4):
        batch = indexed_batch(iteration)
        index = batch["index"].numpy()
        q = Reference(moco.encoder_q).encode(batch["views"][0], GROUP)
        # Stream 11 of the run's numbers: key (seed, stream), counter (0, 0, iteration, 0).
        counter = np.array([0, 0, iteration, 0], dtype=np.uint64)
        philox = np.random.Philox(key=np.array([0, 11], dtype=np.uint64), counter=counter)
        drawn = np.random.Generator(philox).integers(IMAGES, size=NEGATIVES)
        assert moco.dictionary.drawn(iteration).tolist() == drawn.tolist()
        met_own_row |= bool(set(drawn) & set(index))
        expected = np.mean(
            [
                loss_of(q[i] @ bank[index[i]], [q[i] @ bank[d] for d in drawn if d != index[i]])
                for i in range(16)
            ]
        )
        loss = moco(batch)["loss_contrastive"]
        np.testing.assert_allclose(loss.item(), expected, rtol=1e-9)
        moco.finish_step(0.9)
        before = bank.copy()
        for i in range(16):  # the later of an image's two queries is what stays
            bank[index[i]] = unit(0.5 * before[index[i]] + 0.5 * q[i])
        np.testing.assert_allclose(moco.dictionary.keys.numpy(), bank, rtol=1e-9)
    assert met_own_row and moco.encoder_k is None


def test_a_memory_bank_needs_to_know_which_images_it_sees():
    with pytest.raises(UserError, match="needs 'index'"):
        make_moco(dictionary=memory_bank()).train()(make_batch())
    batch = indexed_batch(3)
    samples = [
        {"views": [view[i] for view in batch["views"]]}
        | {key: batch[key][i] for key in ("position", "index")}
        for i in range(16)
    ]
    models = (make_moco(dictionary=memory_bank()).train() for _ in range(2))
    losses = [m(b)["loss_contrastive"] for m, b in zip(models, (batch, samples), strict=True)]
    assert torch.equal(*losses)


def end_to_end_loss(moco, batch):
    """Cross-entropy over the keys of the whole batch, by autograd alone."""
    permutation = torch.from_numpy(shuffle_permutation(16, 0, 3))
    losses = []
    directions = [batch["views"], batch["views"][::-1]] if moco.symmetric else [batch["views"]]
    for query, other in directions:
        q = F.normalize(moco.encoder_q(moco.normalise(query)), dim=1)
        shuffled = F.normalize(moco.encoder_q(moco.normalise(other[permutation])), dim=1)
        k = shuffled[permutation.argsort()]
        losses.append(F.cross_entropy(q @ k.T / TAU, torch.arange(16)))
    return torch.stack(losses).mean()


def gradients(moco):
    return {n: p.grad.clone() for n, p in unwrap(moco).encoder_q.named_parameters()}


@pytest.mark.parametrize("symmetric", [False, True])
def test_end_to_end_gradients_flow_through_queries_and_keys(symmetric):
    moco = make_moco(dictionary=InBatch(), symmetric=symmetric).train()
    batch = make_batch()
    expected_loss = end_to_end_loss(moco, batch)
    expected_loss.backward()
    expected = gradients(moco)
    moco.zero_grad()
    loss = moco(batch)["loss_contrastive"]
    loss.backward()
    np.testing.assert_allclose(loss.item(), expected_loss.item(), rtol=1e-9)
    for name, grad in gradients(moco).items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-9, atol=1e-12)
    assert moco.encoder_k is moco.encoder_q
    before = moco.state_dict()
    moco.finish_step(0.5)
    assert all(torch.equal(before[name], t) for name, t in moco.state_dict().items())


CASES = {
    "end-to-end": lambda: make_moco(dictionary=InBatch()),
    "end-to-end, both directions": lambda: make_moco(dictionary=InBatch(), symmetric=True),
    "queue, both directions": lambda: make_moco(symmetric=True),
    "memory bank": lambda: make_moco(dictionary=memory_bank()),
    # A group on two processes: synchronised statistics on the way of the keys' gradients.
    "end-to-end, one group": lambda: make_moco(group=16, dictionary=InBatch()),
}


def run_steps(make):
    """Two steps of this process's share; gradients of each, and the state after them."""
    model = create_ddp_model(make().train())
    optimizer, seen = torch.optim.SGD(model.parameters(), 0.05), []
    for iteration in (3, 4):
        share = part_of(indexed_batch(iteration), comm.get_rank(), comm.get_world_size())
        optimizer.zero_grad()
        model(share)["loss_contrastive"].backward()
        seen.append(gradients(model))
        optimizer.step()
        unwrap(model).finish_step(0.9)
    return seen, unwrap(model).state_dict()


def save_steps(folder):
    torch.save({n: run_steps(c) for n, c in CASES.items()}, f"{folder}/{comm.get_rank()}.pth")


@pytest.fixture(scope="module")
def on_two_processes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("steps")
    run_processes(save_steps, 2, str(folder))
    return [torch.load(folder / f"{rank}.pth") for rank in (0, 1)]


@pytest.mark.parametrize("case", CASES)
def test_two_processes_have_the_gradients_of_one_with_the_whole_batch(case, on_two_processes):
    """1e-9 in float64. A gather without gradient, or one that averages, is off by far more."""
    expected_gradients, expected_state = run_steps(CASES[case])
    for result in on_two_processes:
        seen, state = result[case]
        for step, grads in enumerate(seen):
            for name, grad in grads.items():
                expected = expected_gradients[step][name]
                torch.testing.assert_close(grad, expected, rtol=1e-9, atol=1e-12)
        for name, tensor in state.items():
            if "running" not in name:  # a process's own until they are averaged
                torch.testing.assert_close(tensor, expected_state[name], rtol=1e-9, atol=1e-12)


def test_keys_of_other_processes_matter_to_the_gradient():
    """The comparison above can fail: without the gradient of keys it is another one."""
    moco = make_moco(dictionary=InBatch()).train()
    moco(make_batch())["loss_contrastive"].backward()
    whole = gradients(moco)["head.weight"]
    batch, moco = make_batch(), make_moco(dictionary=InBatch()).train()
    permutation = torch.from_numpy(shuffle_permutation(16, 0, 3))
    q = F.normalize(moco.encoder_q(moco.normalise(batch["views"][0])), dim=1)
    with torch.no_grad():
        k = F.normalize(moco.encoder_q(moco.normalise(batch["views"][1][permutation])), dim=1)
    F.cross_entropy(q @ k[permutation.argsort()].T / TAU, torch.arange(16)).backward()
    assert (gradients(moco)["head.weight"] - whole).norm() > 0.1 * whole.norm()


def test_both_directions_are_the_mean_of_two_losses_and_both_keys_are_enqueued():
    batch = make_batch()
    swapped = batch | {"views": batch["views"][::-1]}
    one, other, both = (
        make_moco(dictionary=KeyQueue(50, 6), symmetric=symmetric).train()
        for symmetric in (False, False, True)
    )
    expected = (one(batch)["loss_contrastive"] + other(swapped)["loss_contrastive"]) / 2
    loss = both(batch)["loss_contrastive"]
    np.testing.assert_allclose(loss.item(), expected.item(), rtol=1e-9)
    for moco in (one, other, both):
        moco.finish_step(0.9)
    keys = torch.cat([one.dictionary.keys[:16], other.dictionary.keys[:16]])
    torch.testing.assert_close(both.dictionary.keys[:32], keys, rtol=1e-9, atol=1e-12)
    assert int(both.dictionary.filled) == 32


@pytest.mark.parametrize("symmetric, dictionary", [(True, None), (False, memory_bank)])
def test_a_step_in_parts_is_the_whole_step(symmetric, dictionary):
    """Loss, gradients, dictionary and running statistics."""
    results = []
    for parts in (1, 2):
        forwards = parts * (2 if symmetric else 1)
        own = dictionary and dictionary()
        moco = make_moco(dictionary=own, symmetric=symmetric, forwards=forwards).train()
        losses = []
        for part in moco.split_step(indexed_batch(3), parts):
            loss = moco(part)["loss_contrastive"] / parts
            loss.backward()
            losses.append(loss.item())
        grads = gradients(moco)
        moco.finish_step(0.9)
        results.append((sum(losses), grads, moco.state_dict()))
    (loss, grads, state), (expected_loss, expected_grads, expected_state) = results
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-9)
    for got, expected in ((grads, expected_grads), (state, expected_state)):
        for name, tensor in got.items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-9, atol=1e-12)
