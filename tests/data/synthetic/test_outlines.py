"""Polygons give back the masks that they were made of."""

import numpy as np
import pycocotools.mask as mask_util
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moco_d2.data.synthetic.outlines import mask_to_polygons


def rasterise(polygons, shape):
    if not polygons:
        return np.zeros(shape, bool)
    return mask_util.decode(mask_util.merge(mask_util.frPyObjects(polygons, *shape))).astype(bool)


@given(
    st.tuples(st.integers(1, 12), st.integers(1, 12)),
    st.floats(0.05, 0.95),
    st.integers(0, 2**32 - 1),
)
def test_any_mask_survives_the_way_through_polygons(shape, density, seed):
    mask = np.random.default_rng(seed).random(shape) < density
    polygons = mask_to_polygons(mask)
    assert np.array_equal(rasterise(polygons, shape), mask)
    assert all(len(p) >= 8 and all(isinstance(c, float) for c in p) for p in polygons)


def test_a_rectangle_is_its_four_corners():
    mask = np.zeros((10, 10), bool)
    mask[2:5, 3:9] = True
    (polygon,) = mask_to_polygons(mask)
    assert {tuple(c) for c in np.reshape(polygon, (-1, 2))} == {(3, 2), (9, 2), (9, 5), (3, 5)}


@pytest.mark.parametrize("width", [1, 2, 5])
def test_a_hole_is_cut_open_and_the_parts_do_not_overlap(width):
    mask = np.ones((9, 9), bool)
    mask[4, 2 : 2 + width] = False
    polygons = mask_to_polygons(mask)
    parts = [rasterise([polygon], mask.shape) for polygon in polygons]
    assert len(parts) == 2 and np.array_equal(np.sum(parts, axis=0), mask)
