"""Detectors of detectron2 built from converted weights: all loaded, none left, same features."""

from functools import partial

import numpy as np
import pytest
import torch
from detectron2 import model_zoo
from detectron2.config import get_cfg
from detectron2.modeling import build_model
from detectron2.modeling.backbone.fpn import LastLevelMaxPool
from detectron2.modeling.backbone.vit import SimpleFeaturePyramid, ViT
from layouts import IMAGENET, SAMPLES, save_vit, vit_features, vits
from torch import nn

from moco_d2.checkpoint import (
    CheckError,
    apply_input_convention,
    convert,
    load_detector_weights_,
    read_input_convention,
)
from moco_d2.checkpoint.files import read_weight_file

IMAGES = torch.randint(0, 256, (1, 3, 64, 64), dtype=torch.uint8)
# Config in detectron2's zoo, and where its model keeps the stages.
DETECTORS = {
    "Faster R-CNN FPN": ("COCO-Detection/faster_rcnn_R_50_FPN_1x", "backbone.bottom_up."),
    "Faster R-CNN C4": ("COCO-Detection/faster_rcnn_R_50_C4_1x", "backbone."),
    "Mask R-CNN FPN": ("COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_1x", "backbone.bottom_up."),
    "Keypoint R-CNN FPN": ("COCO-Keypoints/keypoint_rcnn_R_50_FPN_1x", "backbone.bottom_up."),
}


@pytest.fixture(autouse=True)
def few_threads():
    torch.set_num_threads(1)


@pytest.fixture(scope="module", params=["moco R-50", "caffe2"])
def converted(request, tmp_path_factory):
    """A sample, the detectron2 file that was made from it, and its features."""
    folder = tmp_path_factory.mktemp("weights")
    sample = SAMPLES[request.param]
    convert(str(sample.save(folder)), str(folder / "out.pkl"))
    return str(folder / "out.pkl"), sample.features(IMAGES)


def build(name, convention):
    cfg = get_cfg()
    cfg.merge_from_file(model_zoo.get_config_file(f"{name}.yaml"))
    cfg.MODEL.DEVICE = "cpu"
    cfg.MODEL.ROI_BOX_HEAD.FC_DIM = 16
    cfg.MODEL.ROI_KEYPOINT_HEAD.CONV_DIMS = (16,)
    apply_input_convention(cfg, convention)
    return build_model(cfg).eval()


@pytest.mark.parametrize("detector", DETECTORS)
def test_a_detector_computes_the_sources_features(converted, detector):
    path, expected = converted
    name, place = DETECTORS[detector]
    convention = read_input_convention(path)
    model = build(name, convention)
    report = load_detector_weights_(model, path)
    state = {n: t for n, t in read_weight_file(path).state.items() if "num_batches" not in n}
    assert report.loaded == len(state) == 265
    assert not [n for n in report.new if n.startswith(place) and "fpn" not in n and "res" in n]
    for source, tensor in state.items():
        in_heads = "C4" in detector and source.startswith("res5.")
        where = "roi_heads." if in_heads else place
        assert torch.equal(model.state_dict()[where + source], tensor)

    images = IMAGES if convention["format"] == "RGB" else IMAGES.flip(1)
    with torch.no_grad():
        model = model.double()
        x = model.preprocess_image([{"image": image} for image in images]).tensor
        if "C4" in detector:
            features = model.roi_heads.res5(model.backbone(x)["res4"])
        else:
            features = model.backbone.bottom_up(x)["res5"]
    np.testing.assert_allclose(features, expected, rtol=0, atol=1e-3)


class Detector(nn.Module):
    """A ViT with a simple feature pyramid, where a detector has it, and a head."""

    def __init__(self, heads: int = 12):
        super().__init__()
        net = ViT(
            img_size=48,
            embed_dim=384,
            depth=2,
            num_heads=heads,
            norm_layer=partial(nn.LayerNorm, eps=1e-6),
            use_rel_pos=True,
            window_size=2,
            window_block_indexes=[0],
            residual_block_indexes=[1],
            pretrain_img_size=48,
        )
        self.backbone = SimpleFeaturePyramid(
            net,
            in_feature="last_feat",
            out_channels=16,
            scale_factors=(2.0, 1.0, 0.5),
            top_block=LastLevelMaxPool(),
        )
        self.roi_heads = nn.Linear(4, 4)


@pytest.fixture(scope="module")
def converted_vit(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vit")
    convert(str(save_vit("moco_v3_vit", folder)), str(folder / "out.pkl"))
    return str(folder / "out.pkl")


def test_a_vit_with_a_feature_pyramid_is_loaded(converted_vit):
    model = Detector()
    report = load_detector_weights_(model, converted_vit)
    weights = read_weight_file(converted_vit).state
    state = model.state_dict()
    assert report.loaded == len(weights) == 3 + 2 * 12
    assert all(torch.equal(state[f"backbone.net.{n}"], t) for n, t in weights.items())
    new = [n for n in report.new if n.startswith("backbone.net.")]
    assert all("rel_pos" in n or "residual" in n for n in new)
    assert "backbone.simfp_4 (6)" in str(report)

    # The detector's own windows and new parts taken away, it computes the source's features.
    block = model.backbone.net.blocks[0]
    block.window_size = 0
    for part in model.backbone.net.blocks:
        part.use_residual_block = part.attn.use_rel_pos = False
    images = torch.randint(0, 256, (1, 3, 48, 48), dtype=torch.uint8)
    mean, std = (255 * torch.tensor(v).double().view(3, 1, 1) for v in IMAGENET)
    with torch.no_grad():
        features = model.double().backbone.net((images.double() - mean) / std)["last_feat"]
    expected = vit_features(vits(384, 12)[0], images, *IMAGENET)
    np.testing.assert_allclose(features, expected, rtol=0, atol=1e-4)


def test_another_number_of_heads_does_not_load(converted_vit):
    with pytest.raises(CheckError, match="ViT with 12 heads, and this model's has 6"):
        load_detector_weights_(Detector(heads=6), converted_vit)


def test_positions_for_other_images_do_not_load(converted_vit):
    model = Detector()
    model.backbone.net.pos_embed = nn.Parameter(torch.zeros(1, 1 + 14 * 14, 384))
    with pytest.raises(CheckError, match="pos_embed is 1x10x384 where 1x197x384 is needed"):
        load_detector_weights_(model, converted_vit)
