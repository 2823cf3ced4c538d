"""What the monitors log, against float64 NumPy; that they only look on; and what they draw."""

import json

import jobs
import numpy as np
import pytest
import torch
from pictures import tensorboard_pictures
from support import tiny_pretrain_config
from tiny_moco import make_batch, make_moco

from moco_d2.engine.distributed import unwrap
from moco_d2.engine.monitors import encoder_distance, similarities
from moco_d2.engine.trainer import PretrainTrainer
from moco_d2.modeling.dictionary import Contrast
from moco_d2.visualization.boards import view_board

SIMILARITIES = {"positive_similarity", "negative_similarity", "hardest_negative"}
SPREAD = {"feature_std", "effective_rank"}
QUEUE = {"queue_fill", "oldest_key_age"}
V3 = {
    "MODEL__META_ARCHITECTURE": "MoCoV3",
    "MODEL__MOCO__HEAD": "mlp_bn",
    "MODEL__MOCO__MLP_DIM": 32,
    "MODEL__BN_GROUP_SIZE": 8,
    "INPUT__VIEWS__QUERY": "moco_v3_1",
    "INPUT__VIEWS__KEY": "moco_v3_2",
}
# Method -> its config, and what is logged besides similarities and spread.
METHODS = {
    "queue": ({}, {"encoder_distance", *QUEUE}),
    "symmetric": ({"MODEL__MOCO__SYMMETRIC": True}, {"encoder_distance", *QUEUE}),
    "memory_bank": (
        {"MODEL__MOCO__DICTIONARY": "memory_bank", "MODEL__MOCO__QUEUE_SIZE": 20},
        set(),
    ),
    "in_batch": ({"MODEL__MOCO__DICTIONARY": "in_batch"}, set()),
    "v3": (V3, {"encoder_distance"}),
}


def config(images, folder, period=1, **overrides):
    options = {
        "DATASETS__TRAIN": (str(images),),
        "MODEL__RESNETS__OUT_FEATURES": ["res2"],
        "MONITORS__PERIOD": period,
        "MONITORS__PICTURE_PERIOD": period,
        "MODEL__MOCO__MOMENTUM": 0.9,
        **overrides,
    }
    return tiny_pretrain_config(folder, **options)


def lines_of(folder):
    return [json.loads(line) for line in (folder / "metrics.json").read_text().splitlines()]


def unit_rows(rng, *shape):
    x = rng.standard_normal(shape)
    return torch.from_numpy(x / np.linalg.norm(x, axis=1, keepdims=True))


@pytest.mark.parametrize("left_out", [False, True])
def test_similarities_equal_the_reference(left_out):
    rng = np.random.default_rng(0)
    q, k, negatives = (unit_rows(rng, count, 6) for count in (8, 8, 30))
    ids, negative_ids = (rng.integers(0, 5, count) for count in (8, 30))
    keep = ids[:, None] != negative_ids if left_out else np.ones((8, 30), bool)
    s = np.where(keep, q.numpy() @ negatives.numpy().T, np.nan)
    expected = {
        "positive_similarity": (q * k).numpy().sum(1).mean(),
        "negative_similarity": np.nanmean(s),
        "hardest_negative": np.nanmax(s, axis=1).mean(),
    }
    numbers = map(torch.from_numpy, (ids, negative_ids)) if left_out else ()
    seen = similarities(q, Contrast(k, negatives, *numbers))
    assert {name: value.item() for name, value in seen.items()} == pytest.approx(expected)


def test_encoder_distance_equals_the_reference():
    model = make_moco()
    assert encoder_distance(model).item() == 0
    with torch.no_grad():
        for number, parameter in enumerate(model.encoder_q.parameters()):
            parameter.add_(0.1 * number)
    q, k = (
        np.concatenate([p.detach().numpy().ravel() for p in encoder.parameters()])
        for encoder in (model.encoder_q, model.encoder_k)
    )
    expected = np.linalg.norm(q - k) / np.linalg.norm(q)
    assert encoder_distance(model).item() == pytest.approx(expected, rel=1e-12)


