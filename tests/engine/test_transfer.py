"""TransferTrainer: weights, conventions, norms, evaluation, on a few tiny pictures."""

import json
import pickle
from pathlib import Path

import pytest
import torch
from detectron2.config import get_cfg
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.evaluation import COCOEvaluator, PascalVOCDetectionEvaluator, SemSegEvaluator
from detectron2.structures import Boxes, Instances
from detectron2.utils import comm
from jobs import TIMES
from support import run_processes
from tiny_transfer import tiny_config
from weights import RGB, detectron2_resnet, register_tiny_coco

import moco_d2.modeling.fpn
import moco_d2.modeling.roi_heads  # noqa: F401 (registers)
from moco_d2 import add_moco_config
from moco_d2.checkpoint import WeightsError, convention_of
from moco_d2.engine.transfer import TransferTrainer
from moco_d2.errors import UserError
from moco_d2.evaluation.evaluators import evaluator_type

BGR = {
    "format": "BGR",
    "pixel_mean": [1.0, 2.0, 3.0],
    "pixel_std": [1.0, 1.0, 1.0],
    "stride_in_1x1": True,
}


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def backbone_tensors(model):
    state, prefix = model.state_dict(), "backbone.bottom_up."
    return {n.removeprefix(prefix): t for n, t in state.items() if n.startswith(prefix)}


def metrics(run):
    return [json.loads(line) for line in (run / "metrics.json").read_text().splitlines()]


def test_a_detector_trains_from_exported_weights_and_is_evaluated(pictures, exported, tmp_path):
    cfg = tiny_config(tmp_path / "run", exported, TEST__PRECISE_BN__ENABLED=True)
    trainer = TransferTrainer(cfg)
    trainer.resume_or_load(resume=False)
    weights = pickle.loads(Path(exported).read_bytes())["model"]
    for name, tensor in backbone_tensors(trainer.model).items():
        assert torch.equal(tensor, torch.from_numpy(weights[name]))
    trainer.train()
    # Precise BN replaced the statistics; the stem, stage 1, was trained like the rest.
    after = backbone_tensors(trainer.model)
    for name in ("stem.conv1.weight", "stem.conv1.norm.weight", "res4.1.conv2.norm.running_var"):
        assert not torch.equal(after[name], torch.from_numpy(weights[name]))
    lines = metrics(tmp_path / "run")
    evaluated = next(line for line in lines if "bbox/AP50" in line)
    assert all(k in lines[0] for k in ("loss_cls", "loss_rpn_loc", "total_loss"))
    saved = torch.load(tmp_path / "run" / "model_final.pth", weights_only=True)
    assert saved["input"] == RGB

    results = TransferTrainer.eval_only(
        tiny_config(tmp_path / "eval", str(tmp_path / "run" / "model_final.pth"))
    )
    assert set(results["bbox"]) >= {"AP", "AP50", "AP75"}
    assert results["bbox"]["AP50"] == pytest.approx(evaluated["bbox/AP50"], nan_ok=True)
    resumed = TransferTrainer.eval_only(tiny_config(tmp_path / "run"), resume=True)
    assert resumed["bbox"] == pytest.approx(results["bbox"], nan_ok=True)


def test_resume_goes_on_where_the_run_stopped(pictures, exported, tmp_path):
    cfg = tiny_config(tmp_path / "run", exported, SOLVER__CHECKPOINT_PERIOD=2, DATASETS__TEST=())
    trainer = TransferTrainer(cfg)
    trainer.resume_or_load(resume=True)  # nothing to resume: MODEL.WEIGHTS is loaded
    assert trainer.start_iter == 0
    trainer.train()
    (tmp_path / "run" / "last_checkpoint").write_text("model_0000001.pth")
    saved = torch.load(tmp_path / "run" / "model_0000001.pth", weights_only=True)["model"]
    again = TransferTrainer(cfg)
    again.resume_or_load(resume=True)
    assert again.start_iter == 2
    assert all(torch.equal(t, saved[n]) for n, t in again.model.state_dict().items())
    changed = tiny_config(tmp_path / "run", DATASETS__TEST=(), INPUT__FORMAT="BGR")
    with pytest.raises(WeightsError, match="trained with INPUT.FORMAT RGB, the config says BGR"):
        TransferTrainer(changed).resume_or_load(resume=True)
    other = tiny_config(tmp_path / "run", DATASETS__TEST=(), SOLVER__IMS_PER_BATCH=4)
    with pytest.raises(UserError, match="IMS_PER_BATCH is 4 and was 2 .*run/config.yaml SOLVER"):
        TransferTrainer(other).resume_or_load(resume=True)


