"""Runs of MoCo v3, real and tiny: resumed, started from weights, evaluated, with its schedules."""

import json
import math

import numpy as np
import pytest
import torch
from support import tiny_pretrain_config

from moco_d2.checkpoint import convert
from moco_d2.engine.distributed import unwrap
from moco_d2.engine.trainer import PretrainTrainer

V3 = {
    "MODEL__META_ARCHITECTURE": "MoCoV3",
    "MODEL__RESNETS__ZERO_INIT_RESIDUAL": True,
    "MODEL__BN_GROUP_SIZE": 0,
    "MODEL__MOCO__HEAD": "mlp_bn",
    "MODEL__MOCO__MLP_DIM": 32,
    "MODEL__MOCO__TEMPERATURE": 1.0,
    "MODEL__MOCO__MOMENTUM": 0.99,
    "MODEL__MOCO__MOMENTUM_SCHEDULE": "cosine",
    "INPUT__VIEWS__QUERY": "moco_v3_1",
    "INPUT__VIEWS__KEY": "moco_v3_2",
    "SOLVER__OPTIMIZER": "LARS",
    "SOLVER__BASE_LR": 9.6,
    "SOLVER__SCALE_LR_TO_BATCH": False,
    "SOLVER__WEIGHT_DECAY": 1e-6,
    "SOLVER__LR_SCHEDULER_NAME": "WarmupCosineLR",
    "SOLVER__RESCALE_INTERVAL": True,
    "SOLVER__WARMUP_FACTOR": 0.0,
    "SOLVER__WARMUP_ITERS": 2,
}


def config(images, folder, **overrides):
    return tiny_pretrain_config(folder, DATASETS__TRAIN=(str(images),), **{**V3, **overrides})


def train(cfg, resume=False):
    trainer = PretrainTrainer(cfg)
    trainer.resume_or_load(resume=resume)
    trainer.train()
    return trainer


def metrics(folder):
    lines = map(json.loads, (folder / "metrics.json").read_text().splitlines())
    times = ("time", "data_time", "eta_seconds", "[metric]images_per_second")
    return [{k: v for k, v in line.items() if k not in times} for line in lines]


@pytest.fixture(scope="module")
def whole(images, tmp_path_factory):
    """A run of 8 iterations that is saved after 3 and 6."""
    folder = tmp_path_factory.mktemp("whole")
    train(config(images, folder, SOLVER__MAX_ITER=8, SOLVER__CHECKPOINT_PERIOD=3))
    return folder


def test_metrics_follow_the_formulas_of_v3(whole):
    """Learning rate and momentum per iteration; the chance level 4 tau log(batch)."""
    lines = metrics(whole)
    assert [line["iteration"] for line in lines] == list(range(8))
    for t, line in enumerate(lines):
        lr = 9.6 * (t / 2 if t < 2 else (1 + math.cos(math.pi * (t - 2) / 6)) / 2)
        assert line["lr"] == pytest.approx(lr, rel=1e-9)
        momentum = 1 - 0.5 * (1 + math.cos(math.pi * t / 8)) * (1 - 0.99)
        assert line["key_encoder_momentum"] == pytest.approx(momentum, rel=1e-12)
        assert line["[metric]chance_level"] == pytest.approx(4 * math.log(16))
        assert 0 <= line["[metric]contrastive_acc1"] <= line["[metric]contrastive_acc5"] <= 100
        assert line["loss_spikes"] == line["[metric]gradient_norm_spikes"] == 0


def test_killed_and_resumed_it_is_the_same_run(whole, images, tmp_path):
    class Killed(RuntimeError):
        pass

    cfg = config(images, tmp_path, SOLVER__MAX_ITER=8, SOLVER__CHECKPOINT_PERIOD=3)
    trainer = PretrainTrainer(cfg)
    step = trainer.run_step

    def killed_in_the_fifth_step():
        step()
        if trainer.iter == 4:
            raise Killed

    trainer.run_step = killed_in_the_fifth_step
    with pytest.raises(Killed):
        trainer.train()
    train(cfg, resume=True)
    assert metrics(tmp_path) == metrics(whole)
    ours, theirs = (
        torch.load(folder / "model_final.pth", weights_only=True) for folder in (tmp_path, whole)
    )
    assert ours["spikes"] == theirs["spikes"] and len(ours["spikes"]["recent"]["total_loss"]) == 8
    for name, tensor in theirs["model"].items():
        assert torch.equal(ours["model"][name], tensor), name
    state = theirs["trainer"]["_trainer"]["optimizer"]["state"]
    for i, values in ours["trainer"]["_trainer"]["optimizer"]["state"].items():
        assert torch.equal(values["momentum_buffer"], state[i]["momentum_buffer"])


def test_weights_start_a_run_whole_or_in_both_backbones(whole, images, tmp_path):
    saved = torch.load(whole / "model_final.pth", weights_only=True)["model"]
    exported = str(tmp_path / "backbone.pkl")
    convert(str(whole / "model_final.pth"), exported)
    cfg = config(images, tmp_path, MODEL__WEIGHTS=str(whole / "model_final.pth"))
    trainer = PretrainTrainer(cfg)
    trainer.resume_or_load(resume=False)
    for name, tensor in unwrap(trainer.model).state_dict().items():
        assert torch.equal(tensor, saved[name]), name

    trainer = PretrainTrainer(config(images, tmp_path, MODEL__WEIGHTS=exported))
    fresh = unwrap(trainer.model).predictor[0].weight.clone()
    trainer.resume_or_load(resume=False)
    model = unwrap(trainer.model)
    for encoder in ("encoder_q", "encoder_k"):
        for name, tensor in getattr(model, encoder).backbone.state_dict().items():
            # The export is the query encoder's backbone.
            if not name.endswith("num_batches_tracked"):
                assert torch.equal(tensor, saved[f"encoder_q.backbone.{name}"]), name
    assert torch.equal(model.predictor[0].weight, fresh)


def test_features_are_judged_by_their_neighbours(whole, images, tmp_path):
    cfg = config(
        images,
        tmp_path,
        MODEL__WEIGHTS=str(whole / "model_final.pth"),
        DATASETS__TEST=(str(images),),
    )
    results = PretrainTrainer.eval_only(cfg)
    assert 0 <= results["knn"]["top1"] <= results["knn"]["top5"] == 100  # of two classes


def test_mixed_precision_changes_losses_by_its_rounding_only(whole, images, tmp_path):
    cfg = config(
        images,
        tmp_path,
        SOLVER__MAX_ITER=8,
        SOLVER__AMP__ENABLED=True,
        SOLVER__AMP__PRECISION="bfloat16",
        MODEL__CHANNELS_LAST=True,
    )
    train(cfg)
    losses, expected = (
        [line["loss_contrastive"] for line in metrics(folder)] for folder in (tmp_path, whole)
    )
    np.testing.assert_allclose(losses, expected, rtol=0.05)
    saved = torch.load(tmp_path / "model_final.pth", weights_only=True)["model"]
    assert {t.dtype for t in saved.values()} == {torch.float32, torch.int64}
