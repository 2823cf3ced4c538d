"""Epochs to iterations, lr scaling, and what is refused before anything starts."""

import re

import pytest
from support import tiny_pretrain_config

from moco_d2.engine import recipe
from moco_d2.engine.hooks import MOMENTUM_SCHEDULES
from moco_d2.engine.mechanism import check_batch_keys, resolve_bank_size
from moco_d2.errors import UserError


def resolve(num_images=1000, **overrides):
    cfg = tiny_pretrain_config(**overrides)
    notes = recipe.resolve_schedule(cfg, num_images)
    return cfg.SOLVER, notes


def test_epochs_become_iterations_steps_and_warm_up_included():
    """ImageNet at batch 256, 200 epochs: 200 x 1281167 / 256 = 1000911.7 iterations."""
    solver, _ = resolve(
        1281167,
        SOLVER__IMS_PER_BATCH=256,
        SOLVER__EPOCHS=200,
        SOLVER__STEPS=(120, 160),
        SOLVER__WARMUP_EPOCHS=10.0,
    )
    assert solver.MAX_ITER == 1000911
    assert solver.STEPS == (600547, 800729)
    assert solver.WARMUP_ITERS == 50045


def test_a_warm_up_as_long_as_the_run_is_refused_where_the_schedule_begins_after_it():
    with pytest.raises(ValueError, match="SOLVER.WARMUP_ITERS 4 leaves nothing of 4 iterations"):
        resolve(SOLVER__RESCALE_INTERVAL=True, SOLVER__WARMUP_ITERS=4)
    resolve(SOLVER__WARMUP_ITERS=4)


def test_linear_rule():
    solver, notes = resolve(SOLVER__IMS_PER_BATCH=64, SOLVER__BASE_LR=0.03)
    assert pytest.approx(0.03 * 64 / 256) == solver.BASE_LR
    assert any("-> 0.0075" in note for note in notes)
    solver, _ = resolve(SOLVER__BASE_LR=0.03, SOLVER__SCALE_LR_TO_BATCH=False)
    assert solver.BASE_LR == 0.03


def test_a_resolved_config_stays_as_it_is():
    cfg = tiny_pretrain_config(SOLVER__EPOCHS=3, SOLVER__STEPS=(1, 2))
    recipe.resolve_schedule(cfg, 500)
    before = cfg.dump()
    assert recipe.resolve_schedule(cfg, 500) == []
    assert cfg.dump() == before


def test_steps_past_the_end_are_dropped_and_said():
    solver, notes = resolve(SOLVER__STEPS=(2, 100))
    assert solver.STEPS == (2,) and "past the end" in notes[-1]


BANK = {"MODEL__MOCO__DICTIONARY": "memory_bank"}
IN_BATCH = {"MODEL__MOCO__DICTIONARY": "in_batch"}