def test_frozen_batch_norm_keeps_its_statistics_with_precise_bn_on(pictures, exported, tmp_path):
    frozen = {"MODEL__RESNETS__NORM": "FrozenBN", "MODEL__FPN__NORM": "", "SOLVER__MAX_ITER": 1}
    cfg = tiny_config(tmp_path / "run", exported, TEST__PRECISE_BN__ENABLED=True, **frozen)
    trainer = TransferTrainer(cfg)
    trainer.resume_or_load(resume=False)
    trainer.train()
    weights = pickle.loads(Path(exported).read_bytes())["model"]
    after = backbone_tensors(trainer.model)
    for name in ("stem.conv1.norm.running_mean", "res4.1.conv2.norm.weight"):
        assert torch.equal(after[name], torch.from_numpy(weights[name]))
    assert not torch.equal(
        after["stem.conv1.weight"], torch.from_numpy(weights["stem.conv1.weight"])
    )


def test_random_initialisation_is_logged(pictures, tmp_path, caplog):
    trainer = TransferTrainer(tiny_config(tmp_path / "run"))
    with caplog.at_level("INFO", "moco_d2"):
        trainer.resume_or_load(resume=False)
    assert "initialised at random" in caplog.text


def test_weights_bring_their_input_convention(pictures, tmp_path):
    state = detectron2_resnet(18, "res4").state_dict()
    torch.save({"model": state, "input": BGR}, tmp_path / "bgr.pth")
    cfg, notes = TransferTrainer.effective_config(
        tiny_config(tmp_path, str(tmp_path / "bgr.pth")), 1
    )
    assert convention_of(cfg) == BGR
    assert "INPUT.FORMAT: RGB -> BGR (stated by MODEL.WEIGHTS)" in notes
    assert len([n for n in notes if "MODEL.WEIGHTS" in n]) == 4
    again, notes = TransferTrainer.effective_config(cfg, 1)
    assert again == cfg and notes == []
    assert "BGR, mean" in TransferTrainer.describe(cfg, 1, notes)
    torch.save({"model": state}, tmp_path / "none.pth")
    cfg, notes = TransferTrainer.effective_config(
        tiny_config(tmp_path, str(tmp_path / "none.pth")), 1
    )
    assert convention_of(cfg) == RGB
    assert any("states no convention" in note for note in notes)


def test_reference_world_size_scales_the_recipe(pictures, tmp_path):
    cfg = tiny_config(tmp_path, SOLVER__REFERENCE_WORLD_SIZE=2, SOLVER__MAX_ITER=100)
    cfg, notes = TransferTrainer.effective_config(cfg, 1)
    assert (cfg.SOLVER.IMS_PER_BATCH, cfg.SOLVER.MAX_ITER, cfg.SOLVER.BASE_LR) == (1, 200, 0.01)
    note = "SOLVER.MAX_ITER 100 -> 200 (SOLVER.REFERENCE_WORLD_SIZE 2 -> 1)"
    assert note in notes
    assert any("batch norm sees 1 images instead of 2" in note for note in notes)
    assert note in TransferTrainer.describe(cfg, 1, notes)
    assert TransferTrainer.effective_config(cfg, 1)[0] == cfg


def test_evaluators_follow_the_data_set(pictures, tmp_path):
    if "tiny_sem_seg" not in DatasetCatalog.list():
        DatasetCatalog.register("tiny_sem_seg", list)
        MetadataCatalog.get("tiny_sem_seg").set(
            evaluator_type="sem_seg", stuff_classes=["a", "b"], ignore_label=255
        )
    cfg = tiny_config(tmp_path)
    for name, evaluator in (
        ("tiny_train", COCOEvaluator),
        ("voc_2007_test", PascalVOCDetectionEvaluator),
        ("tiny_sem_seg", SemSegEvaluator),
    ):
        assert isinstance(TransferTrainer.build_evaluator(cfg, name), evaluator)
    assert evaluator_type("keypoints_coco_2017_val") == "coco"


