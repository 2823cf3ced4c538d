"""Stick figures: mirror symmetry, visibility and the shape that tells left from right."""

from dataclasses import replace

import numpy as np
import pytest

from moco_d2.data.synthetic.figures import (
    KEYPOINT_CONNECTION_RULES,
    KEYPOINT_FLIP_MAP,
    KEYPOINT_NAMES,
    PARTS,
    draw_figure_,
    label_keypoints,
    sample_pose,
)
from moco_d2.data.synthetic.sets import SETS

SIDE = 128
SWAP = {"left": "right", "right": "left"}


def swap_sides(name):
    side, separator, rest = name.partition("_")
    return SWAP[side] + separator + rest if separator else name


def mirror(pose):
    points = {swap_sides(name): (SIDE - 1 - x, y) for name, (x, y) in pose.points.items()}
    return replace(pose, points=points, front=SWAP[pose.front])


def draw(pose):
    """Masks of the parts by name, and the topmost part of each pixel."""
    image = np.zeros((SIDE, SIDE, 3), np.float32)
    top = np.full((SIDE, SIDE), -1)
    parts = draw_figure_(image, pose, np.random.default_rng(0))
    for name, mask in parts:
        top[mask] = PARTS.index(name)
    return dict(parts), top


def pose_inside(seed):
    """A random pose, moved so that all of it is in the image."""
    pose = sample_pose(np.random.default_rng(seed))
    corners = np.array(list(pose.points.values()))
    shift = np.round(SIDE / 2 - (corners.min(axis=0) + corners.max(axis=0)) / 2)
    return replace(
        pose, points={n: tuple((np.array(p) + shift).tolist()) for n, p in pose.points.items()}
    )


def test_nine_joints_and_each_left_one_has_a_right_one():
    assert len(KEYPOINT_NAMES) == 9
    paired = [name for pair in KEYPOINT_FLIP_MAP for name in pair]
    assert sorted(paired + ["head"]) == sorted(KEYPOINT_NAMES)
    assert {n for rule in KEYPOINT_CONNECTION_RULES for n in rule[:2]} == set(KEYPOINT_NAMES)


@pytest.mark.parametrize("seed", range(8))
def test_the_mirrored_figure_is_the_figure_of_the_mirrored_pose(seed):
    pose = pose_inside(seed)
    parts, _ = draw(pose)
    mirrored, _ = draw(mirror(pose))
    assert set(parts) == set(PARTS)
    for name, mask in parts.items():
        # A pixel whose centre is on the border may fall to either side by rounding.
        difference = mask[:, ::-1] ^ mirrored[swap_sides(name)]
        assert np.count_nonzero(difference) <= 2, name


@pytest.mark.parametrize("seed", range(8))
def test_pads_bulge_to_one_side_on_left_limbs_and_to_the_other_on_right_ones(seed):
    pose = pose_inside(seed)
    parts, _ = draw(pose)
    for limb, root, joint in (("arm", "shoulder", "elbow"), ("leg", "hip", "knee")):
        for side, sign in (("left", 1), ("right", -1)):
            start = np.array(pose.points[f"{side}_{root}"])
            middle = np.array(pose.points[f"{side}_{joint}"])
            centroid = np.argwhere(parts[f"{side}_{limb}/pad"]).mean(axis=0)[::-1]
            along, bulge = middle - start, centroid - middle
            assert sign * (along[0] * bulge[1] - along[1] * bulge[0]) < 0


def test_joints_are_drawn_where_they_are_labelled_and_visible_ones_are_seen():
    seen = {0: 0, 1: 0, 2: 0}
    for number in range(1, 61):
        for figure in SETS["figures_test"].picture(number, seed=0).instances:
            assert figure.keypoints.shape == (9, 3)
            for x, y, visibility in figure.keypoints:
                seen[int(visibility)] += 1
                if visibility == 0:
                    assert x == y == 0
                else:
                    assert figure.mask[y, x] or visibility == 1
    assert min(seen.values()) > 0


def test_a_covered_joint_is_labelled_as_covered():
    pose = pose_inside(1)
    _, top = draw(pose)
    visibility = dict(zip(KEYPOINT_NAMES, label_keypoints(pose, top)[:, 2], strict=True))
    assert visibility["head"] == visibility["left_foot"] == 2

    x, y = (int(value) for value in pose.points["left_foot"])
    top[y - 3 : y + 4, x - 3 : x + 4] = -1  # something else lies over the foot
    assert label_keypoints(pose, top)[KEYPOINT_NAMES.index("left_foot")].tolist() == [x, y, 1]

    over_head = replace(pose, points=pose.points | {"left_hand": pose.points["head"]})
    _, top = draw(over_head)
    visibility = dict(zip(KEYPOINT_NAMES, label_keypoints(over_head, top)[:, 2], strict=True))
    assert visibility["head"] == 1 and visibility["left_hand"] == 2


def test_a_joint_outside_of_the_image_is_not_labelled():
    pose = pose_inside(2)
    outside = replace(pose, points=pose.points | {"right_hand": (128.0, 60.0)})
    _, top = draw(outside)
    row = label_keypoints(outside, top)[KEYPOINT_NAMES.index("right_hand")]
    assert row.tolist() == [0, 0, 0]
