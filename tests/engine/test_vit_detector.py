"""ViTDet in a YAML config: detectron2's own network, its optimizer and its augmentation."""

from pathlib import Path

import numpy as np
import pytest
import torch
from detectron2 import model_zoo
from detectron2.config import get_cfg, instantiate
from detectron2.modeling import build_backbone, build_model
from PIL import Image

from moco_d2 import add_moco_config
from moco_d2.data.scale_jitter import clip_polygon, scale_jitter_mapper
from moco_d2.engine.recipe import transfer_rows
from moco_d2.errors import UserError
from moco_d2.modeling.vit_layers import without_timm
from moco_d2.modeling.vit_pyramid import check_vit_pyramid
from moco_d2.solver.detection import build_detector_optimizer, check_detector_solver

CONFIG = Path(__file__).parents[2] / "configs/transfer/coco_ViT_B_SFP.yaml"
SMALL = {"EMBED_DIM": 48, "DEPTH": 3, "NUM_HEADS": 4}


def config(small=True, **changes):
    cfg = get_cfg()
    add_moco_config(cfg)
    cfg.merge_from_file(str(CONFIG))
    cfg.MODEL.DEVICE = "cpu"
    if small:
        for key, value in SMALL.items():
            cfg.MODEL.VIT[key] = value
        cfg.MODEL.VIT.WINDOW_BLOCKS = (0, 1)
    for key, value in changes.items():
        cfg.merge_from_list([key.replace("__", "."), value])
    return cfg


def test_the_network_is_detectron2s_own():
    """All of ViTDet's options, in a smaller ViT, from detectron2's own definition."""
    cfg = config()
    lazy = model_zoo.get_config("common/models/mask_rcnn_vitdet.py").model
    net = lazy.backbone.net
    net.embed_dim, net.depth, net.num_heads = SMALL.values()
    net.window_block_indexes, net.pretrain_use_cls_token = [0, 1], False
    with without_timm():
        expected = instantiate(lazy).eval()
    ours = build_model(cfg).eval()
    shapes = {name: tensor.shape for name, tensor in expected.state_dict().items()}
    assert {name: tensor.shape for name, tensor in ours.state_dict().items()} == shapes
    windows = [block.window_size for block in ours.backbone.net.blocks]
    assert windows == [block.window_size for block in expected.backbone.net.blocks]
    ours.load_state_dict(expected.state_dict())
    images = torch.rand(1, 3, 64, 64)
    with torch.no_grad():
        theirs = expected.backbone(images)
        for name, features in ours.backbone(images).items():
            torch.testing.assert_close(features, theirs[name])


def test_the_recipe_is_vitdets():
    cfg = config(small=False)
    lazy = model_zoo.get_config("common/models/mask_rcnn_vitdet.py").model.backbone
    vit, net = cfg.MODEL.VIT, lazy.net
    sizes = (vit.EMBED_DIM, vit.DEPTH, vit.NUM_HEADS)
    assert sizes == (net.embed_dim, net.depth, net.num_heads)
    assert list(vit.WINDOW_BLOCKS) == list(net.window_block_indexes)
    options = (vit.WINDOW_SIZE, vit.DROP_PATH, vit.USE_REL_POS, vit.SQUARE_PAD)
    assert options == (net.window_size, net.drop_path_rate, net.use_rel_pos, lazy.square_pad)
    solver = cfg.SOLVER
    assert round(solver.MAX_ITER * solver.IMS_PER_BATCH / 118000) == 100  # epochs
    assert solver.STEPS == (163889, 177546)
    assert dict(transfer_rows(cfg))["lr of a block"] == "0.7 of the next"


def test_images_of_any_size_lose_no_row_or_column():
    """detectron2's own pyramid does not pad a batch to whole patches."""
    cfg = config(MODEL__VIT__SQUARE_PAD=0)
    model = build_model(cfg).eval()
    batch = model.preprocess_image([{"image": torch.zeros(3, 40, 70, dtype=torch.uint8)}])
    assert batch.tensor.shape[2:] == (64, 96)
    padded = build_model(config()).preprocess_image(
        [{"image": torch.zeros(3, 40, 70, dtype=torch.uint8)}]
    )
    assert padded.tensor.shape[2:] == (1024, 1024)


def test_layers_learn_at_their_own_rates():
    """0.7 per layer, written out: patches and positions lie 4 layers below what is behind 3
    blocks. Weight decay is 0.1, 0 for the ViT's norms and positions."""
    cfg = config()
    model = build_model(cfg)
    optimizer = build_detector_optimizer(cfg, model)
    assert isinstance(optimizer, torch.optim.AdamW)
    groups = {p: group for group in optimizer.param_groups for p in group["params"]}
    assert len(groups) == len(list(model.parameters()))

    def of(name):
        group = groups[model.get_parameter(name)]
        return group["lr"], group["weight_decay"]

    net = "backbone.net."
    assert of(net + "patch_embed.proj.weight") == pytest.approx((1e-4 * 0.7**4, 0.1))
    assert of(net + "pos_embed") == pytest.approx((1e-4 * 0.7**4, 0.0))
    for block in range(3):
        rate = 1e-4 * 0.7 ** (3 - block)
        assert of(f"{net}blocks.{block}.attn.qkv.weight") == pytest.approx((rate, 0.1))
        assert of(f"{net}blocks.{block}.norm1.weight") == pytest.approx((rate, 0.0))
    assert of("backbone.simfp_4.0.weight") == pytest.approx((1e-4, 0.1))
    assert of("roi_heads.box_predictor.cls_score.weight") == pytest.approx((1e-4, 0.1))


