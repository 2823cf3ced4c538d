"""Pretraining runs, real and tiny: what they write, and that a resume goes on exactly."""

import json
import math

import numpy as np
import pytest
import torch
from support import tiny_pretrain_config

from moco_d2.engine.distributed import unwrap
from moco_d2.engine.trainer import PretrainTrainer


def train(cfg, resume=False):
    trainer = PretrainTrainer(cfg)
    trainer.resume_or_load(resume=resume)
    trainer.train()
    return unwrap(trainer.model)


def metrics(folder, name="loss_contrastive"):
    """{iteration: value} of the last value written for each iteration."""
    lines = (folder / "metrics.json").read_text().splitlines()
    return {r["iteration"]: r[name] for r in map(json.loads, lines) if name in r}


@pytest.mark.parametrize(
    "dictionary",
    [
        {"DICTIONARY": "queue", "SYMMETRIC": True},
        {"DICTIONARY": "memory_bank", "QUEUE_SIZE": 20},
        {"DICTIONARY": "in_batch"},
    ],
    ids=lambda dictionary: dictionary["DICTIONARY"],
)
def test_resume_goes_on_as_if_it_had_never_stopped(dictionary, images, tmp_path):
    """Dictionary, key encoder, optimizer, schedule and sample stream are where they were."""
    overrides = {
        "DATASETS__TRAIN": (str(images),),
        "SOLVER__MAX_ITER": 8,
        "SOLVER__CHECKPOINT_PERIOD": 3,
        "MODEL__MOCO__MOMENTUM_SCHEDULE": "cosine",
        **{f"MODEL__MOCO__{key}": value for key, value in dictionary.items()},
    }
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    expected = train(tiny_pretrain_config(whole, **overrides)).state_dict()

    class Killed(RuntimeError):
        pass

    trainer = PretrainTrainer(tiny_pretrain_config(parts, **overrides))
    step = trainer.run_step

    def killed_in_the_fifth_step():
        step()
        if trainer.iter == 4:
            raise Killed

    trainer.run_step = killed_in_the_fifth_step
    trainer.resume_or_load(resume=False)
    with pytest.raises(Killed):
        trainer.train()
    assert (parts / "last_checkpoint").read_text() == "model_0000002.pth"

    resumed = train(tiny_pretrain_config(parts, **overrides), resume=True).state_dict()
    for name, tensor in expected.items():
        assert torch.equal(resumed[name], tensor), name
    for key in ("loss_contrastive", "lr", "key_encoder_momentum"):
        assert metrics(parts, key) == metrics(whole, key), key
    follows = dictionary["DICTIONARY"] == "queue"
    assert len(metrics(whole, "key_encoder_momentum")) == (8 if follows else 0)


def test_resume_with_another_batch_seed_or_dictionary_is_refused(images, tmp_path):
    data = {"DATASETS__TRAIN": (str(images),), "SOLVER__MAX_ITER": 1}
    train(tiny_pretrain_config(tmp_path, **data))
    for change, message in (
        ({"SOLVER__IMS_PER_BATCH": 8}, "SOLVER.IMS_PER_BATCH is 8 and was 16"),
        ({"SEED": 8}, "SEED is 8 and was 7"),
        ({"MODEL__MOCO__DICTIONARY": "in_batch"}, "DICTIONARY is in_batch and was queue"),
        ({"MODEL__MOCO__QUEUE_SIZE": 30}, "MODEL.MOCO.QUEUE_SIZE is 30 and was 40"),
    ):
        trainer = PretrainTrainer(tiny_pretrain_config(tmp_path, **data, **change))
        with pytest.raises(ValueError, match=message):
            trainer.resume_or_load(resume=True)


def test_output_folder_and_metrics(images, tmp_path):
    cfg = tiny_pretrain_config(
        tmp_path, DATASETS__TRAIN=(str(images),), SOLVER__CHECKPOINT_PERIOD=2
    )
    train(cfg)
    names = {p.name.split(".tfevents")[0] for p in tmp_path.iterdir()}
    assert names >= {"metrics.json", "model_0000001.pth", "model_final.pth", "last_checkpoint"}
    assert "events.out" in names and not [n for n in names if n.endswith(".tmp")]
    accuracy = metrics(tmp_path, "[metric]contrastive_acc1")
    assert list(accuracy) == [0, 1, 2, 3] and all(0 <= a <= 100 for a in accuracy.values())
    assert metrics(tmp_path, "[metric]chance_level")[3] == pytest.approx(math.log(41))
    # The accuracy is not part of the loss.
    assert metrics(tmp_path, "total_loss") == metrics(tmp_path, "loss_contrastive")
    checkpoint = torch.load(tmp_path / "model_final.pth", weights_only=True)
    assert checkpoint["iteration"] == 3
    assert checkpoint["recipe"]["backbone"]["depth"] == 18


def test_log_period_is_how_often_metrics_are_written_and_their_window(images, tmp_path):
    """Written values are medians of a period's raw values."""
    raw, smooth = tmp_path / "raw", tmp_path / "smooth"
    overrides = {"DATASETS__TRAIN": (str(images),), "SOLVER__MAX_ITER": 6}
    train(tiny_pretrain_config(raw, **overrides))
    train(tiny_pretrain_config(smooth, LOG_PERIOD=3, **overrides))
    values = list(metrics(raw).values())
    expected = {2: np.median(values[:3]), 5: np.median(values[3:])}
    assert metrics(smooth) == pytest.approx(expected)


def test_a_loss_that_is_not_finite_stops_the_run_and_saves_nothing(images, tmp_path):
    cfg = tiny_pretrain_config(
        tmp_path,
        DATASETS__TRAIN=(str(images),),
        SOLVER__BASE_LR=1e30,
        SOLVER__SCALE_LR_TO_BATCH=False,
        SOLVER__CHECKPOINT_PERIOD=4,
        LOG_PERIOD=4,
    )
    with pytest.raises(FloatingPointError, match="at iteration"):
        train(cfg)
    assert not (tmp_path / "last_checkpoint").exists()


def test_mixed_precision_and_channels_last_train_and_save_float32(images, tmp_path):
    cfg = tiny_pretrain_config(
        tmp_path,
        DATASETS__TRAIN=(str(images),),
        SOLVER__AMP__ENABLED=True,
        SOLVER__AMP__PRECISION="bfloat16",
        MODEL__CHANNELS_LAST=True,
    )
    plain = tmp_path / "plain"
    train(cfg)
    train(tiny_pretrain_config(plain, DATASETS__TRAIN=(str(images),)))
    np.testing.assert_allclose(
        list(metrics(tmp_path).values()), list(metrics(plain).values()), rtol=0.1
    )
    saved = torch.load(tmp_path / "model_final.pth", weights_only=True)["model"]
    assert {t.dtype for t in saved.values()} == {torch.float32, torch.int64}
