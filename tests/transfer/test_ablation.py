"""Ablations: every grid's recipes, and one cell from pretraining to detection."""

import runpy

import pytest
from detectron2.config import get_cfg

from moco_d2 import add_moco_config
from moco_d2.data.synthetic import SETS, render_demo_data
from moco_d2.errors import UserError
from moco_d2.transfer import ablation as ablations
from moco_d2.transfer.ablation import Ablation, run_ablation
from moco_d2.transfer.grids import GRIDS, Grid, Variant, select_grid
from moco_d2.transfer.sharing import same_runs

STEM = "scenes_faster_rcnn_R18_FPN"
DETECT = f"configs/demo/{STEM}.yaml"
PRETRAIN = {
    "SOLVER.IMS_PER_BATCH": "8",
    "SOLVER.MAX_ITER": "2",
    "SOLVER.WARMUP_ITERS": "1",
    "MODEL.BN_GROUP_SIZE": "4",
    "SOLVER.AMP.ENABLED": "False",
    "MODEL.MOCO.QUEUE_SIZE": "16",
    "LOG_PERIOD": "1",
}
FINE_TUNE = {
    "SOLVER.IMS_PER_BATCH": "2",
    "SOLVER.MAX_ITER": "2",
    "SOLVER.STEPS": "(1,)",
    "DATALOADER.NUM_WORKERS": "0",
    "LOG_PERIOD": "1",
}


@pytest.fixture(scope="module")
def datasets(tmp_path_factory):
    root = tmp_path_factory.mktemp("datasets")
    sizes = dict.fromkeys(SETS, 0)
    sizes |= {"objects_train": 24, "objects_val": 12, "scenes_train": 4}
    sizes |= {"scenes_test": 2, "scenes_val": 2}
    render_demo_data(str(root / "moco_demo"), sizes=sizes, workers=1)
    return str(root)


def words(settings):
    return [word for pair in settings.items() for word in pair]


@pytest.mark.parametrize("name", GRIDS)
def test_variants_of_a_grid_change_existing_keys_and_differ(name):
    grid, seen = GRIDS[name], set()
    for variant in grid.variants:
        cfg = get_cfg()
        add_moco_config(cfg)
        cfg.merge_from_file(str(variant.config or grid.config))
        cfg.merge_from_list(words(variant.options))
        cfg.OUTPUT_DIR = ""
        seen.add((cfg.dump(), variant.batch, variant.length, variant.kind))
    assert len(seen) == len({v.name for v in grid.variants}) == len(grid.variants)


def test_schedules_follow_the_batch_and_drop_where_v1s_does(datasets, tmp_path, monkeypatch):
    monkeypatch.setenv("DETECTRON2_DATASETS", datasets)
    drops = Variant("drops", {"SOLVER.LR_SCHEDULER_NAME": "WarmupMultiStepLR"})
    short = Variant("short", {"SOLVER.LR_SCHEDULER_NAME": "WarmupMultiStepLR"}, length=0.5)
    grid = Grid("?", "", (Variant("half", batch=4), Variant("more", batch=12), drops, short))
    monkeypatch.setitem(ablations.GRIDS, "batches", grid)
    options = words({**PRETRAIN, "SOLVER.MAX_ITER": "40", "SOLVER.WARMUP_ITERS": "4"})
    planned = Ablation(tmp_path, ["batches"], 1, options=options)
    half, more, dropped, short = planned.cells()
    assert planned.problems == []
    keys = ("IMS_PER_BATCH", "MAX_ITER", "WARMUP_ITERS", "BASE_LR")
    assert [half.inputs[f"SOLVER.{key}"] for key in keys] == [4, 80, 8, 5e-4]
    assert [more.inputs[f"SOLVER.{key}"] for key in keys] == [12, 27, 3, 1.5e-3]
    assert dropped.inputs["SOLVER.STEPS"] == (24, 32)
    assert [short.inputs[f"SOLVER.{key}"] for key in keys[:3]] == [8, 20, 2]
    assert short.inputs["SOLVER.STEPS"] == (12, 16)


def test_grids_share_the_recipe_that_they_have_in_common(datasets, tmp_path, monkeypatch):
    monkeypatch.setenv("DETECTRON2_DATASETS", datasets)
    options = words({k: v for k, v in PRETRAIN.items() if k != "MODEL.MOCO.QUEUE_SIZE"})
    planned = Ablation(tmp_path, ["momentum", "shuffle", "temperature", "steps"], 1, 1, options)
    groups = same_runs(planned.cells())
    assert planned.problems == []
    shared = {name: [cell.name for cell in same] for name, same in groups.items() if same}
    demo = [f"{place}/trial_1" for place in ("shuffle/shuffled", "temperature/t0.1")]
    assert shared == {"momentum/m0.995/trial_1": [*demo, "steps/mlp_views_cosine/trial_1"]}


def test_some_variants_of_a_grid_in_its_order():
    name, grid = select_grid("momentum:m0.99,m0")
    assert (name, [v.name for v in grid.variants]) == ("momentum", ["m0", "m0.99"])
    assert select_grid("momentum")[1] == GRIDS["momentum"]
    with pytest.raises(UserError, match="grid momentum has no variant 'm1': give some of m0, m0.9"):
        select_grid("momentum:m0,m1")


