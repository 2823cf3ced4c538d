"""SemSegMapper: picture and labels stay aligned, padding is ignored, label files are read as is."""

import cv2
import numpy as np
import pytest
from detectron2.config import get_cfg
from detectron2.data import DatasetCatalog, MetadataCatalog, build_detection_test_loader
from PIL import Image

from moco_d2 import add_moco_config
from moco_d2.data.sem_seg import PaddedCropTransform, RandomPaddedCrop, build_mapper, check_semantic

CLASSES = 5
# Far apart in every channel; label i has colour i.
COLOURS = np.array([[0, 0, 250], [0, 250, 0], [250, 0, 0], [250, 250, 0], [0, 250, 250]], np.uint8)
MEAN = (124, 116, 104)  # PIXEL_MEAN in whole levels


def config(**options):
    cfg = get_cfg()
    add_moco_config(cfg)
    cfg.merge_from_file("configs/transfer/voc_semseg_FCN_R50_30k.yaml")
    settings = {"MODEL.SEM_SEG_HEAD.NUM_CLASSES": CLASSES, "INPUT.SEM_SEG.CROP_SIZE": 64}
    settings |= {key.replace("__", "."): value for key, value in options.items()}
    cfg.merge_from_list([item for pair in settings.items() for item in pair])
    return cfg


def write(folder, labels, palette=False):
    """A picture in the colours of its labels; labels with a palette as in Pascal VOC's files."""
    colours = np.where((labels == 255)[..., None], MEAN, COLOURS[np.minimum(labels, CLASSES - 1)])
    Image.fromarray(colours.astype(np.uint8)).save(folder / "picture.png")
    file = Image.fromarray(labels.astype(np.uint8))
    if palette:
        file.putpalette(np.random.default_rng(0).integers(0, 256, 768, dtype=np.uint8).tobytes())
        assert file.mode == "P"
    file.save(folder / "labels.png")
    return {
        "file_name": str(folder / "picture.png"),
        "sem_seg_file_name": str(folder / "labels.png"),
    }


