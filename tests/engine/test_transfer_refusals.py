"""TransferTrainer: what cannot work is refused with a sentence, before anything is built."""

import pickle
from pathlib import Path

import pytest
import torch
from detectron2.data import DatasetCatalog, MetadataCatalog
from tiny_transfer import tiny_config
from weights import moco_checkpoint

import moco_d2.modeling.fpn
import moco_d2.modeling.roi_heads  # noqa: F401 (registers)
from moco_d2.checkpoint import CheckError, WeightsError
from moco_d2.engine.backbones import check_heads
from moco_d2.engine.transfer import TransferTrainer
from moco_d2.errors import UserError


def test_weights_that_do_not_match_entirely_stop_the_run(pictures, exported, tmp_path):
    content = pickle.loads(Path(exported).read_bytes())
    content["model"]["res3.0.conv9.weight"] = content["model"].pop("res3.0.conv1.weight")
    (tmp_path / "bad.pkl").write_bytes(pickle.dumps(content))
    trainer = TransferTrainer(tiny_config(tmp_path / "run", str(tmp_path / "bad.pkl")))
    with pytest.raises(CheckError, match="missing: res3.0.conv1.weight; not used: res3.0.conv9"):
        trainer.resume_or_load(resume=False)


def test_weights_to_be_converted_first_are_refused_before_anything_is_built(pictures, tmp_path):
    torch.save(moco_checkpoint(18), tmp_path / "moco.pth")
    with pytest.raises(WeightsError, match="moco.pth is a pretraining checkpoint.* OUT.pkl"):
        TransferTrainer.effective_config(tiny_config(tmp_path, str(tmp_path / "moco.pth")), 1)


def test_proposals_from_a_file_need_no_maps(pictures, tmp_path):
    unused = {"MODEL__RPN__IN_FEATURES": ["res9"]}
    check_heads(
        tiny_config(tmp_path, MODEL__PROPOSAL_GENERATOR__NAME="PrecomputedProposals", **unused)
    )
    with pytest.raises(UserError, match="RPN.IN_FEATURES is"):
        check_heads(tiny_config(tmp_path, **unused))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"DATASETS__TEST": ("nowhere",)}, "'nowhere', which is not a registered data set"),
        ({"DATASETS__TEST": ("untyped",)}, "'untyped' has no evaluator_type"),
        ({"DATASETS__TEST": ("strange",)}, "has evaluator_type 'smell'"),
        ({"MODEL__KEYPOINT_ON": True, "MODEL__ROI_KEYPOINT_HEAD__NUM_KEYPOINTS": 9}, "needs 9 val"),
        ({"MODEL__BACKBONE__FREEZE_AT": 2}, "MODEL.BACKBONE.FREEZE_AT 2 without MODEL.WEIGHTS"),
        ({"MODEL__RESNETS__NORM": "FrozenBN"}, "MODEL.RESNETS.NORM FrozenBN"),
        ({"DATALOADER__SAMPLER_TRAIN": "Mine"}, "SAMPLER_TRAIN is 'Mine'; known: TrainingSampler"),
        ({"MODEL__WEIGHTS": "nothing.pkl"}, "there is no weight file nothing.pkl"),
        ({"MODEL__ROI_HEADS__NAME": "Mine"}, "ROI_HEADS.NAME is 'Mine'; known: CascadeROIHeads, "),
        ({"MODEL__ROI_BOX_HEAD__NAME": "Mine"}, "ROI_BOX_HEAD.NAME is 'Mine'; known: Fast"),
        ({"MODEL__FPN__NORM": "Mine"}, "MODEL.FPN.NORM is 'Mine'; known: BN, "),
        ({"MODEL__FPN__IN_FEATURES": ["res2", "res4"]}, "FPN.IN_FEATURES has 'res2', which MODEL"),
        ({"MODEL__RPN__IN_FEATURES": ["p3", "p6"]}, "RPN.IN_FEATURES is .* makes p3, p4"),
        ({"MODEL__ROI_HEADS__IN_FEATURES": ["res4"]}, "ROI_HEADS.IN_FEATURES is .* makes p3, p4"),
        ({"MODEL__ANCHOR_GENERATOR__SIZES": [[8], [16], [32]]}, "SIZES has 3 lists, .* 2 names"),
        ({"INPUT__FORMAT": "rgb"}, "INPUT.FORMAT is 'rgb'; known: BGR, RGB, "),
        ({"INPUT__FORMAT": "L"}, "for 3 channels, and INPUT.FORMAT L has 1"),
        ({"INPUT__MIN_SIZE_TRAIN_SAMPLING": "any"}, "SAMPLING is 'any'; known: choice, range"),
        ({"INPUT__MIN_SIZE_TRAIN_SAMPLING": "range"}, r"MIN_SIZE_TRAIN is \(64,\); give"),
        ({"INPUT__MIN_SIZE_TRAIN": ()}, r"MIN_SIZE_TRAIN is \(\); give"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_built(pictures, tmp_path, options, message):
    for name, metadata in (("untyped", {}), ("strange", {"evaluator_type": "smell"})):
        if name not in DatasetCatalog.list():
            DatasetCatalog.register(name, list)
            MetadataCatalog.get(name).set(**metadata)
    with pytest.raises(ValueError, match=message):
        TransferTrainer(tiny_config(tmp_path / "run", **options))
    assert not list((tmp_path / "run").iterdir())


@pytest.mark.parametrize(
    "options, message",
    [
        ({"DATASETS__TRAIN": ()}, r"DATASETS.TRAIN is \(\), .* train on registered data sets"),
        ({"DATASETS__TRAIN": ("nowhere",)}, r"DATASETS.TRAIN is \('nowhere',\)"),
        ({"DATASETS__TRAIN": ("bare",)}, "bare has no annotations"),
        ({"MODEL__KEYPOINT_ON": True}, "metadata of 'tiny_train' has no keypoint_names"),
        (
            {"MODEL__ROI_HEADS__NUM_CLASSES": 1},
            "NUM_CLASSES is 1, .* tiny_train are of classes up to number 1, from 0: set it to 2",
        ),
    ],
)
def test_data_that_nothing_can_be_learned_from_are_refused(pictures, tmp_path, options, message):
    if "bare" not in DatasetCatalog.list():
        DatasetCatalog.register("bare", lambda: [{"file_name": "a.png", "width": 8, "height": 8}])
    with pytest.raises(UserError, match=message):
        TransferTrainer(tiny_config(tmp_path / "run", **options)).train()
