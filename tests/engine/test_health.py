"""Each alarm, provoked by a run or by values such a run logs; and runs that provoke none."""

import json

import cv2
import jobs
import numpy as np
import pytest
from detectron2.utils.events import EventStorage
from support import tiny_pretrain_config

from moco_d2.engine.alarms import Alarms
from moco_d2.engine.health import Health
from moco_d2.engine.trainer import PretrainTrainer

LOSS, CHANCE = "total_loss", "[metric]chance_level"
ACCURACY = "[metric]contrastive_acc1"
STD, RANK = "[metric]feature_std", "[metric]effective_rank"


@pytest.fixture(scope="module")
def many_images(tmp_path_factory):
    """Four times as many as the queue of these tests holds."""
    return jobs.draw_images(tmp_path_factory.mktemp("many"), 128)


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(Health, "window", 8)


def config(output="", **overrides):
    """A job that learns within some ten steps: near-identical views, few and fresh keys."""
    options = {
        "MODEL__RESNETS__OUT_FEATURES": ["res2"],
        "MODEL__BN_GROUP_SIZE": 8,
        "MODEL__MOCO__QUEUE_SIZE": 32,
        "MODEL__MOCO__MOMENTUM": 0.8,
        "MODEL__MOCO__TEMPERATURE": 0.1,
        "INPUT__VIEWS__QUERY": "supervised",
        "INPUT__VIEWS__KEY": "supervised",
        "INPUT__VIEWS__MIN_CROP": 0.6,
        "SOLVER__OPTIMIZER": "ADAMW",
        "SOLVER__BASE_LR": 2e-3,
        "SOLVER__SCALE_LR_TO_BATCH": False,
        "SOLVER__MAX_ITER": 18,
        "MONITORS__PERIOD": 2,
        **overrides,
    }
    return tiny_pretrain_config(output, **options)


# Nothing is learned, and random weights do not tell views as different as these from others.
STUCK = {
    "SOLVER__BASE_LR": 1e-12,
    "INPUT__VIEWS__QUERY": "moco_v2",
    "INPUT__VIEWS__KEY": "moco_v2",
    "INPUT__VIEWS__MIN_CROP": 0.0,
}


def alarms_of_run(images, folder, **overrides):
    trainer = PretrainTrainer(config(folder, DATASETS__TRAIN=(str(images),), **overrides))
    trainer.train()
    # How busy the machine is decides whether the loader is too slow for so small a network.
    return {kind for kind in trainer.alarms.said if kind != "loader"}


def test_a_healthy_run_provokes_none(quick, many_images, tmp_path):
    assert alarms_of_run(many_images, tmp_path) == set()


def test_images_that_are_all_the_same_collapse(quick, tmp_path, caplog):
    (tmp_path / "images").mkdir()
    for i in range(64):
        cv2.imwrite(str(tmp_path / f"images/{i}.png"), np.full((40, 40, 3), 90, np.uint8))
    assert alarms_of_run(tmp_path / "images", tmp_path / "run") == {"collapse"}
    assert caplog.text.count("ALARM (collapse)") == 1


def test_a_learning_rate_of_next_to_nothing_stays_at_chance(quick, many_images, tmp_path):
    assert alarms_of_run(many_images, tmp_path, **STUCK) == {"stuck_at_chance"}


def test_a_learning_rate_far_too_high_collapses(quick, many_images, tmp_path):
    assert "collapse" in alarms_of_run(many_images, tmp_path, SOLVER__BASE_LR=0.3)


class Feed:
    """Hands values to a Health as a run of a thousand images does."""

    def __init__(self, num_images=1000, **overrides):
        options = {"MODEL__MOCO__QUEUE_SIZE": 64, "SOLVER__MAX_ITER": 10_000, **overrides}
        self.alarms = Alarms()
        self.health = Health(tiny_pretrain_config(**options), num_images, self.alarms)
        self.storage, self.iteration = EventStorage(), 0

    def __call__(self, count, knn=None, **values):
        """`count` iterations with these values, then an evaluation; returns what has been said."""
        names = {"loss": LOSS, "accuracy": ACCURACY, "std": STD, "rank": RANK}
        iterations = range(self.iteration, self.iteration + count)
        written = {names[key]: [(i, value) for i in iterations] for key, value in values.items()}
        if "loss" in values:
            written[CHANCE] = [(i, 4.0) for i in iterations]
        with self.storage:
            self.health.update(written, self.storage)
        self.iteration += count
        if knn is not None:
            self.storage.put_scalar("knn/top1", knn, cur_iter=self.iteration - 1)
        return self.alarms.said


