"""Pretraining runs of a ViT: resume, what the table says, and the way to detectors."""

import sys

import pytest
import torch
from detectron2.modeling import build_model
from layouts import save_vit, vits
from support import tiny_pretrain_config, tiny_vit_options

from moco_d2.checkpoint import CheckError, convert, load_detector_weights_
from moco_d2.engine import recipe
from moco_d2.engine.distributed import unwrap
from moco_d2.engine.trainer import PretrainTrainer


def config(output, images, **overrides):
    options = {
        **tiny_vit_options(),
        "DATASETS__TRAIN": (str(images),),
        "SOLVER__MAX_ITER": 3,
        "SOLVER__CHECKPOINT_PERIOD": 2,
        "MODEL__MOCO__FREEZE_PATCH_PROJECTION": True,
    }
    return tiny_pretrain_config(output, **{**options, **overrides})


def train(cfg, resume=False):
    trainer = PretrainTrainer(cfg)
    trainer.resume_or_load(resume=resume)
    trainer.train()
    return unwrap(trainer.model)


def detector(**changes):
    """A small ViTDet with the backbone of :func:`config`."""
    cfg = tiny_pretrain_config(**tiny_vit_options())
    cfg.merge_from_file("configs/transfer/Base-RCNN-FPN.yaml")
    options = {
        "MODEL.BACKBONE.NAME": "build_vit_sfp_backbone",
        "MODEL.VIT.WINDOW_SIZE": 2,
        "MODEL.VIT.WINDOW_BLOCKS": (0,),
        "MODEL.VIT.USE_REL_POS": True,
        "MODEL.FPN.NORM": "LN",
        "MODEL.FPN.OUT_CHANNELS": 16,
        "MODEL.ROI_BOX_HEAD.FC_DIM": 16,
        **changes,
    }
    cfg.merge_from_list([item for pair in options.items() for item in pair])
    return build_model(cfg).eval()


@pytest.mark.parametrize("token", [False, True])
def test_a_run_resumes_exactly_and_its_export_fills_a_detector(
    images, tmp_path, monkeypatch, token
):
    """Also where timm is not installed."""
    for name in [name for name in sys.modules if name.startswith("timm.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "timm", None)
    change = {"MODEL__VIT__CLASS_TOKEN": token}
    cfg = config(tmp_path / "whole", images, **change)
    expected = train(cfg).state_dict()
    (tmp_path / "whole" / "last_checkpoint").write_text("model_0000001.pth")
    model = train(cfg, resume=True)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected[name]), name

    exported = str(tmp_path / "vit.pkl")
    report = convert(str(tmp_path / "whole" / "model_final.pth"), exported)
    assert report.exported == report.expected == 3 + 2 * 12
    assert report.difference <= 1e-5
    unused = [n for n, why in report.dropped.items() if why == "not used by detectron2"]
    extras = ["cls_token", "norm.bias", "norm.weight"] if token else []
    assert sorted(n.removeprefix("encoder_q.backbone.") for n in unused) == extras

    mask_rcnn = detector(**{"MODEL.VIT.CLASS_TOKEN": token})
    assert load_detector_weights_(mask_rcnn, exported).loaded == report.exported
    net = mask_rcnn.backbone.net
    net.blocks[0].window_size = 0  # what the detector adds, taken away; its positions are zero
    images = torch.randn(2, 3, 32, 32)
    if not token:  # which a detector's patches do not see
        with torch.no_grad():
            features = model.eval().encoder_q.backbone(images)["last_feat"]
            torch.testing.assert_close(net(images)["last_feat"], features, rtol=1e-4, atol=1e-4)
    with pytest.raises(CheckError, match="ViT with 4 heads, and this model's has 8"):
        load_detector_weights_(
            detector(**{"MODEL.VIT.CLASS_TOKEN": token, "MODEL.VIT.NUM_HEADS": 8}), exported
        )


def test_a_run_starts_from_moco_v3s_own_file_and_follows_its_convention(images, tmp_path):
    path = str(save_vit("moco_v3_vit", tmp_path))
    options = {
        "MODEL__WEIGHTS": path,
        "MODEL__VIT__EMBED_DIM": 384,
        "MODEL__VIT__NUM_HEADS": 12,
        "MODEL__VIT__IMG_SIZE": 48,
        "MODEL__VIT__CLASS_TOKEN": True,
        "INPUT__VIEWS__SIZE": 48,
        "INPUT__FORMAT": "BGR",
        "SOLVER__MAX_ITER": 1,
        "SOLVER__BASE_LR": 1e-12,
    }
    cfg = config(tmp_path / "run", images, **options)
    effective, notes = PretrainTrainer.effective_config(cfg, 1)
    assert effective.INPUT.FORMAT == "RGB"
    assert "INPUT.FORMAT: BGR -> RGB (stated by MODEL.WEIGHTS)" in notes
    model = train(cfg)
    for name, tensor in vits(384, 12)[0].float().state_dict().items():
        for encoder in (model.encoder_q, model.encoder_k):
            torch.testing.assert_close(encoder.backbone.state_dict()[name], tensor)


def test_the_table_and_the_checks_know_that_a_vit_has_no_batch_norm(images):
    """Neither groups nor the shuffle nor a ResNet's keys mean anything to it."""
    cfg = config("", images, MODEL__BN_GROUP_SIZE=1, SOLVER__ACCUMULATE=4)
    cfg.MODEL.BACKBONE.FREEZE_AT, cfg.MODEL.RESNETS.NORM = 2, "FrozenBN"
    assert recipe.check_pretraining(cfg, 1000, 1) == []
    rows = dict(recipe.common_rows(cfg, 1) + recipe.pretrain_rows(cfg, 1000))
    assert rows["backbone"] == (
        "build_vit_backbone, 2 blocks, 48 channels, 4 heads, 16 px patches, average pooling"
    )
    assert rows["BN groups"].startswith("none")
    cfg.MODEL.VIT.IMG_SIZE = 48
    (warning,) = recipe.check_pretraining(cfg, 1000, 1)
    assert "IMG_SIZE 48 is not INPUT.VIEWS.SIZE 32" in warning
    cfg.SOLVER.ACCUMULATE = 3
    with pytest.raises(ValueError, match=r"into equal parts; possible here: \[1, 2, 4, 8, 16\]"):
        recipe.check_pretraining(cfg, 1000, 1)
    resnet = tiny_pretrain_config(MODEL__MOCO__SHUFFLE_BN=False)
    (warning,) = recipe.check_pretraining(resnet, 1000, 1)
    assert "BN statistics tell a query" in warning


def test_parts_of_a_step_give_the_undivided_loss_without_groups(images, tmp_path):
    change = {"MODEL__BN_GROUP_SIZE": 32, "MODEL__CHANNELS_LAST": True, "SOLVER__MAX_ITER": 1}
    whole = train(config(tmp_path / "whole", images, **change))
    parts = train(config(tmp_path / "parts", images, SOLVER__ACCUMULATE=4, **change))
    for (name, one), other in zip(whole.named_parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6, msg=name)
