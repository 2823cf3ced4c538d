"""Training with labels, real and tiny: the same on any processes, exact in a resume, frozen."""

import json

import jobs
import numpy as np
import pytest
import torch
from detectron2.config import get_cfg
from layouts import IMAGENET, SAMPLES, save_vit, vits
from support import random_views, tiny_pretrain_config
from torchvision.transforms.functional import normalize

from moco_d2 import add_moco_config
from moco_d2.checkpoint import CheckError, WeightsError, convention_of, convert, load_backbone
from moco_d2.data.datasets import load_image_index
from moco_d2.engine import recipe
from moco_d2.engine.classification import ClassificationTrainer
from moco_d2.engine.distributed import unwrap
from moco_d2.engine.frozen import FrozenTensorsChanged
from moco_d2.engine.setup import run
from moco_d2.engine.trainer import PretrainTrainer
from moco_d2.evaluation.classification import accuracies

SUPERVISED = "configs/pretrain/supervised_R_50_90ep.yaml"
LINEAR = "configs/pretrain/linear_R_50_100ep.yaml"
BACKBONE = "encoder.backbone."


def config(images, output="", config=SUPERVISED, **overrides):
    options = {
        "DATASETS__TRAIN": (str(images),),
        "DATASETS__TEST": (str(images),),
        "TEST__EVAL_PERIOD": 0,
        "SOLVER__STEPS": (),
        **overrides,
    }
    return tiny_pretrain_config(output, config, **options)


def train(cfg, resume=False, trainer_class=ClassificationTrainer):
    trainer = trainer_class(cfg)
    trainer.resume_or_load(resume=resume)
    trainer.train()
    return trainer


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.json").read_text().splitlines()]


@pytest.fixture(scope="module")
def pretrained(images, tmp_path_factory):
    """A checkpoint of MoCo, of an input convention of its own."""
    folder = tmp_path_factory.mktemp("pretrained")
    options = {"MODEL__PIXEL_STD": [50.0, 51.0, 52.0], "SOLVER__MAX_ITER": 1}
    cfg = tiny_pretrain_config(folder, DATASETS__TRAIN=(str(images),), **options)
    train(cfg, trainer_class=PretrainTrainer)
    return folder / "model_final.pth"


def test_one_and_two_processes_agree(images, tmp_path):
    """Losses, weights, running statistics, and accuracies: 30 images on 2 processes of 15."""
    options = {
        "TEST__EVAL_PERIOD": 2,
        "MODEL__BN_GROUP_SIZE": 8,
        "MODEL__CLASSIFIER__LABEL_SMOOTHING": 0.1,
    }
    one, two = (config(images, tmp_path / name, **options) for name in ("one", "two"))
    train(one)
    two, _ = ClassificationTrainer.effective_config(two, 2)
    assert jobs.run_job(two, trainer=ClassificationTrainer, processes=2) == [0, 0]
    for ours, theirs in zip(jobs.metrics(two), jobs.metrics(one), strict=True):
        assert ours.keys() == theirs.keys()
        for name in theirs.keys() & {"iteration", "loss_classification", "[metric]top1"}:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4), name
        for name in theirs.keys() & {"classification/top1", "classification/top5"}:
            assert ours[name] == theirs[name], name
    assert any("classification/top5" in line for line in jobs.metrics(two))
    weights = jobs.saved(two)["model"]
    for name, expected in jobs.saved(one)["model"].items():
        torch.testing.assert_close(weights[name], expected, rtol=1e-4, atol=1e-4, msg=name)


def test_resume_goes_on_as_if_it_had_never_stopped(images, tmp_path):
    options = {"SOLVER__MAX_ITER": 4, "SOLVER__CHECKPOINT_PERIOD": 2}
    whole = train(config(images, tmp_path / "whole", **options)).model.state_dict()
    train(config(images, tmp_path / "parts", **options | {"SOLVER__MAX_ITER": 2}))
    cfg = config(images, tmp_path / "parts", **options)
    resumed = train(cfg, resume=True).model.state_dict()
    for name, tensor in whole.items():
        assert torch.equal(resumed[name], tensor), name