def blocks(height, width, size=20):
    """Labels in large blocks, so that most pixels are far from the next label."""
    coarse = np.random.default_rng(0).integers(0, CLASSES, (height // size + 1, width // size + 1))
    return np.kron(coarse, np.ones((size, size), int))[:height, :width]


def test_picture_and_labels_are_scaled_and_cropped_alike(tmp_path):
    sample = write(tmp_path, blocks(90, 110), palette=True)
    mapper = build_mapper(config(), is_train=True)
    np.random.seed(0)
    shown, around = [], np.ones((7, 7), np.uint8)
    for _ in range(20):
        mapped = mapper(sample)
        image, labels = mapped["image"].numpy().transpose(1, 2, 0), mapped["sem_seg"].numpy()
        assert image.shape == (64, 64, 3) and image.dtype == np.uint8
        assert labels.shape == (64, 64) and labels.dtype == np.int64
        inside = labels != 255
        shown.append(inside.sum())
        assert np.array_equal(image[~inside], np.broadcast_to(MEAN, image[~inside].shape))
        # Colours are mixed where labels meet and, since a neighbour may be cut off, at the edge.
        levels = labels.astype(np.uint8)
        alone = inside & (cv2.dilate(levels, around) == cv2.erode(levels, around))
        alone[:3] = alone[-3:] = alone[:, :3] = alone[:, -3:] = False
        assert alone.sum() > 200
        difference = np.abs(image[alone].astype(int) - COLOURS[labels[alone]])
        assert difference.max() <= 2
    # Half the picture, 45 x 55, is less than a crop, and twice of it more.
    assert min(shown) < max(shown) == 64 * 64


def test_half_of_the_pictures_are_mirrored(tmp_path):
    labels = blocks(64, 64)
    sample = write(tmp_path, labels)
    cfg = config(INPUT__SEM_SEG__SCALE=(1.0, 1.0))
    for flip, expected in (("horizontal", {0, 1}), ("none", {0})):
        cfg.INPUT.RANDOM_FLIP = flip
        mapper, seen = build_mapper(cfg, is_train=True), set()
        np.random.seed(0)
        for _ in range(12):
            mapped = mapper(sample)
            views = (labels, labels[:, ::-1])
            (which,) = (i for i in (0, 1) if np.array_equal(mapped["sem_seg"], views[i]))
            assert np.array_equal(mapped["image"].permute(1, 2, 0), COLOURS[views[which]])
            seen.add(which)
        assert seen == expected


def test_crops_are_drawn_evenly_in_both_directions_and_padded_at_the_end():
    rows, columns = np.mgrid[:6, :9].astype(np.uint8)
    picture = np.stack([rows, columns, rows], axis=2)
    np.random.seed(0)
    seen = set()
    for _ in range(300):
        crop = RandomPaddedCrop(4, (9, 9, 9), 255).get_transform(picture)
        out = crop.apply_image(picture)
        seen.add((int(out[0, 0, 0]), int(out[0, 0, 1])))
        assert np.array_equal(out, picture[out[0, 0, 0] :, out[0, 0, 1] :][:4, :4])
        assert np.array_equal(crop.apply_segmentation(rows), out[..., 0])
    assert seen == {(top, left) for top in range(3) for left in range(6)}
    crop = RandomPaddedCrop(8, (1, 2, 3), 255).get_transform(picture)
    out, labels = crop.apply_image(picture), crop.apply_segmentation(columns)
    assert out.shape == (8, 8, 3)
    left = int(out[0, 0, 1])
    assert np.array_equal(out[:6], picture[:, left : left + 8])
    assert (out[6:] == (1, 2, 3)).all() and (labels[6:] == 255).all()
    assert (labels[:6] != 255).all()
    moved = PaddedCropTransform(2, 3, 4, (0, 0, 0), 255).apply_coords(np.array([[5.0, 7.0]]))
    assert moved.tolist() == [[2.0, 5.0]]


def test_whole_pictures_are_tested_at_their_own_size(tmp_path):
    sample = write(tmp_path, blocks(47, 83)) | {"image_id": 3}
    mapped = build_mapper(config(), is_train=False)(sample)
    assert mapped["image"].shape == (3, 47, 83) and "sem_seg" not in mapped
    assert (mapped["height"], mapped["width"], mapped["image_id"]) == (47, 83, 3)
    assert np.array_equal(mapped["image"].permute(1, 2, 0), COLOURS[blocks(47, 83)])
    DatasetCatalog.register("one_picture", lambda: [sample])
    cfg = config(DATALOADER__NUM_WORKERS=0)
    loader = build_detection_test_loader(cfg, "one_picture", mapper=build_mapper(cfg, False))
    assert [len(batch) for batch in loader] == [1]
    DatasetCatalog.remove("one_picture")


def test_labels_that_mean_nothing_are_named(tmp_path):
    labels = blocks(40, 40)
    labels[3, 4], labels[5, 6] = CLASSES + 1, 255
    with pytest.raises(ValueError, match=f"labels.png holds the label {CLASSES + 1}, .* none of"):
        build_mapper(config(), is_train=True)(write(tmp_path, labels))
    sample = write(tmp_path, blocks(40, 40))
    Image.fromarray(COLOURS[blocks(40, 40)]).save(tmp_path / "labels.png")
    with pytest.raises(ValueError, match=r"has shape \(40, 40, 3\), its picture has \(40, 40\)"):
        build_mapper(config(), is_train=True)(sample)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"MODEL__SEM_SEG_HEAD__NUM_CLASSES": 54}, "NUM_CLASSES is 54, data set .* has 5: set"),
        ({"MODEL__SEM_SEG_HEAD__IGNORE_VALUE": 9}, "IGNORE_VALUE is 9, data set .* has 255: set"),
        ({"INPUT__SEM_SEG__SCALE": (2.0, 0.5)}, "two rising factors"),
        ({"INPUT__SEM_SEG__SCALE": (1.0,)}, "two rising factors"),
        ({"INPUT__RANDOM_FLIP": "vertical"}, "'horizontal' or 'none'"),
        (
            {"MODEL__META_ARCHITECTURE": "GeneralizedRCNN"},
            "CROP_SIZE 64 is for .* SemanticSegmentor, not",
        ),
    ],
)
def test_configs_that_do_not_fit_are_refused(options, message):
    if "five_classes" not in DatasetCatalog.list():
        DatasetCatalog.register("five_classes", list)
        MetadataCatalog.get("five_classes").set(stuff_classes=list("abcde"), ignore_label=255)
    sets = {"DATASETS__TRAIN": ("five_classes",), "DATASETS__TEST": ()}
    check_semantic(config(**sets))
    with pytest.raises(ValueError, match=message):
        check_semantic(config(**sets, **options))