def test_sgd_stays_detectron2s():
    cfg = config(SOLVER__OPTIMIZER="SGD", SOLVER__LAYER_DECAY=1.0)
    assert type(build_detector_optimizer(cfg, torch.nn.Linear(2, 2))) is torch.optim.SGD


def test_jittered_images_fit_and_their_boxes_follow(tmp_path):
    """A white object on black: the box that the mapper gives is the box of what is white."""
    pixels = np.zeros((60, 100, 3), np.uint8)
    pixels[20:40, 30:80] = 255
    Image.fromarray(pixels).save(tmp_path / "x.png")
    sample = {
        "file_name": str(tmp_path / "x.png"),
        "height": 60,
        "width": 100,
        "annotations": [
            {
                "bbox": [30, 20, 80, 40],
                "bbox_mode": 0,
                "segmentation": [[30, 20, 80, 20, 80, 40, 30, 40]],
                "category_id": 0,
            }
        ],
    }
    cfg = config(INPUT__SCALE_JITTER=64)
    mapper = scale_jitter_mapper(cfg)
    np.random.seed(0)
    sizes = []
    for _ in range(12):
        mapped = mapper(sample)
        sizes.append(max(mapped["image"].shape[1:]))
        white = (mapped["image"][0] > 127).nonzero()
        boxes = mapped["instances"].gt_boxes.tensor
        assert len(boxes) == bool(len(white))
        if len(white):
            (y0, x0), (y1, x1) = white.min(0).values, white.max(0).values + 1
            expected = torch.stack([x0, y0, x1, y1]).float()
            torch.testing.assert_close(boxes[0], expected, rtol=0, atol=1.5)
    assert max(sizes) == 64 and min(sizes) < 40


def test_polygons_are_cut_at_the_border():
    """Areas by the shoelace formula; a triangle half outside keeps what pixels would keep."""

    def area(polygon):
        x, y = polygon.T
        return abs((x * np.roll(y, -1) - y * np.roll(x, -1)).sum()) / 2

    square = np.array([[-5.0, -5], [5, -5], [5, 5], [-5, 5]])
    assert area(clip_polygon(square, 10, 10)) == 25
    assert area(clip_polygon(square + 5, 10, 10)) == 100
    assert len(clip_polygon(square + 50, 10, 10)) == 0
    concave = np.array([[2.0, -4], [8, -4], [8, 6], [6, 6], [6, -2], [4, -2], [4, 6], [2, 6]])
    assert area(clip_polygon(concave, 10, 10)) == 2 * 2 * 6
    rng = np.random.default_rng(0)
    for _ in range(20):
        triangle = rng.uniform(-30, 70, (3, 2))
        grid = np.stack(np.meshgrid(np.arange(400), np.arange(400)), -1) / 10 + 0.05  # of 40 x 40
        a, b, c = triangle
        sides = [np.cross(q - p, grid - p) for p, q in ((a, b), (b, c), (c, a))]
        inside = (np.stack(sides) > 0).all(0) | (np.stack(sides) < 0).all(0)
        cut = clip_polygon(triangle, 40, 40)
        assert (area(cut) if len(cut) else 0) == pytest.approx(inside.mean() * 1600, abs=8)


REFUSALS = {
    "patches": ({"MODEL.VIT.PATCH_SIZE": 14}, "PATCH_SIZE is 14; the strides"),
    "no norm": ({"MODEL.FPN.NORM": ""}, "MODEL.FPN.NORM is empty"),
    "drop path": ({"MODEL.VIT.DROP_PATH": 1.0}, "DROP_PATH is 1.0"),
    "windows": ({"MODEL.VIT.WINDOW_BLOCKS": (0, 3)}, r"\(0, 3\) names a block that is not there"),
    "test images": (
        {"INPUT.MAX_SIZE_TEST": 1333},
        "SQUARE_PAD 1024 would cut images of up to 1333",
    ),
    "training images": ({"INPUT.SCALE_JITTER": 1280}, "would cut images of up to 1280"),
    "decay": ({"SOLVER.LAYER_DECAY": 1.5}, "LAYER_DECAY is 1.5"),
    "decay of SGD": ({"SOLVER.OPTIMIZER": "SGD"}, "LAYER_DECAY 0.7 is for build_vit_sfp_backbone"),
    "optimizer": ({"SOLVER.OPTIMIZER": "LARS"}, "is 'LARS'; detectors train with SGD or ADAMW"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_run_is_refused(name):
    changes, message = REFUSALS[name]
    cfg = config()
    cfg.merge_from_list([item for pair in changes.items() for item in pair])
    with pytest.raises(UserError, match=message):
        check_vit_pyramid(cfg)
        check_detector_solver(cfg)


def test_smaller_patches_give_finer_levels():
    cfg = config(MODEL__VIT__PATCH_SIZE=8, MODEL__VIT__SQUARE_PAD=0)
    levels = build_backbone(cfg)(torch.rand(1, 3, 32, 32))
    assert {name: f.shape[-1] for name, f in levels.items()} == {
        "p1": 16, "p2": 8, "p3": 4, "p4": 2, "p5": 1
    }  # fmt: skip