def test_accuracies_are_those_of_the_logits(images, tmp_path):
    """Each image counts once; of equal scores the first class ranks first."""
    trainer = ClassificationTrainer(config(images, tmp_path))
    model, index = unwrap(trainer.model).eval(), load_image_index([str(images)])
    seen, correct = [], []

    def logits(batch):
        scores = model.logits(batch)
        seen.extend(batch["index"].tolist())
        correct.extend((scores.numpy().argmax(1) == batch["label"].numpy()).tolist())
        return scores

    result = accuracies(trainer.cfg, logits, index)
    assert sorted(seen) == list(range(30))
    assert result == {"top1": pytest.approx(100 * np.mean(correct)), "top5": 100.0}
    for score in (0.0, torch.nan):
        constant = accuracies(
            trainer.cfg, lambda b, s=score: torch.full((len(b["label"]), 8), s), index
        )
        assert constant == {"top1": 50.0, "top5": 100.0}  # the first of two classes


def test_few_labels_train_on_the_same_few_images(images, tmp_path):
    """15 images of each of 2 classes, of which 20 % are 3."""
    cfg = config(images, tmp_path, DATASETS__FEW_LABELS=0.2, SOLVER__MAX_ITER=3)
    trainer = ClassificationTrainer(cfg)
    assert trainer.num_images == 6
    index = trainer.training_images(trainer.cfg)
    assert np.bincount(index.labels).tolist() == [3, 3]
    seen = {
        path
        for batch in trainer.build_train_loader(trainer.cfg)
        for path in trainer.image_names(batch)
    }
    assert seen == {index.path(i) for i in range(6)}
    larger = trainer.training_images(config(images, DATASETS__FEW_LABELS=5.0))
    assert seen < {larger.path(i) for i in range(len(larger))}
    rows = ClassificationTrainer.describe(*_described(cfg))
    assert "20 % of each class" in rows and "of 6 images" in rows


def _described(cfg):
    cfg, notes = ClassificationTrainer.effective_config(cfg, 1)
    return cfg, 1, notes


def linear_config(images, output, weights, **overrides):
    return config(images, output, LINEAR, MODEL__WEIGHTS=str(weights), **overrides)


def test_linear_classification_trains_the_head_on_frozen_features(images, tmp_path, pretrained):
    """From this project's checkpoint and from its export, under their input convention; lr 30
    for 256 images."""
    exported = tmp_path / "exported.pkl"
    convert(str(pretrained), str(exported))
    moco = torch.load(pretrained, weights_only=True)["model"]
    heads = []
    for name, weights in (("own", pretrained), ("exported", exported)):
        trainer = train(linear_config(images, tmp_path / name, weights, SOLVER__MAX_ITER=2))
        assert convention_of(trainer.cfg)["pixel_std"] == [50.0, 51.0, 52.0]
        assert pytest.approx(30 * 16 / 256) == trainer.cfg.SOLVER.BASE_LR
        state = unwrap(trainer.model).state_dict()
        for key, tensor in state.items():
            if key.startswith(BACKBONE):
                own = moco[key.replace(BACKBONE, "encoder_q.backbone.")]
                assert torch.equal(tensor, own) or key.endswith("num_batches_tracked"), key
        heads.append(state["encoder.head.weight"])
    assert torch.equal(*heads)
    assert metrics(tmp_path / "own")[-1]["classification/top1"] >= 50


def features_of(cfg, images):
    trainer = ClassificationTrainer(cfg)
    trainer.resume_or_load(resume=False)
    with torch.no_grad():
        return trainer, unwrap(trainer.model).eval()({"image": images}).double()


