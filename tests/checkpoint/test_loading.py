"""Loading weights into detectors: everything or an error that names tensors."""

import copy
import pickle

import pytest
import torch
from detectron2 import model_zoo
from detectron2.config import get_cfg
from detectron2.modeling import build_model
from layouts import SAMPLES
from torch import nn
from weights import detectron2_resnet, moco_checkpoint, torchvision_resnet

import moco_d2.modeling.roi_heads  # noqa: F401 (registers the C4 heads)
from moco_d2.checkpoint import (
    CheckError,
    WeightsError,
    convert,
    load_detector_weights_,
    load_pretraining_weights_,
)

ZOO = {"FPN": "faster_rcnn_R_50_FPN_1x", "C4": "faster_rcnn_R_50_C4_1x"}


def detector(kind="FPN", depth=50, norm="BN", heads=None):
    cfg = get_cfg()
    cfg.merge_from_file(model_zoo.get_config_file(f"COCO-Detection/{ZOO[kind]}.yaml"))
    cfg.MODEL.DEVICE = "cpu"
    cfg.MODEL.RESNETS.DEPTH = depth
    cfg.MODEL.RESNETS.RES2_OUT_CHANNELS = 64 if depth < 50 else 256
    cfg.MODEL.RESNETS.NORM = norm
    cfg.MODEL.ROI_BOX_HEAD.FC_DIM = 32
    cfg.MODEL.ROI_HEADS.NUM_CLASSES = 2
    if heads:
        cfg.MODEL.ROI_HEADS.NAME = heads
    return build_model(cfg)


def third_party(depth, path, **extra):
    """A file as the usual converter scripts write it: leftovers of the head under `stem.fc`."""
    arrays = {n: t.numpy() for n, t in detectron2_resnet(depth).state_dict().items()}
    arrays["stem.fc.0.weight"] = torch.rand(4, 4).numpy()
    content = {"model": arrays, "__author__": "someone", "matching_heuristics": True, **extra}
    path.write_bytes(pickle.dumps(content))
    return arrays


FPN, C4 = ["backbone.bottom_up."], ["backbone.", "roi_heads."]
# Arguments of `detector`, where its backbone is, its tensors, a part that is new.
CASES = {
    "FPN": (("FPN", 50, "BN"), FPN, 318, "backbone.fpn_lateral2 (2)"),
    "FPN frozen": (("FPN", 50, "FrozenBN"), FPN, 265, "roi_heads.box_head (4)"),
    "FPN R18": (("FPN", 18, "BN"), FPN, 120, "proposal_generator.rpn_head (6)"),
    "C4": (("C4", 50, "BN"), C4, 318, "roi_heads.box_predictor (4)"),
    "C4 norm": (("C4", 50, "BN", "Res5ROIHeadsExtraNorm"), C4, 318, "roi_heads.res5 (4)"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_whole_backbone_is_loaded_and_the_rest_is_reported_as_new(tmp_path, case):
    arguments, places, count, new = CASES[case]
    model = detector(*arguments)
    arrays = third_party(arguments[1], tmp_path / "x.pkl")
    report = load_detector_weights_(model, str(tmp_path / "x.pkl"))
    state = model.state_dict()
    filled = [p + n for n in arrays for p in places if p + n in state]
    for name in filled:
        backbone_name = name.removeprefix("backbone.bottom_up.").removeprefix("backbone.")
        backbone_name = backbone_name.removeprefix("roi_heads.")
        assert torch.equal(state[name], torch.from_numpy(arrays[backbone_name]))
    assert report.loaded == len(filled) == count
    assert not set(report.new) & set(filled)
    assert f"Loaded all {count} backbone tensors from x.pkl" in str(report)
    assert new in str(report)


def test_an_exported_file_loads_into_a_detector(tmp_path):
    torch.save(moco_checkpoint(18), tmp_path / "moco.pth")
    convert(str(tmp_path / "moco.pth"), str(tmp_path / "out.pth"))
    model = detector(depth=18)
    assert load_detector_weights_(model, str(tmp_path / "out.pth")).loaded == 120


def write(path, state):
    torch.save({"model": state, "matching_heuristics": True}, path)
    return str(path)


KEY = "res4.1.conv2.weight"


VAR = "res2.0.conv1.norm.running_var"


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda s: s.update({"res4.9.w": s.pop(KEY)}), f"missing: {KEY}; not used: res4.9.w"),
        (lambda s: s.update({KEY: s[KEY][:, :1]}), f"wrong shape: {KEY} is 256x1x3x3"),
        (lambda s: s.pop(VAR), f"missing: {VAR}"),
        (lambda s: s.update({"extra.weight": torch.zeros(1)}), "not used: extra.weight"),
    ],
    ids=["renamed", "reshaped", "missing", "left over"],
)
def test_a_backbone_that_does_not_match_entirely_changes_nothing(tmp_path, damage, message):
    state = detectron2_resnet(18).state_dict()
    damage(state)
    path = write(tmp_path / "x.pth", state)
    model = detector(depth=18)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    with pytest.raises(CheckError, match=message):
        load_detector_weights_(model, path)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())