def test_the_loss_is_judged_when_the_queue_has_turned_over_twice():
    """64 keys at 16 a step: 8 steps, then a window of 100 values."""
    feed = Feed()
    assert feed.health.first == 8
    assert feed(107, loss=3.93) == []
    assert feed(1, loss=3.93) == ["stuck_at_chance"]
    assert [value for value, _ in feed.storage.history("loss_over_chance").values()] == [
        pytest.approx(3.93 / 4)
    ] * 108


@pytest.mark.parametrize(
    ("overrides", "first"),
    [
        ({"MODEL__MOCO__SYMMETRIC": True}, 4),
        ({"SOLVER__WARMUP_ITERS": 50}, 50),
        ({"MODEL__MOCO__DICTIONARY": "memory_bank"}, 125),  # 2 x 1000 / 16
        ({"MODEL__MOCO__DICTIONARY": "in_batch"}, 0),
        ({"MODEL__META_ARCHITECTURE": "MoCoV3"}, 0),
    ],
)
def test_when_judging_begins(overrides, first):
    assert Feed(**overrides).health.first == first


def test_a_loss_that_falls_below_the_threshold_is_none():
    assert Feed()(400, loss=3.9) == []


def test_an_accuracy_near_one_without_the_shuffle_is_a_leak():
    assert Feed()(400, accuracy=99.0) == []
    assert Feed(MODEL__MOCO__SHUFFLE_BN=False)(400, accuracy=94.0) == []
    assert Feed(MODEL__MOCO__SHUFFLE_BN=False)(400, accuracy=99.0) == ["bn_leak"]
    assert Feed(MODEL__BN_GROUP_SIZE=16)(400, accuracy=99.0) == ["bn_leak"]
    bank = {"MODEL__MOCO__DICTIONARY": "memory_bank", "MODEL__MOCO__SHUFFLE_BN": False}
    assert Feed(**bank)(400, accuracy=99.0) == []  # positives are from earlier batches


def test_a_run_without_the_shuffle_that_solves_its_task_says_so(quick, many_images, tmp_path):
    """Both views are the same, so that it is solved from the start."""
    easy = {
        "INPUT__VIEWS__QUERY": "center_crop",
        "INPUT__VIEWS__KEY": "center_crop",
        "INPUT__VIEWS__MIN_CROP": 0.0,
        "SOLVER__BASE_LR": 1e-5,  # the key encoder hardly lags
    }
    said = alarms_of_run(many_images, tmp_path, MODEL__MOCO__SHUFFLE_BN=False, **easy)
    assert said == {"bn_leak"}


def test_an_accuracy_near_one_while_knn_falls_is_a_leak(caplog):
    feed = Feed()
    feed(200, accuracy=97.0, knn=60.0)
    feed(100, accuracy=97.0, knn=53.0)  # once may be noise
    assert feed(100, accuracy=97.0, knn=52.0) == []
    assert feed(1, accuracy=97.0) == ["bn_leak"]
    assert "kNN accuracy has fallen from 60.0 to 52.0 %" in caplog.text
    steady = Feed()
    for knn in (60.0, 53.0, 60.0, 53.0, 61.0, 61.0):
        assert steady(100, accuracy=97.0, knn=knn) == []


@pytest.mark.parametrize(
    ("overrides", "negatives", "groups"),
    [
        ({}, "MODEL.MOCO.QUEUE_SIZE", True),
        ({"MODEL__MOCO__DICTIONARY": "in_batch"}, "SOLVER.IMS_PER_BATCH", True),
        ({"MODEL__META_ARCHITECTURE": "MoCoV3"}, "SOLVER.IMS_PER_BATCH", False),
    ],
)
def test_what_to_try_are_keys_that_the_run_uses(caplog, overrides, negatives, groups):
    feed = Feed(**overrides)
    for knn in (60.0, 53.0, 52.0):
        feed(100, accuracy=97.0, knn=knn, loss=4.0)
    assert set(feed(1, accuracy=97.0)) >= {"bn_leak", "stuck_at_chance"}
    (leak,) = (r.message for r in caplog.records if "(bn_leak)" in r.message)
    (stuck,) = (r.message for r in caplog.records if "(stuck_at_chance)" in r.message)
    assert f"a larger {negatives}" in leak and ("BN_GROUP_SIZE" in leak) is groups
    assert stuck.endswith(f"lower {negatives}")