def test_other_projects_files_bring_their_convention(images, tmp_path):
    """A format whose images are not normalised, which its files do not state."""
    path = SAMPLES["byol"].save(tmp_path)
    options = {"MODEL__RESNETS__OUT_FEATURES": ["res5"]}
    shown = random_views(2, 64, 0)[0]
    trainer, ours = features_of(linear_config(images, tmp_path, path, **options), shown)
    assert trainer.cfg.MODEL.PIXEL_MEAN == [0.0] * 3 and trainer.cfg.MODEL.PIXEL_STD == [255.0] * 3
    with torch.no_grad():
        theirs = load_backbone(str(path))(shown / 255)["res5"].mean((2, 3)).double()
    torch.testing.assert_close(ours, theirs / theirs.norm(dim=1, keepdim=True), rtol=0, atol=1e-5)


def test_a_published_vit_gives_its_class_token(images, tmp_path):
    """MoCo v3's layout, against timm's own forward."""
    path = save_vit("moco_v3_vit", tmp_path)
    options = {
        "MODEL__BACKBONE__NAME": "build_vit_backbone",
        "MODEL__VIT__EMBED_DIM": 384,
        "MODEL__VIT__NUM_HEADS": 12,
        "MODEL__VIT__DEPTH": 2,
        "MODEL__VIT__IMG_SIZE": 48,
        "MODEL__VIT__CLASS_TOKEN": True,
        "INPUT__VIEWS__SIZE": 48,
    }
    shown = random_views(2, 48, 0)[0]
    _, ours = features_of(linear_config(images, tmp_path, path, **options), shown)
    with torch.no_grad():
        theirs = vits(384, 12)[0].double()(normalize(shown.double() / 255, *IMAGENET))
    torch.testing.assert_close(ours, theirs / theirs.norm(dim=1, keepdim=True), rtol=0, atol=1e-5)


def test_linear_classification_is_exact_after_a_resume(images, tmp_path, pretrained):
    options = {"SOLVER__MAX_ITER": 4, "SOLVER__CHECKPOINT_PERIOD": 2}
    whole = train(linear_config(images, tmp_path / "whole", pretrained, **options))
    parts = linear_config(images, tmp_path / "parts", pretrained, **options)
    train(linear_config(images, tmp_path / "parts", pretrained, SOLVER__MAX_ITER=2))
    resumed = train(parts, resume=True)
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], tensor), name


class OneNormUnfrozen(ClassificationTrainer):
    """As if someone had called `train()` on a part of the backbone."""

    def run_step(self):
        unwrap(self.model).encoder.backbone.res3[1].conv2.norm.train()
        super().run_step()


class OneParameterMoved(ClassificationTrainer):
    def run_step(self):
        super().run_step()
        with torch.no_grad():
            weight = unwrap(self.model).encoder.backbone.stem.conv1.weight
            weight[0, 0, 0, 0] = weight[0, 0, 0, 0].nextafter(torch.tensor(torch.inf))


@pytest.mark.parametrize(
    ("trainer", "named"),
    [
        (OneNormUnfrozen, "3 of .* res3.1.conv2.norm.num_batches_tracked, res3.1.conv2.norm.runn"),
        (OneParameterMoved, r"1 of .* by iteration 0: stem.conv1.weight;"),
    ],
)
def test_what_changes_in_a_frozen_backbone_stops_the_run_unsaved(
    images, tmp_path, pretrained, trainer, named
):
    cfg = linear_config(images, tmp_path, pretrained, SOLVER__CHECKPOINT_PERIOD=1)
    with pytest.raises(FrozenTensorsChanged, match=named):
        train(cfg, trainer_class=trainer)
    assert not list(tmp_path.glob("*.pth"))