def test_keypoints_are_evaluated_with_the_sigmas_of_the_config(pictures, tmp_path):
    """A prediction off by d scores exp(-(d / (2 sigma))^2 / (2 area)) in COCO's OKS."""
    content = json.loads((pictures / "instances.json").read_text())
    content["categories"][0].update(keypoints=["a", "b"], skeleton=[])
    for annotation in content["annotations"]:
        annotation.update(category_id=1, keypoints=[10, 10, 2, 20, 20, 2], num_keypoints=2)
    content["categories"] = content["categories"][:1]
    (pictures / "instances.json").write_text(json.dumps(content))
    DatasetCatalog.get("tiny_train")  # reading the set tells detectron2 its category ids
    average_precision = []
    for sigma in (0.05, 10.0):
        cfg = tiny_config(tmp_path / "run", TEST__KEYPOINT_OKS_SIGMAS=[sigma] * 2)
        evaluator = TransferTrainer.build_evaluator(cfg, "tiny_train")
        evaluator.reset()
        for i in range(4):
            found = Instances((64, 64))
            found.pred_boxes = Boxes(torch.tensor([[2.0, 2.0, 30.0, 30.0]]))
            found.scores, found.pred_classes = torch.tensor([0.9]), torch.tensor([0])
            # Off by 30 pixels in x.
            found.pred_keypoints = torch.tensor([[[40.5, 10.5, 1.0], [50.5, 20.5, 1.0]]])
            evaluator.process([{"image_id": i}], [{"instances": found}])
        average_precision.append(evaluator.evaluate()["keypoints"]["AP"])
    assert average_precision == [0.0, pytest.approx(100.0)]


class Interrupted(Exception):
    pass


class StoppedAfterFour(TransferTrainer):
    def run_step(self):
        super().run_step()
        if self.iter == 4:
            raise Interrupted


def test_a_stopped_and_resumed_run_ends_as_one_that_was_not_stopped(pictures, exported, tmp_path):
    options = {
        "SOLVER__MAX_ITER": 6,
        "SOLVER__CHECKPOINT_PERIOD": 3,
        "TEST__EVAL_PERIOD": 2,
        "TEST__PRECISE_BN__ENABLED": True,
        "INPUT__MIN_SIZE_TRAIN": (48, 64, 80),
        "INPUT__CROP__ENABLED": True,
    }
    whole = tiny_config(tmp_path / "whole", exported, **options)
    trainer = TransferTrainer(whole)
    trainer.resume_or_load(resume=False)
    trainer.train()
    cut = tiny_config(tmp_path / "cut", exported, **options, DATALOADER__NUM_WORKERS=1)
    trainer = StoppedAfterFour(cut)
    trainer.resume_or_load(resume=False)
    with pytest.raises(Interrupted):
        trainer.train()
    torch.manual_seed(99)  # a new process has another state
    trainer = TransferTrainer(cut)
    trainer.resume_or_load(resume=True)
    assert trainer.start_iter == 3
    trainer.train()
    first, second = (
        torch.load(tmp_path / run / "model_final.pth", weights_only=True)
        for run in ("whole", "cut")
    )
    for name, tensor in first["model"].items():
        assert torch.equal(tensor, second["model"][name]), name
    untimed = [
        [{k: v for k, v in line.items() if k not in TIMES} for line in metrics(tmp_path / run)]
        for run in ("whole", "cut")
    ]
    assert str(untimed[0]) == str(untimed[1])  # NaN is not equal to itself


def test_a_seed_that_is_not_given_is_drawn_once(pictures, tmp_path):
    cfg, notes = TransferTrainer.effective_config(tiny_config(tmp_path, SEED=-1), 1)
    assert cfg.SEED >= 0 and f"SEED -> {cfg.SEED}, drawn at random" in notes
    assert TransferTrainer.effective_config(cfg, 1) == (cfg, [])