def test_models_show_what_their_loss_compares():
    """The loss of what the observer is shown is the model's."""
    model, shown = make_moco(symmetric=True), []
    model.observer = lambda q, contrast: shown.append((q, contrast))
    loss = model(make_batch())["loss_contrastive"].item()
    expected = []
    for q, contrast in shown:
        q, k, negatives = (x.detach().numpy() for x in (q, contrast.k, contrast.negatives))
        logits = np.concatenate([(q * k).sum(1, keepdims=True), q @ negatives.T], axis=1) / 0.2
        expected.append((np.log(np.exp(logits).sum(1)) - logits[:, 0]).mean())
    assert len(shown) == 2 and loss == pytest.approx(np.mean(expected), rel=1e-12)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_logs_what_has_a_meaning_and_trains_the_same(method, images, tmp_path):
    overrides, further = METHODS[method]
    states, losses = {}, {}
    for period in (0, 2):
        folder = tmp_path / str(period)
        trainer = PretrainTrainer(config(images, folder, period, **overrides))
        trainer.train()
        states[period] = unwrap(trainer.model).state_dict()
        losses[period] = [line["total_loss"] for line in lines_of(folder)]
    assert losses[0] == losses[2]
    assert all(torch.equal(states[0][name], states[2][name]) for name in states[0])

    seen = [
        {n.removeprefix("[metric]") for n in line} & {*SIMILARITIES, *SPREAD, *METHODS["queue"][1]}
        for line in lines_of(tmp_path / "2")
    ]
    assert seen == [set(), {*SIMILARITIES, *SPREAD, *further}] * 2
    last = lines_of(tmp_path / "2")[-1]
    assert last["loss_over_chance"] == last["total_loss"] / last["[metric]chance_level"]
    if "queue_fill" in further:  # 4 steps of 16 keys, or 32, into 40 places
        ages = [line["[metric]oldest_key_age"] for line in lines_of(tmp_path / "2")[1::2]]
        assert ages == ([2, 2] if method == "symmetric" else [2, 3])
        fill = lines_of(tmp_path / "2")[1]["[metric]queue_fill"]
        assert fill == pytest.approx(1 if method == "symmetric" else 32 / 40)
    if "encoder_distance" in further:
        distance = encoder_distance(unwrap(trainer.model)).item()
        assert last["[metric]encoder_distance"] == pytest.approx(distance) and distance > 0


def test_two_processes_and_steps_in_parts_give_the_same_values(images, tmp_path):
    whole = config(images, tmp_path / "1", SOLVER__MAX_ITER=3, SOLVER__BASE_LR=1e-3)
    divided = config(
        images, tmp_path / "2", SOLVER__MAX_ITER=3, SOLVER__BASE_LR=1e-3, SOLVER__ACCUMULATE=2
    )
    PretrainTrainer(whole).train()
    assert jobs.run_job(divided, processes=2) == [0, 0]
    for one, two in zip(lines_of(tmp_path / "1"), lines_of(tmp_path / "2"), strict=True):
        names = {f"[metric]{n}" for n in {*SIMILARITIES, *SPREAD, *METHODS["queue"][1]}}
        for name in {*names, "loss_over_chance"}:
            assert two[name] == pytest.approx(one[name], rel=1e-3, abs=1e-6), name


def test_view_pairs_are_drawn_as_they_are_seen(images, tmp_path):
    """The pictures in TensorBoard are the first views of the step's batch."""
    batches = []

    class Looking(PretrainTrainer):
        def batches(self, loader):
            for batch in super().batches(loader):
                batches.append(batch["views"])
                yield batch

    Looking(config(images, tmp_path, 2, SOLVER__MAX_ITER=3)).train()
    (pictures,) = tensorboard_pictures(tmp_path).values()
    assert list(pictures) == [0, 2]
    for iteration, picture in pictures.items():
        expected = view_board([view[:8] for view in batches[iteration]], "RGB")
        assert torch.equal(picture, expected)


def test_a_board_is_rgb_whatever_the_views_are():
    rng = np.random.default_rng(0)
    views = [torch.from_numpy(rng.integers(0, 256, (3, 3, 5, 4), dtype=np.uint8)) for _ in "qk"]
    board = view_board(views, "BGR")
    assert board.dtype == torch.uint8 and board.shape == (3, 2 * (5 + 4), 3 * (4 + 4))
    assert torch.equal(board[:, 2:7, 2:6], views[0][0].flip(0))
    assert torch.equal(board[:, 11:16, 18:22], views[1][2].flip(0))
    grey = view_board([view[:, :1] for view in views], "RGB")
    assert torch.equal(grey[:, 2:7, 2:6], views[0][0, :1].expand(3, -1, -1))