def test_what_is_chosen_is_judged_on_the_validation_split(datasets, tmp_path, monkeypatch):
    monkeypatch.setenv("DETECTRON2_DATASETS", datasets)
    how = {"options": words(PRETRAIN), "detect": [DETECT], "detect_options": words(FINE_TUNE)}
    for validate, split in ((False, "test"), (True, "val")):
        planned = Ablation(tmp_path, ["methods:random"], 1, **how, validate=validate)
        (cell,) = planned.cells()
        assert cell.inputs[f"{STEM} DATASETS.TRAIN"] == ("moco_demo_scenes_train",)
        assert cell.inputs[f"{STEM} DATASETS.TEST"] == (f"moco_demo_scenes_{split}",)
        (task,) = planned.describe()["tasks"]
        assert ("validation split" in task["protocol"]) == validate
        assert task["shown"] == ["knn/top1", f"{STEM}/bbox/AP"]


def test_a_grid_named_twice_has_the_variants_of_both(tmp_path):
    ablation = Ablation(tmp_path, ["momentum:m0.99", "shuffle", "momentum:m0,m0.99"], 1)
    variants = {name: [v.name for v in grid.variants] for name, grid in ablation.selected().items()}
    assert variants == {"momentum": ["m0", "m0.99"], "shuffle": ["shuffled", "not_shuffled"]}


def test_nothing_is_overridden_or_mixed_up_without_a_word(datasets, tmp_path, monkeypatch):
    monkeypatch.setenv("DETECTRON2_DATASETS", datasets)
    other = tmp_path / "other" / f"{STEM}.yaml"
    pretrain = tmp_path / "pretrain.yaml"
    own = ["SEED", "3", "SOLVER.STEPS", "(1,)"]
    tested = ["MODEL.WEIGHTS", "", "DATASETS.TEST", "('moco_demo_scenes_train',)"]
    ablation = Ablation(
        tmp_path, ["shuffle"], 1, 1, own, [DETECT, str(other), str(pretrain)], tested, validate=True
    )
    ablation.cells()
    said = " | ".join(ablation.problems)
    for sentence in (
        "SEED is each run's own: leave it out of KEY VALUE",
        "SOLVER.STEPS is each run's own",
        "MODEL.WEIGHTS is each run's own: leave it out of --detect-option",
        "--detect pretrain: rename",
        f"--detect {STEM}: rename",
        "--val takes sets called …_val in place of …_test, and DATASETS.TEST is",
    ):
        assert sentence in said


def test_what_a_grid_sets_cannot_be_set_for_all(datasets, tmp_path, monkeypatch):
    monkeypatch.setenv("DETECTRON2_DATASETS", datasets)
    options = [*words(PRETRAIN), "MODEL.MOCO.MOMENTUM", "0.5"]
    with pytest.raises(UserError, match="grid momentum sets MODEL.MOCO.MOMENTUM: leave it out"):
        run_ablation(Ablation(tmp_path, ["momentum"], 1, options=options), 1, "")
    with pytest.raises(UserError, match="there is no grid 'Momentum': give some of momentum, dict"):
        run_ablation(Ablation(tmp_path, ["Momentum"], 1), 1, "")


def run_here(step):
    """A step in this process, as its command would run it."""
    main = runpy.run_path(step.command[1])["main"]
    assert main(list(step.command[2:])) == 0


def test_a_cell_goes_from_pretraining_to_detection_and_again_bit_for_bit(
    datasets, tmp_path, monkeypatch
):
    monkeypatch.setenv("DETECTRON2_DATASETS", datasets)
    grid = Grid("Does it run?", "", (Variant("t0.2", {"MODEL.MOCO.TEMPERATURE": "0.2"}),))
    monkeypatch.setitem(ablations.GRIDS, "tiny", grid)
    how = (["tiny"], 1, 1, words(PRETRAIN), [DETECT], words(FINE_TUNE))
    planned, again = (Ablation(tmp_path / name, *how) for name in ("first", "again"))
    (cell,), (repeated,) = planned.cells(), again.cells()
    assert [step.name for step in cell.steps] == ["pretrain", "export", f"detect_{STEM}"]
    for step in (*cell.steps, *repeated.steps):
        run_here(step)
    metrics = cell.measured()
    assert repeated.measured() == metrics
    assert 0 <= metrics["knn/top1"] <= 100 and 0 <= metrics["contrastive_acc1"] <= 100
    (task,) = planned.describe()["tasks"]
    assert task["metrics"] == [
        "knn/top1",
        "contrastive_acc1",
        *(f"{STEM}/bbox/{score}" for score in ("AP", "AP50", "AP75")),
    ]
    assert set(task["metrics"]) <= metrics.keys()
    log = (cell.folder / STEM / "log.txt").read_text()
    assert "Loaded all" in log and "backbone.pkl" in log


def test_random_features_are_evaluated_without_training(datasets, tmp_path, monkeypatch):
    monkeypatch.setenv("DETECTRON2_DATASETS", datasets)
    grid = Grid("?", "", (Variant("random", kind="random"),))
    monkeypatch.setitem(ablations.GRIDS, "nothing", grid)
    (cell,) = Ablation(tmp_path, ["nothing"], 1, options=words(PRETRAIN)).cells()
    run_here(cell.steps[0])
    assert set(cell.measured()) == {"knn/top1", "knn/top5"}