def test_a_resume_with_other_weights_is_refused(images, tmp_path, pretrained):
    train(linear_config(images, tmp_path, pretrained, SOLVER__MAX_ITER=1))
    other = tmp_path / "other.pth"
    content = torch.load(pretrained, weights_only=True)
    content["model"]["encoder_q.backbone.res2.0.conv1.weight"] += 1e-3
    torch.save(content, other)
    trainer = ClassificationTrainer(linear_config(images, tmp_path, other, SOLVER__MAX_ITER=2))
    with pytest.raises(FrozenTensorsChanged, match="in the checkpoint: res2.0.conv1.weight;"):
        trainer.resume_or_load(resume=True)


def test_random_features_on_purpose_only(images, tmp_path):
    with pytest.raises(ValueError, match="measures random features"):
        ClassificationTrainer(config(images, tmp_path, LINEAR))
    options = {"MODEL__CLASSIFIER__RANDOM_BACKBONE": True, "SOLVER__MAX_ITER": 2}
    first = ClassificationTrainer(config(images, tmp_path, LINEAR, **options)).model.state_dict()
    before = {name: tensor.clone() for name, tensor in first.items()}
    after = train(config(images, tmp_path, LINEAR, **options)).model.state_dict()
    changed = [name for name, tensor in after.items() if not torch.equal(tensor, before[name])]
    assert changed == ["encoder.head.weight", "encoder.head.bias"]


def test_evaluation_alone_gives_what_training_ended_with(images, tmp_path, pretrained):
    options = {"TEST__KNN__BANK": str(images), "TEST__KNN__K": 3, "SOLVER__MAX_ITER": 2}
    trainer = train(config(images, tmp_path, **options))
    expected = trainer._last_eval_results
    assert set(expected) == {"classification", "knn"}
    checkpoint = str(tmp_path / "model_final.pth")
    cfg = config(images, tmp_path / "eval", MODEL__WEIGHTS=checkpoint, **options)
    assert ClassificationTrainer.eval_only(cfg) == expected
    cfg = config(images, tmp_path / "eval", MODEL__WEIGHTS=str(pretrained))
    with pytest.raises(WeightsError, match="holds a backbone only"):
        ClassificationTrainer.eval_only(cfg)


def relabelled(images, folder, names):
    """The same pictures in class folders of other names; None leaves a class out."""
    for old, new in names.items():
        if new:
            target = folder / new
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(images / old)
    return folder


def test_test_sets_are_matched_by_class_name(images, tmp_path):
    """A test set without the first class still has the second one's number."""
    part = relabelled(images, tmp_path / "part", {"class0": None, "class1": "class1"})
    trainer = ClassificationTrainer(config(images, tmp_path / "out", DATASETS__TEST=(str(part),)))
    model = unwrap(trainer.model)
    with torch.no_grad():
        model.encoder.head.bias[1] = 1e6
    assert trainer.test(trainer.cfg, model)["classification"]["top1"] == 100.0


def test_a_checkpoint_of_other_classes_is_refused(images, tmp_path):
    train(config(images, tmp_path / "run", SOLVER__MAX_ITER=1))
    others = relabelled(images, tmp_path / "others", {"class0": "cat", "class1": "dog"})
    weights = str(tmp_path / "run" / "model_final.pth")
    with pytest.raises(ValueError, match="2 classes apart that are not the 2 classes"):
        ClassificationTrainer.eval_only(config(others, tmp_path / "eval", MODEL__WEIGHTS=weights))