@pytest.mark.parametrize(
    ("world_size", "overrides", "message"),
    [
        (3, {}, "does not divide by 3 processes; the nearest that do are 15 and 18"),
        (1, {"MODEL__BN_GROUP_SIZE": 1}, "BN groups of one image"),
        (1, {"SOLVER__IMS_PER_BATCH": 1}, "BN groups of one image"),
        (1, {"MODEL__BN_GROUP_SIZE": 5}, r"the nearest sizes that do are \[2, 4\]"),
        (4, {"MODEL__BN_GROUP_SIZE": 3}, "do not tile a batch of 16 on 4 process"),
        (1, {"MODEL__RESNETS__NORM": "FrozenBN"}, "no normalisation at all"),
        (1, {"MODEL__BACKBONE__FREEZE_AT": 2}, "freezes layers at their random initialisation"),
        (1, {"SOLVER__ACCUMULATE": 3}, r"SOLVER.ACCUMULATE 3 .* possible here: \[1, 2, 4\]"),
        (2, {"SOLVER__ACCUMULATE": 4}, r"SOLVER.ACCUMULATE 4 .* possible here: \[1, 2\]"),
        (1, {"SOLVER__ACCUMULATE": 0}, "SOLVER.ACCUMULATE 0"),
        (
            1,
            {"SOLVER__ACCUMULATE": 2, "MODEL__BN_GROUP_SIZE": 0},
            r"whole BN groups of 16 images .* possible here: \[1\]",
        ),
        (1, {"MODEL__MOCO__MOMENTUM": 1.0}, "MODEL.MOCO.MOMENTUM is 1.0"),
        (1, {"MODEL__MOCO__TEMPERATURE": 0.0}, "MODEL.MOCO.TEMPERATURE is 0.0"),
        (1, {"MODEL__MOCO__QUEUE_SIZE": 0}, "QUEUE_SIZE is 0; it must be at least 1"),
        (1, {"MODEL__MOCO__DICTIONARY": "shelf"}, "'shelf'; known: queue, memory_bank, in_batch"),
        (1, {**BANK, "MODEL__MOCO__SYMMETRIC": True}, "SYMMETRIC True has no meaning with"),
        (1, {**BANK, "MODEL__MOCO__BANK_MOMENTUM": 1.0}, "BANK_MOMENTUM is 1.0"),
        (1, {**BANK, "MODEL__MOCO__BANK_SIZE": 7}, "BANK_SIZE is 7, and DATASETS.TRAIN has 1000"),
        (1, {**BANK, "MODEL__MOCO__QUEUE_SIZE": 1001}, "set it to 1000 or less"),
        # 10^15 numbers: more than any machine has room for.
        (1, {**BANK, "MODEL__MOCO__DIM": 10**12}, r"1000 images takes 4000000\.00 GB .*which has"),
        (1, {**IN_BATCH, "SOLVER__ACCUMULATE": 2}, "ACCUMULATE 2 cannot divide a step of"),
    ],
)
def test_what_cannot_run_or_learn_is_refused_with_what_to_do(world_size, overrides, message):
    with pytest.raises(ValueError, match=message):
        recipe.check_pretraining(tiny_pretrain_config(**overrides), 1000, world_size)


@pytest.mark.parametrize(
    ("keep", "archive", "message"),
    [
        (-1, 0, "CHECKPOINT_KEEP is -1"),
        (3, 7, "ARCHIVE_PERIOD is 7; it must be a multiple of SOLVER.CHECKPOINT_PERIOD 5"),
        (3, -5, "ARCHIVE_PERIOD is -5"),
    ],
)
def test_numbers_of_checkpoints_that_mean_nothing_are_refused(keep, archive, message):
    cfg = tiny_pretrain_config(
        SOLVER__CHECKPOINT_PERIOD=5,
        SOLVER__CHECKPOINT_KEEP=keep,
        SOLVER__CHECKPOINT_ARCHIVE_PERIOD=archive,
    )
    with pytest.raises(ValueError, match=message):
        recipe.check_checkpoints(cfg)


@pytest.mark.parametrize("world_size", [1, 2, 4, 8, 16])
def test_groups_larger_and_smaller_than_a_share_are_accepted(world_size):
    assert recipe.check_pretraining(tiny_pretrain_config(), 1000, world_size) == []


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"MODEL__MOCO__SHUFFLE_BN": False}, "SHUFFLE_BN is off"),
        ({"MODEL__BN_GROUP_SIZE": 0}, "one BN group of all 16 images"),
        ({"MODEL__BN_GROUP_SIZE": 16}, "one BN group of all 16 images"),
        ({"MODEL__MOCO__QUEUE_SIZE": 1001}, "exceeds the 1000 images"),
        ({"MODEL__MOCO__QUEUE_SIZE": 501}, "more than half of the 1000 images: .* a sixth, 166,"),
        (
            {"MODEL__MOCO__QUEUE_SIZE": 2001, "MODEL__MOCO__SYMMETRIC": True},
            "exceeds the 1000 images with two keys each",
        ),
        ({**IN_BATCH, "MODEL__MOCO__SHUFFLE_BN": False}, "SHUFFLE_BN is off"),
        ({**IN_BATCH, "SOLVER__IMS_PER_BATCH": 1004}, "a batch then holds an image twice"),
    ],
)
def test_what_leaks_gets_one_warning(overrides, message):
    (warning,) = recipe.check_pretraining(tiny_pretrain_config(**overrides), 1000, 1)
    assert re.search(message, warning)


def test_no_batch_norm_no_leak():
    cfg = tiny_pretrain_config(MODEL__RESNETS__NORM="GN", MODEL__MOCO__SHUFFLE_BN=False)
    assert recipe.check_pretraining(cfg, 1000, 1) == []


