"""The classes of the built-in data set."""

import numpy as np
import pytest

from moco_d2.data.synthetic.shapes import (
    NOVEL_CLASSES,
    PRETRAINING_CLASSES,
    SCENE_CLASSES,
    SHAPES,
    TEXTURES,
)

GRID = np.linspace(-1.5, 1.5, 301, dtype=np.float32)
U, V = np.meshgrid(GRID, GRID)


def test_every_class_is_a_texture_and_a_shape():
    assert len(PRETRAINING_CLASSES) == 16 and len(SCENE_CLASSES) == len(NOVEL_CLASSES) == 12
    for name in PRETRAINING_CLASSES + NOVEL_CLASSES:
        texture, shape = name.split("_")
        assert texture in TEXTURES and shape in SHAPES


def test_scenes_show_pretraining_classes_and_novel_sets_new_pairs_of_known_parts():
    assert set(SCENE_CLASSES) < set(PRETRAINING_CLASSES)
    assert not set(NOVEL_CLASSES) & set(PRETRAINING_CLASSES)
    for part in (0, 1):
        known = {name.split("_")[part] for name in PRETRAINING_CLASSES}
        assert {name.split("_")[part] for name in NOVEL_CLASSES} <= known


def test_neither_shape_nor_texture_alone_tells_the_class():
    for names in (PRETRAINING_CLASSES, SCENE_CLASSES):
        for shape in {name.split("_")[1] for name in names}:
            assert sum(name.endswith("_" + shape) for name in names) >= 2


@pytest.mark.parametrize(
    "shape, area",
    [
        ("disk", np.pi * 0.85**2),
        ("square", 1.5**2),
        ("triangle", 3 * np.sqrt(3) * 0.5**2),
        ("star", 10 * 0.5 * 0.45 * np.sin(np.pi / 5)),
        ("plus", 2 * 1.84 * 0.64 - 0.64**2),
        ("ring", np.pi * (0.93**2 - 0.39**2)),
        ("bar", 1.2 * 0.74 + np.pi * 0.37**2),
    ],
)
def test_shapes_have_the_area_of_their_geometry(shape, area):
    inside = SHAPES[shape](U, V) < 0
    assert inside.mean() * 3.01**2 == pytest.approx(area, rel=0.02)


def test_a_crescent_is_a_disk_less_another():
    inside = SHAPES["crescent"](U, V) < 0
    expected = (U**2 + V**2 < 0.92**2) & ((U - 0.45) ** 2 + V**2 > 0.68**2)
    assert np.count_nonzero(inside ^ expected) <= 8  # grid points on the border


@pytest.mark.parametrize("texture", TEXTURES)
def test_textures_are_shares_in_float32(texture):
    share = TEXTURES[texture](U, V, 1.7, 0.4)
    assert share.dtype == np.float32 and share.shape == U.shape
    assert share.min() >= 0 and share.max() <= 1
    assert texture == "plain" or share.max() - share.min() == 1