def test_another_depth_does_not_load(tmp_path):
    path = write(tmp_path / "x.pth", detectron2_resnet(18).state_dict())
    with pytest.raises(CheckError, match="does not fit the backbone of this model"):
        load_detector_weights_(detector(depth=34), path)


def test_half_of_a_res5_does_not_load_into_a_c4_detector(tmp_path):
    """A R-18's res5 has basic blocks; the C4 head is made of bottlenecks whatever the depth."""
    path = write(tmp_path / "x.pth", detectron2_resnet(18).state_dict())
    with pytest.raises(CheckError, match="missing: res5.0.conv1.weight|wrong shape: res5"):
        load_detector_weights_(detector("C4", depth=18), path)


def test_files_that_need_conversion_first_are_refused_with_the_command(tmp_path):
    model = detector(depth=18)
    torch.save(torchvision_resnet(18).state_dict(), tmp_path / "tv.pth")
    torch.save(moco_checkpoint(18), tmp_path / "moco.pth")
    SAMPLES["mmpretrain"].save(tmp_path).rename(tmp_path / "mm.pth")
    for name in ("tv.pth", "moco.pth", "mm.pth"):
        with pytest.raises(WeightsError, match=f"tools/convert_weights.py .*{name} OUT.pkl"):
            load_detector_weights_(model, str(tmp_path / name))


def test_a_detector_loads_whole_or_not_at_all(tmp_path):
    trained, model = detector(depth=18), detector(depth=18)
    for parameter in trained.parameters():
        nn.init.normal_(parameter)
    path = write(tmp_path / "x.pth", trained.state_dict())
    report = load_detector_weights_(model, path, whole=True)
    assert report.whole and not report.new
    assert all(torch.equal(t, trained.state_dict()[n]) for n, t in model.state_dict().items())
    state = trained.state_dict()
    state["roi_heads.box_predictor.cls_score.bias"] = torch.zeros(9)
    del state["backbone.fpn_lateral3.weight"]
    path = write(tmp_path / "y.pth", state)
    with pytest.raises(CheckError, match="missing: backbone.fpn_lateral3.weight; wrong shape"):
        load_detector_weights_(model, path)


def test_a_backbone_cannot_be_evaluated(tmp_path):
    path = write(tmp_path / "x.pth", detectron2_resnet(18).state_dict())
    with pytest.raises(WeightsError, match="holds a backbone only"):
        load_detector_weights_(detector(depth=18), path, whole=True)


def test_a_model_without_backbone_is_refused(tmp_path):
    path = write(tmp_path / "x.pth", detectron2_resnet(18).state_dict())
    with pytest.raises(WeightsError, match="has no backbone to load into"):
        load_detector_weights_(nn.Linear(2, 2), path)


class TwoEncoders(nn.Module):
    """MoCo's names around two backbones."""

    def __init__(self):
        super().__init__()
        self.encoder_q, self.encoder_k = nn.Module(), nn.Module()
        for number, encoder in enumerate((self.encoder_q, self.encoder_k)):
            encoder.backbone = copy.deepcopy(detectron2_resnet(18, "res5", number))
            encoder.head = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        self.dictionary = nn.Module()
        self.dictionary.register_buffer("keys", torch.zeros(16, 8))
        self.dictionary.register_buffer("pointer", torch.tensor(0))
        self.dictionary.register_buffer("filled", torch.tensor(0))


def test_a_backbone_initialises_both_encoders_of_a_pretraining_model(tmp_path):
    model, state = TwoEncoders(), detectron2_resnet(18, "res5", 2).state_dict()
    head = model.encoder_q.head[0].weight.clone()
    report = load_pretraining_weights_(model, write(tmp_path / "x.pth", state))
    for encoder in (model.encoder_q, model.encoder_k):
        assert all(torch.equal(t, state[n]) for n, t in encoder.backbone.state_dict().items())
    assert torch.equal(model.encoder_q.head[0].weight, head)
    assert report.loaded == 240
    assert "encoder_q.head (4), encoder_k.head (4), dictionary.keys (1)" in str(report)
    del state["res5.1.conv1.weight"]
    with pytest.raises(CheckError, match="missing: res5.1.conv1.weight"):
        load_pretraining_weights_(model, write(tmp_path / "x.pth", state))


def test_a_pretraining_checkpoint_initialises_the_whole_pretraining_model(tmp_path):
    checkpoint = {**moco_checkpoint(18), "model": TwoEncoders().state_dict()}
    checkpoint["model"]["dictionary.keys"] = torch.rand(16, 8)
    torch.save(checkpoint, tmp_path / "x.pth")
    model = TwoEncoders()
    assert load_pretraining_weights_(model, str(tmp_path / "x.pth")).whole
    assert all(torch.equal(t, checkpoint["model"][n]) for n, t in model.state_dict().items())
    checkpoint["model"]["dictionary.keys"] = torch.rand(12, 8)
    torch.save(checkpoint, tmp_path / "x.pth")
    with pytest.raises(CheckError, match="wrong shape: dictionary.keys is 12x8 where 16x8"):
        load_pretraining_weights_(model, str(tmp_path / "x.pth"))