def test_rare_classes_are_sampled_more_often_on_request(pictures, tmp_path):
    # Each class is in half the images: with threshold 1 each comes up sqrt(1 / 0.5) times.
    repeated = {"SAMPLER_TRAIN": "RepeatFactorTrainingSampler", "REPEAT_THRESHOLD": 1.0}
    options = {f"DATALOADER__{key}": value for key, value in repeated.items()}
    cfg = tiny_config(tmp_path, **options, SOLVER__MAX_ITER=40)
    seen = [
        sample["image_id"] for batch in TransferTrainer.build_train_loader(cfg) for sample in batch
    ]
    assert len(seen) == 80
    in_a_row = [a == b for a, b in zip(seen, seen[1:], strict=False)]
    assert any(in_a_row) and set(seen) == {0, 1, 2, 3}  # an epoch of each image once has none


def test_few_labels_are_the_seeds_and_nested(pictures, tmp_path):
    def trained_on(few, seed):
        cfg = tiny_config(tmp_path, DATASETS__FEW_LABELS=few, SEED=seed)
        return {s["image_id"] for b in TransferTrainer.build_train_loader(cfg) for s in b}

    assert len(trained_on(2.0, 1)) == 2 and len(trained_on(0.25, 1)) == 1
    assert trained_on(0.25, 1) < trained_on(2.0, 1) == trained_on(2.0, 1)
    assert len({frozenset(trained_on(2.0, seed)) for seed in range(5)}) > 1
    with pytest.raises(ValueError, match="FEW_LABELS is 5, and there are only 4 images"):
        trained_on(5.0, 1)


def _two_processes(folder, pictures, weights):
    register_tiny_coco("tiny_train", pictures)
    cfg = tiny_config(f"{folder}/run", weights, TEST__PRECISE_BN__ENABLED=True, SOLVER__MAX_ITER=2)
    trainer = TransferTrainer(cfg)
    assert trainer.cfg.MODEL.RESNETS.NORM == trainer.cfg.MODEL.FPN.NORM == "naiveSyncBN"
    trainer.resume_or_load(resume=False)
    trainer.train()
    torch.save(trainer.model.module.state_dict(), f"{folder}/{comm.get_rank()}.pt")


def test_two_processes_train_and_agree_on_every_tensor(pictures, exported, tmp_path):
    run_processes(_two_processes, 2, str(tmp_path), pictures, exported)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    for name, tensor in first.items():
        torch.testing.assert_close(tensor, second[name], rtol=1e-6, atol=1e-6)
    assert any("bbox/AP" in line for line in metrics(tmp_path / "run"))


def test_a_c4_detector_with_the_extra_norm_trains(pictures, tmp_path):
    torch.save({"model": detectron2_resnet(50).state_dict(), "input": RGB}, tmp_path / "r50.pth")
    cfg = get_cfg()
    add_moco_config(cfg)
    cfg.merge_from_file("configs/transfer/voc_0712_R50_C4_24k.yaml")
    other = tiny_config(tmp_path / "run")
    cfg.DATASETS, cfg.DATALOADER, cfg.SOLVER = other.DATASETS, other.DATALOADER, other.SOLVER
    cfg.INPUT.MIN_SIZE_TRAIN, cfg.INPUT.MIN_SIZE_TEST = (32,), 32
    cfg.MODEL.DEVICE, cfg.MODEL.WEIGHTS = "cpu", str(tmp_path / "r50.pth")
    cfg.MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE = 4
    cfg.MODEL.RPN.POST_NMS_TOPK_TEST = 4
    cfg.MODEL.ROI_BOX_HEAD.POOLER_RESOLUTION = 7
    cfg.MODEL.ROI_HEADS.NUM_CLASSES = 2
    cfg.SOLVER.MAX_ITER, cfg.TEST.PRECISE_BN.NUM_ITER = 1, 1
    cfg.OUTPUT_DIR = str(tmp_path / "run")
    trainer = TransferTrainer(cfg)
    trainer.resume_or_load(resume=False)
    state, name = trainer.model.state_dict(), "res5.2.conv3.weight"
    assert torch.equal(state[f"roi_heads.{name}"], detectron2_resnet(50).state_dict()[name])
    before = state["roi_heads.res5.norm.weight"].clone()
    trainer.train()
    assert not torch.equal(trainer.model.state_dict()["roi_heads.res5.norm.weight"], before)
