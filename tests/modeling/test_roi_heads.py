"""Res5ROIHeadsExtraNorm and the FPN that needs no res5."""

import importlib
import logging

import pytest
import torch
from detectron2.config import get_cfg
from detectron2.layers import ShapeSpec
from detectron2.modeling import build_backbone
from detectron2.modeling.roi_heads import ROI_HEADS_REGISTRY, build_roi_heads
from torch import nn

import moco_d2.modeling.fpn
import moco_d2.modeling.roi_heads as roi_heads_file


def small_config(norm="BN"):
    cfg = get_cfg()
    cfg.MODEL.ROI_HEADS.NAME = "Res5ROIHeadsExtraNorm"
    cfg.MODEL.ROI_HEADS.NUM_CLASSES = 3
    cfg.MODEL.RESNETS.NORM = norm
    cfg.MODEL.RESNETS.WIDTH_PER_GROUP = 4
    cfg.MODEL.RESNETS.RES2_OUT_CHANNELS = 16
    cfg.MODEL.ROI_BOX_HEAD.POOLER_RESOLUTION = 7
    return cfg


def build(cfg):
    return build_roi_heads(cfg, {"res4": ShapeSpec(channels=64, stride=16)})


def test_the_norm_is_the_last_layer_of_res5_under_its_known_name():
    heads = build(small_config())
    assert list(heads.res5._modules) == ["0", "1", "2", "norm"]
    assert isinstance(heads.res5.norm, nn.BatchNorm2d)
    assert heads.res5.norm.num_features == 128
    plain = small_config()
    plain.MODEL.ROI_HEADS.NAME = "Res5ROIHeads"
    added = set(heads.state_dict()) - set(build(plain).state_dict())
    names = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    assert added == {f"res5.norm.{name}" for name in names}


def test_the_features_of_rois_are_normalised_over_all_rois():
    heads = build(small_config()).train()
    x = heads.res5(torch.randn(6, 64, 7, 7))  # (RoIs, C, 4, 4)
    assert x.shape == (6, 128, 4, 4)
    torch.testing.assert_close(x.mean((0, 2, 3)), torch.zeros(128), atol=1e-5, rtol=0)
    live = x.var((0, 2, 3)) > 0.1  # channels that the ReLU before the norm left alive
    torch.testing.assert_close(
        x.var((0, 2, 3))[live], torch.ones(int(live.sum())), atol=0.1, rtol=0
    )


def test_it_is_built_from_arguments_without_a_config():
    cfg = small_config()
    shape = {"res4": ShapeSpec(channels=64, stride=16)}
    arguments = roi_heads_file.Res5ROIHeadsExtraNorm.from_config(cfg, shape)
    heads = roi_heads_file.Res5ROIHeadsExtraNorm(**{**arguments, "norm": "GN"})
    assert isinstance(heads.res5.norm, nn.GroupNorm)


def test_an_empty_norm_is_refused():
    with pytest.raises(ValueError, match="MODEL.RESNETS.NORM is empty"):
        build(small_config(norm=""))


def test_a_class_of_that_name_from_another_package_is_kept(monkeypatch, caplog):
    class Theirs:
        pass

    monkeypatch.setitem(ROI_HEADS_REGISTRY._obj_map, "Res5ROIHeadsExtraNorm", Theirs)
    with caplog.at_level(logging.WARNING):
        importlib.reload(roi_heads_file)
    assert ROI_HEADS_REGISTRY.get("Res5ROIHeadsExtraNorm") is Theirs
    assert len(caplog.records) == 1
    assert "registered by another package" in caplog.text


def test_plain_fpn_has_a_level_for_each_feature_of_a_cut_resnet():
    cfg = get_cfg()
    cfg.MODEL.BACKBONE.NAME = moco_d2.modeling.fpn.build_plain_resnet_fpn_backbone.__name__
    cfg.MODEL.RESNETS.DEPTH, cfg.MODEL.RESNETS.RES2_OUT_CHANNELS = 18, 64
    cfg.MODEL.RESNETS.OUT_FEATURES = cfg.MODEL.FPN.IN_FEATURES = ["res3", "res4"]
    cfg.MODEL.FPN.OUT_CHANNELS = 8
    backbone = build_backbone(cfg)
    features = backbone(torch.zeros(1, 3, 64, 64))
    assert {n: f.shape for n, f in features.items()} == {"p3": (1, 8, 8, 8), "p4": (1, 8, 4, 4)}
    assert not any("res5" in name for name in backbone.state_dict())
