"""Published numbers: the file is whole, and runs are held against them only where that is fair."""

import copy
from pathlib import Path

import pytest
import yaml

from moco_d2.engine.scaling import scale_to_processes
from moco_d2.transfer.protocol import departures, load_config
from moco_d2.transfer.published import PATH, parse, published_results

CONFIGS = Path("configs/transfer")
CONTENT = yaml.safe_load(PATH.read_text())
VOC = "voc_0712_R50_C4_24k"


def test_every_task_is_a_config():
    configs = {path.stem for path in CONFIGS.glob("[!B]*.yaml")}
    # Nothing is published for MoCo v3 under ViTDet's protocol.
    assert set(CONTENT["tasks"]) == configs - {"coco_ViT_B_SFP"}


def test_every_source_and_initialisation_is_used():
    rows = [row for task in CONTENT["tasks"].values() for row in task["rows"]]
    assert {row["init"] for row in rows} == set(CONTENT["inits"])
    used = {row["source"] for row in rows} | {row.get("seen_in") for row in rows}
    assert used - {None} == set(CONTENT["sources"])


def test_values_of_the_official_repository():
    # facebookresearch/moco, detection/README.md: AP of 200 epochs of v2, mean of 5, std 0.2.
    value = published_results().tasks[VOC].find("moco_v2_200ep", "bbox/AP")
    assert (value.value, value.std, value.runs, value.verified) == (57.0, 0.2, 5, True)


def test_a_number_nobody_has_seen_is_unverified():
    task = published_results().tasks["coco_R50_FPN_1x"]
    assert task.find("supervised_msra", "bbox/AP").verified
    assert not task.find("supervised_msra", "bbox/AP50").verified


@pytest.mark.parametrize(
    "change, message",
    [
        ({"init": "mocov9"}, "mocov9"),
        ({"source": "hearsay"}, "hearsay"),
        ({"seen_in": "hearsay"}, "hearsay"),
        ({"metrics": {"bbox/AP": 0.535, "bbox/AP50": 813.0}}, "813"),
        ({"sauce": "x"}, "sauce"),
    ],
)
def test_a_row_that_says_what_it_cannot_is_refused(change, message):
    content = copy.deepcopy(CONTENT)
    content["tasks"][VOC]["rows"][0].update(change)
    with pytest.raises(ValueError, match=message):
        parse(content)


@pytest.mark.parametrize("name", sorted(CONTENT["tasks"]))
def test_a_tasks_own_config_is_its_protocol(name):
    found = departures(name, load_config(CONFIGS / f"{name}.yaml"))
    reason = CONTENT["tasks"][name].get("not_comparable")
    assert found == ([reason] if reason else [])


@pytest.mark.parametrize("processes", [4, 5, 8, 12, 16])
def test_linear_scaling_keeps_to_the_protocol(processes):
    scaled, _ = scale_to_processes(load_config(CONFIGS / f"{VOC}.yaml"), processes)
    assert departures(VOC, scaled) == []


@pytest.mark.parametrize("processes, batch", [(1, 2), (2, 4), (3, 6), (17, 34), (64, 128)])
def test_batch_norm_over_far_fewer_or_more_images_is_another_protocol(processes, batch):
    scaled, _ = scale_to_processes(load_config(CONFIGS / f"{VOC}.yaml"), processes)
    assert departures(VOC, scaled) == [f"SOLVER.IMS_PER_BATCH is {batch}, not 16"]


@pytest.mark.parametrize(
    "key, value",
    [
        ("SOLVER.MAX_ITER", 2000),
        ("SOLVER.BASE_LR", 0.01),
        ("SOLVER.STEPS", (18000,)),
        ("MODEL.ROI_HEADS.NAME", "Res5ROIHeads"),
        ("MODEL.RESNETS.NORM", "FrozenBN"),
        ("MODEL.RESNETS.DEPTH", 101),
        ("MODEL.BACKBONE.FREEZE_AT", 2),
        ("DATASETS.TRAIN", ("voc_2007_trainval",)),
        ("DATASETS.FEW_LABELS", 0.1),
        ("INPUT.MIN_SIZE_TEST", 400),
    ],
)
def test_another_protocol_is_told_from_the_published_one(key, value):
    cfg = load_config(CONFIGS / f"{VOC}.yaml")
    cfg.merge_from_list([key, value])
    assert len(departures(VOC, cfg)) == 1


@pytest.mark.parametrize(
    "key, value",
    [
        ("MODEL.RESNETS.NORM", "BN"),  # one process
        ("MODEL.RESNETS.STRIDE_IN_1X1", True),  # comes with the weights, as the next does
        ("INPUT.FORMAT", "BGR"),
        ("SEED", 3),
        ("OUTPUT_DIR", "elsewhere"),
    ],
)
def test_hardware_and_initialisation_are_not_part_of_the_protocol(key, value):
    cfg = load_config(CONFIGS / f"{VOC}.yaml")
    cfg.merge_from_list([key, value])
    assert departures(VOC, cfg) == []