def test_a_memory_bank_has_room_for_all_images():
    cfg = tiny_pretrain_config(**BANK)
    (note,) = resolve_bank_size(cfg, 1000)
    assert cfg.MODEL.MOCO.BANK_SIZE == 1000 and "0 -> 1000" in note
    assert recipe.check_pretraining(cfg, 1000, 1) == resolve_bank_size(cfg, 1000) == []
    assert resolve_bank_size(tiny_pretrain_config(), 1000) == []


@pytest.mark.parametrize(
    "overrides",
    [
        {**BANK, "MODEL__MOCO__SHUFFLE_BN": False},  # positives are from earlier batches
        {**IN_BATCH, "MODEL__MOCO__QUEUE_SIZE": 5000},  # there is no queue
        {"MODEL__MOCO__QUEUE_SIZE": 1000, "MODEL__MOCO__SYMMETRIC": True},
    ],
)
def test_what_concerns_other_dictionaries_is_not_warned_of(overrides):
    assert recipe.check_pretraining(tiny_pretrain_config(**overrides), 1000, 1) == []


@pytest.mark.parametrize(
    ("overrides", "rows"),
    [
        (
            {"MODEL__MOCO__SYMMETRIC": True},
            ["40 keys = 1.2 steps = 0.02 epochs", "mean of both directions", "momentum 0.999"],
        ),
        (
            BANK,
            ["bank of 1000 images (6.4e-05 GB), momentum 0.5, 40 negatives", "log(K + 1) = 3.714"],
        ),
        (IN_BATCH, ["16 keys of the batch, with gradient", "log(batch) = 2.773"]),
    ],
)
def test_table_describes_each_dictionary(overrides, rows):
    table = recipe.recipe_table(recipe.pretrain_rows(tiny_pretrain_config(**overrides), 1000), [])
    assert [row for row in rows if row not in table] == []


def test_table_names_the_chance_level_and_every_choice():
    cfg = tiny_pretrain_config()
    rows = recipe.common_rows(cfg, 2) + recipe.pretrain_rows(cfg, 1000)
    table = recipe.recipe_table(rows, ["MODEL.DEVICE cuda -> cpu"])
    assert "log(K + 1) = 3.714" in table  # log(41)
    assert "16 = 2 process(es) x 8" in table
    assert "4 of 4 images, keys shuffled" in table
    assert "MODEL.DEVICE cuda -> cpu" in table


V3 = {"MODEL__META_ARCHITECTURE": "MoCoV3", "MODEL__BN_GROUP_SIZE": 0}


def test_v3_has_neither_queue_nor_shuffle_to_warn_of():
    cfg = tiny_pretrain_config(**V3, MODEL__MOCO__SHUFFLE_BN=False, MODEL__MOCO__QUEUE_SIZE=1001)
    assert recipe.check_pretraining(cfg, 1000, 1) == []
    (warning,) = recipe.check_pretraining(cfg, 15, 1)
    assert "exceeds the 15 images" in warning
    table = recipe.recipe_table(recipe.pretrain_rows(cfg, 1000), [])
    assert "queue" not in table and "shuffled" not in table
    assert "4 tau log(batch) = 2.218" in table  # 4 x 0.2 x log(16)
    assert "1 of 16 images" in table


@pytest.mark.parametrize(("key", "value"), [("DICTIONARY", "in_batch"), ("SYMMETRIC", True)])
def test_v3_refuses_what_it_does_not_read(key, value):
    cfg = tiny_pretrain_config(**V3, **{f"MODEL__MOCO__{key}": value})
    with pytest.raises(ValueError, match=f"MODEL.MOCO.{key} {value} is for .* MoCo;"):
        recipe.check_pretraining(cfg, 1000, 1)


def test_a_batch_of_one_has_no_negatives():
    cfg = tiny_pretrain_config(**V3, SOLVER__IMS_PER_BATCH=1)
    with pytest.raises(UserError, match="SOLVER.IMS_PER_BATCH 1 leaves a query no negatives"):
        check_batch_keys(cfg, 1000)


def test_momentum_schedules():
    """Constant; and 1 - (1 - m)(1 + cos(pi t / T)) / 2 at t = 0, T/2, T for m = 0.99."""
    assert MOMENTUM_SCHEDULES["constant"](0.99, 0.5) == 0.99
    values = [MOMENTUM_SCHEDULES["cosine"](0.99, t) for t in (0.0, 0.5, 1.0)]
    assert values == pytest.approx([0.99, 0.995, 1.0])