@pytest.mark.parametrize(
    ("name", "lr", "iterations", "steps"),
    [
        # 90 and 100 epochs of 1,281,167 images in batches of 256 or 1024.
        ("supervised_R_50_90ep", 0.1, 450410, (150136, 300273)),
        ("linear_R_50_100ep", 30.0, 500455, (300273, 400364)),
        ("linear_v3_R_50_90ep", 0.4, 112602, ()),
        ("linear_v3_ViT_90ep", 12.0, 112602, ()),
    ],
)
def test_configs_are_the_published_recipes(name, lr, iterations, steps):
    cfg = get_cfg()
    add_moco_config(cfg)
    cfg.merge_from_file(f"configs/pretrain/{name}.yaml")
    recipe.resolve_schedule(cfg, 1281167)
    solver, frozen = cfg.SOLVER, cfg.MODEL.CLASSIFIER.FREEZE_BACKBONE
    assert (pytest.approx(lr), iterations, steps) == (solver.BASE_LR, solver.MAX_ITER, solver.STEPS)
    assert ("WarmupMultiStepLR" if steps else "WarmupCosineLR") == solver.LR_SCHEDULER_NAME
    assert solver.WEIGHT_DECAY == solver.WEIGHT_DECAY_NORM == (0.0 if frozen else 1e-4)
    assert (solver.OPTIMIZER, solver.MOMENTUM, solver.WARMUP_ITERS) == ("SGD", 0.9, 0)
    assert frozen == name.startswith("linear") and cfg.INPUT.VIEWS.QUERY == "supervised"


def test_what_cannot_run_or_learn_is_refused_with_what_to_do(images, tmp_path):
    others = relabelled(images, tmp_path / "others", {"class0": "class0", "class1": "dog"})
    one = relabelled(images, tmp_path / "one", {"class0": "class0", "class1": None})
    flat = images / "class0"
    for trained, overrides, message in (
        (flat, {}, "15 of 15 images of .* are images without a class label, among them .*00.png"),
        (one, {"DATASETS__TEST": ()}, "images of 1 class: there is nothing to tell apart"),
        (images, {"DATASETS__TEST": (str(others),)}, r"1 class\(es\) .* does not have \(dog\)"),
        (images, {"DATASETS__TEST": (str(flat),)}, "without a class label.*DATASETS.TEST"),
        (images, {"MODEL__CLASSIFIER__NUM_CLASSES": 3}, "NUM_CLASSES is 3 .* has 2 classes"),
        (images, {"MODEL__CLASSIFIER__LABEL_SMOOTHING": 1.0}, "LABEL_SMOOTHING is 1; it must"),
        (images, {"MODEL__BN_GROUP_SIZE": 5}, "do not tile a batch of 16"),
        (images, {"DATASETS__FEW_LABELS": 16.0}, "there are only 15 images"),
        (images, {"MODEL__WEIGHTS": str(tmp_path / "no.pth")}, "there is no weight file"),
        (
            images,
            {
                "MODEL__CLASSIFIER__FREEZE_BACKBONE": True,
                "MODEL__CLASSIFIER__RANDOM_BACKBONE": True,
                "SOLVER__ACCUMULATE": 3,
            },
            r"SOLVER.ACCUMULATE 3 does not divide 16 .* \[1, 2, 4, 8, 16\]",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            ClassificationTrainer.effective_config(config(trained, **overrides), 1)


def test_weights_of_another_network_load_nothing(images, tmp_path, pretrained):
    cfg = linear_config(images, tmp_path, pretrained, MODEL__RESNETS__OUT_FEATURES=["res2"])
    trainer = ClassificationTrainer(cfg)
    with pytest.raises(
        CheckError, match="does not fit the backbone of this model - not used: res3"
    ):
        trainer.resume_or_load(resume=False)


def test_a_command_that_contradicts_the_weights_is_one_line(images, tmp_path, pretrained, capsys):
    argv = ["--config", LINEAR, "MODEL.WEIGHTS", str(pretrained), "MODEL.DEVICE", "cpu"]
    argv += ["DATASETS.TRAIN", f"('{images}',)", "DATASETS.TEST", f"('{images}',)"]
    argv += ["OUTPUT_DIR", str(tmp_path / "out"), "MODEL.PIXEL_STD", "[1.0,1.0,1.0]"]
    assert run(argv, "") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "expect MODEL.PIXEL_STD [50.0, 51.0, 52.0], and the config says [1.0, 1.0, 1.0]" in line