def test_only_the_main_process_says_an_alarm_that_all_judge(caplog, monkeypatch):
    monkeypatch.setattr("moco_d2.engine.alarms.comm.is_main_process", lambda: False)
    feed = Feed()
    assert feed(150, loss=4.0) == ["stuck_at_chance"] and not caplog.records


def test_three_looks_in_a_row_make_a_collapse():
    feed = Feed()
    feed(8)
    for std in (0.05, 0.05, 0.9, 0.05, 0.05):
        assert feed(1, std=std, rank=20.0) == []
    assert feed(1, std=0.05, rank=20.0) == ["collapse"]
    flat = Feed()
    flat(8)
    assert flat(3, std=0.9, rank=1.5) == ["collapse"]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"MODEL__MOCO__MOMENTUM": 0.9, "MODEL__MOCO__QUEUE_SIZE": 160}, []),  # 10 steps x 0.1 = 1
        ({"MODEL__MOCO__MOMENTUM": 0.9, "MODEL__MOCO__QUEUE_SIZE": 176}, ["momentum_too_fast"]),
        ({"MODEL__MOCO__MOMENTUM": 0.0, "MODEL__MOCO__QUEUE_SIZE": 16}, []),
        ({"MODEL__MOCO__MOMENTUM": 0.999, "SOLVER__MAX_ITER": 3000}, []),  # exp(-3) = 0.0498
        ({"MODEL__MOCO__MOMENTUM": 0.999, "SOLVER__MAX_ITER": 2990}, ["momentum_too_slow"]),
        (
            {
                "MODEL__MOCO__MOMENTUM": 0.999,
                "SOLVER__MAX_ITER": 3000,
                "MODEL__MOCO__MOMENTUM_SCHEDULE": "cosine",
            },
            ["momentum_too_slow"],
        ),
        ({"MODEL__MOCO__DICTIONARY": "in_batch", "SOLVER__MAX_ITER": 10}, []),
        ({"MODEL__META_ARCHITECTURE": "MoCoV3", "MODEL__MOCO__MOMENTUM": 0.0}, []),
        ({"MODEL__META_ARCHITECTURE": "MoCoV3", "SOLVER__MAX_ITER": 10}, ["momentum_too_slow"]),
    ],
)
def test_momentum_against_the_life_of_the_queue_and_of_the_run(overrides, said):
    assert Feed(**overrides)(1) == said


def test_an_alarm_is_said_once_in_a_run_and_its_resumes(caplog):
    first, second = Feed(), Feed()
    first(150, loss=4.0)
    state = json.loads(json.dumps([first.alarms.state_dict(), first.health.state_dict()]))
    second.alarms.load_state_dict(state[0])
    second.health.load_state_dict(state[1])
    second.iteration = 150
    second(500, loss=4.0)
    assert caplog.text.count("ALARM") == 1 and second.alarms.said == ["stuck_at_chance"]


def test_judging_goes_on_from_its_state():
    whole, first, second = Feed(), Feed(), Feed()
    for feed in (whole, first):
        feed(60, loss=4.0, accuracy=97.0, knn=60.0)
    second.health.load_state_dict(json.loads(json.dumps(first.health.state_dict())))
    second.iteration, second.storage = 60, first.storage
    for feed in (whole, second):
        feed(48, loss=4.0, accuracy=97.0, knn=40.0)
        feed(10, accuracy=97.0, knn=40.0)
        feed(1, accuracy=97.0)
    assert whole.alarms.said == second.alarms.said == ["stuck_at_chance", "bn_leak"]
    assert whole.health.state_dict() == second.health.state_dict()


def test_a_resumed_run_does_not_repeat_its_alarms(quick, many_images, tmp_path, caplog):
    overrides = {**STUCK, "SOLVER__LR_SCHEDULER_NAME": "WarmupMultiStepLR"}
    alarms_of_run(many_images, tmp_path, SOLVER__STEPS=(), **overrides)
    cfg = config(
        tmp_path,
        DATASETS__TRAIN=(str(many_images),),
        SOLVER__STEPS=(),
        **{**overrides, "SOLVER__MAX_ITER": 30},
    )
    trainer = PretrainTrainer(cfg)
    trainer.resume_or_load(resume=True)
    assert trainer.start_iter == 18
    trainer.train()
    assert caplog.text.count("ALARM (stuck_at_chance)") == 1
