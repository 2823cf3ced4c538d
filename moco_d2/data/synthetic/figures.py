"""Jointed stick figures with named joints, the keypoint part of the built-in data set.

Left and right are told apart by shape: every limb carries a pad at its middle joint and a thumb or
a foot at its end, all on the outer side. Seen along the limb that is one hand's side for a left
limb and the other's for a right limb, so that a mirrored figure, its labels swapped, is again a
proper figure: flipping images is a valid augmentation.
"""

import math
from dataclasses import dataclass

import numpy as np

from moco_d2.data.synthetic.drawing import (
    blend_,
    contrasting_colours,
    draw_background,
    draw_clutter_,
    draw_object_,
    finish_image,
    light_gradient,
    pixel_grid,
)
from moco_d2.data.synthetic.pictures import SCENE_SIDE, Instance, Picture, annotate
from moco_d2.data.synthetic.shapes import PRETRAINING_CLASSES

FIGURE_CLASSES = ("figure",)
# The middle joint and the end of each limb, left limbs on the right of the image as in a portrait.
_LIMBS = {"arm": ("elbow", "hand"), "leg": ("knee", "foot")}
KEYPOINT_NAMES = (
    "head",
    "left_elbow",
    "right_elbow",
    "left_hand",
    "right_hand",
    "left_knee",
    "right_knee",
    "left_foot",
    "right_foot",
)
KEYPOINT_FLIP_MAP = tuple(
    (name, name.replace("left", "right")) for name in KEYPOINT_NAMES if name.startswith("left")
)
# Joints to connect when a figure is visualised, with the colour (RGB) of the line.
KEYPOINT_CONNECTION_RULES = tuple(
    (start, end, colour)
    for side, colour in (("left", (255, 140, 0)), ("right", (0, 160, 255)))
    for start, end in (
        ("head", f"{side}_elbow"),
        (f"{side}_elbow", f"{side}_hand"),
        ("head", f"{side}_knee"),
        (f"{side}_knee", f"{side}_foot"),
    )
)
# COCO's per-joint tolerance of the object keypoint similarity, which has no value for our joints;
# it belongs into TEST.KEYPOINT_OKS_SIGMAS.
KEYPOINT_OKS_SIGMAS = (0.1,) * len(KEYPOINT_NAMES)

# Lengths and half widths in units of the torso's length; see sample_pose and _figure_parts.
_NECK_TO_HEAD, _HEAD_RADIUS = 0.38, 0.27
_GIRDLE = {"arm": 0.3, "leg": 0.2}  # half the distance of the shoulders, of the hips
_SEGMENTS = {"arm": (0.52, 0.5), "leg": (0.62, 0.6)}
_LIMB_WIDTH, _TORSO_WIDTH, _PAD_RADIUS = 0.085, 0.11, 0.22
_SIDE = {"left": 1, "right": -1}  # +1: the outer side is towards larger x when a limb hangs down

_LIMB_PARTS = ("upper", "lower", "pad", "tip")
PARTS = ("torso", "head") + tuple(
    f"{side}_{limb}/{part}" for side in _SIDE for limb in _LIMBS for part in _LIMB_PARTS
)
# A joint is visible where the topmost thing at its pixel is one of these parts of its own figure.
_PARTS_OF_JOINT = {"head": {"head"}}
for _side in _SIDE:
    for _limb, (_middle, _end) in _LIMBS.items():
        _prefix = f"{_side}_{_limb}/"
        _PARTS_OF_JOINT[f"{_side}_{_middle}"] = {_prefix + p for p in ("upper", "lower", "pad")}
        _PARTS_OF_JOINT[f"{_side}_{_end}"] = {_prefix + p for p in ("lower", "tip")}
_NO_FIGURE = -1


@dataclass(frozen=True)
class Pose:
    """Where a figure's joints are, in pixels; whole numbers are the centres of pixels.

    Attributes:
        unit: length of the torso.
        points: x and y by name: "neck", "pelvis", "{side}_shoulder", "{side}_hip" and the joints
            of KEYPOINT_NAMES, which are whole numbers.
        front: the side, "left" or "right", whose limbs are drawn over the other's.
    """

    unit: float
    points: dict[str, tuple[float, float]]
    front: str


@dataclass(frozen=True)
class _Part:
    """A piece of a figure: its name of PARTS, signed distance in pixels (H, W), and colour."""

    name: str
    distance: np.ndarray
    colour: int


def render_figures(number: int, classes: tuple[str, ...], rng: np.random.Generator) -> Picture:
    """One or two figures in a cluttered 128 px image, sometimes behind a textured object."""
    image = draw_background(SCENE_SIDE, (8, 35), rng)
    draw_clutter_(image, int(rng.integers(3, 10)), rng)
    poses = [sample_pose(rng)]
    if rng.random() < 0.4:
        second = sample_pose(rng)
        gap = math.dist(second.points["pelvis"], poses[0].points["pelvis"])
        if gap > 1.2 * max(second.unit, poses[0].unit):
            poses.append(second)

    # What is seen at each pixel: the part, counted on over the figures, or _NO_FIGURE.
    top = np.full((SCENE_SIDE, SCENE_SIDE), _NO_FIGURE)
    for i, pose in enumerate(poses):
        for part, inside in draw_figure_(image, pose, rng):
            top[inside] = i * len(PARTS) + PARTS.index(part)
    if rng.random() < 0.5:
        name = PRETRAINING_CLASSES[rng.integers(len(PRETRAINING_CLASSES))]
        joints = list(poses[0].points.values())
        x, y = (np.array(joints[rng.integers(len(joints))]) + rng.normal(0, 6, 2)).tolist()
        window, inside = draw_object_(image, name, (x, y), rng.uniform(8, 15), rng)
        top[window][inside] = _NO_FIGURE

    instances = [
        Instance(0, top // len(PARTS) == i, label_keypoints(pose, top - i * len(PARTS)))
        for i, pose in enumerate(poses)
    ]
    return annotate(finish_image(image, rng), instances)


def draw_figure_(
    image: np.ndarray, pose: Pose, rng: np.random.Generator
) -> list[tuple[str, np.ndarray]]:
    """Draw a figure with random colours and light, in place.

    Args:
        image: float32 (H, W, 3).
        pose: where its joints are.
        rng: source of the colours and the light.

    Returns:
        The parts in the order in which they were drawn, each with its mask, bool (H, W).
    """
    height, width = image.shape[:2]
    x, y = pixel_grid(slice(0, width), slice(0, height), (0.0, 0.0))
    centre_x, centre_y = pose.points["pelvis"]
    light = light_gradient((x - centre_x) / pose.unit, (y - centre_y) / pose.unit, 0.15, rng)
    colours = contrasting_colours(rng)
    drawn = []
    for part in _figure_parts(pose, x, y):
        coverage = np.clip(0.5 - part.distance, 0, 1)
        blend_(image, colours[part.colour] * light, coverage[..., None])
        drawn.append((part.name, coverage > 0.5))
    return drawn


def sample_pose(rng: np.random.Generator) -> Pose:
    """A random pose, wholly or for the most part inside of the image."""
    unit = rng.uniform(19, 30)
    lean = rng.uniform(-0.35, 0.35)
    up = np.array([math.sin(lean), -math.cos(lean)])
    across = np.array([math.cos(lean), math.sin(lean)])  # from the right side to the left
    points = {"pelvis": np.zeros(2), "neck": unit * up, "head": unit * (1 + _NECK_TO_HEAD) * up}
    for side, sign in _SIDE.items():
        points[f"{side}_shoulder"] = points["neck"] + sign * unit * _GIRDLE["arm"] * across
        points[f"{side}_hip"] = points["pelvis"] + sign * unit * _GIRDLE["leg"] * across
        # Angles outwards from straight down; then how much the limb bends at its middle joint.
        swing = {"arm": rng.uniform(0.15, 2.4), "leg": rng.uniform(-0.1, 0.9)}
        bend = {"arm": rng.uniform(-1.6, 1.6), "leg": rng.uniform(-1.0, 0.4)}
        for limb, root in (("arm", "shoulder"), ("leg", "hip")):
            at, angle = points[f"{side}_{root}"], swing[limb]
            for joint, length in zip(_LIMBS[limb], _SEGMENTS[limb], strict=True):
                outwards = math.sin(angle) * sign * across
                at = at + unit * length * (outwards - math.cos(angle) * up)
                points[f"{side}_{joint}"] = at
                angle += bend[limb]

    corners = np.array(list(points.values()))
    # The whole figure may leave the image by 8 pixels, so that a few joints lie outside.
    low, high = -8 - corners.min(axis=0), SCENE_SIDE + 8 - corners.max(axis=0)
    shift = rng.uniform(np.minimum(low, high), np.maximum(low, high))
    placed = {name: point + shift for name, point in points.items()}
    for name in KEYPOINT_NAMES:
        placed[name] = np.round(placed[name])
    front = "left" if rng.random() < 0.5 else "right"
    return Pose(unit, {name: tuple(point.tolist()) for name, point in placed.items()}, front)


def label_keypoints(pose: Pose, top: np.ndarray) -> np.ndarray:
    """The joints in COCO's form: int64 (9, 3) of x, y, visibility.

    Visibility is 2 where the joint is seen, 1 where something else covers it, and 0, with x and y
    0, outside of the image.

    Args:
        pose: where the joints are.
        top: what is seen at each pixel (H, W): an index into PARTS, any other number where it is
            nothing of this figure.
    """
    height, width = top.shape
    keypoints = np.zeros((len(KEYPOINT_NAMES), 3), np.int64)
    for row, name in zip(keypoints, KEYPOINT_NAMES, strict=True):
        x, y = (int(value) for value in pose.points[name])
        if 0 <= x < width and 0 <= y < height:
            seen = 0 <= top[y, x] < len(PARTS) and PARTS[top[y, x]] in _PARTS_OF_JOINT[name]
            row[:] = x, y, 2 if seen else 1
    return keypoints


def _figure_parts(pose: Pose, x: np.ndarray, y: np.ndarray) -> list[_Part]:
    """All parts from the backmost to the topmost, on the grid of ``x`` (1, W) and ``y`` (H, 1)."""
    points, unit = pose.points, pose.unit
    sides = [side for side in _SIDE if side != pose.front] + [pose.front]
    torso = np.minimum.reduce(
        [
            _capsule(x, y, points["neck"], points["pelvis"], _TORSO_WIDTH * unit),
            _capsule(x, y, points["left_hip"], points["right_hip"], _TORSO_WIDTH * unit),
            _capsule(x, y, points["left_shoulder"], points["right_shoulder"], _LIMB_WIDTH * unit),
            _capsule(x, y, points["neck"], points["head"], _LIMB_WIDTH * unit),
        ]
    )
    head = _disk(x, y, points["head"], _HEAD_RADIUS * unit)
    legs = [part for side in sides for part in _limb_parts(pose, side, "leg", "hip", x, y)]
    arms = [part for side in sides for part in _limb_parts(pose, side, "arm", "shoulder", x, y)]
    return [*legs, _Part("torso", torso, 0), _Part("head", head, 1), *arms]


def _limb_parts(pose: Pose, side: str, limb: str, root: str, x, y) -> list[_Part]:
    unit, width = pose.unit, _LIMB_WIDTH * pose.unit
    middle_name, end_name = (f"{side}_{joint}" for joint in _LIMBS[limb])
    start, middle, end = (pose.points[name] for name in (f"{side}_{root}", middle_name, end_name))
    upper_out, lower_out = _outer(start, middle, side), _outer(middle, end, side)

    # The pad is half a disk that bulges to the outer side of the upper segment.
    pad = np.maximum(
        _disk(x, y, middle, _PAD_RADIUS * unit),
        (middle[0] - x) * upper_out[0] + (middle[1] - y) * upper_out[1],
    )
    if limb == "arm":  # a palm with a short thumb
        thumb = _reach(end, lower_out, 0.27 * unit)
        tip = np.minimum(_disk(x, y, end, 0.14 * unit), _capsule(x, y, end, thumb, 0.07 * unit))
    else:  # a long foot
        tip = _capsule(x, y, end, _reach(end, lower_out, 0.36 * unit), 0.11 * unit)
    return [
        _Part(f"{side}_{limb}/upper", _capsule(x, y, start, middle, width), 0),
        _Part(f"{side}_{limb}/lower", _capsule(x, y, middle, end, width), 0),
        _Part(f"{side}_{limb}/pad", pad, 1),
        _Part(f"{side}_{limb}/tip", tip, 1),
    ]


def _outer(start: tuple[float, float], end: tuple[float, float], side: str) -> tuple[float, float]:
    """Unit normal of a segment towards the outer side of its limb."""
    length = math.dist(start, end)
    along_x, along_y = (end[0] - start[0]) / length, (end[1] - start[1]) / length
    return _SIDE[side] * along_y, -_SIDE[side] * along_x


def _reach(point, direction, length: float) -> tuple[float, float]:
    return point[0] + length * direction[0], point[1] + length * direction[1]


def _disk(x, y, centre, radius: float) -> np.ndarray:
    """Signed distance to a disk, (H, W)."""
    return np.hypot(x - np.float32(centre[0]), y - np.float32(centre[1])) - np.float32(radius)


def _capsule(x, y, start, end, radius: float) -> np.ndarray:
    """Signed distance to a segment with rounded ends, (H, W)."""
    along_x, along_y = end[0] - start[0], end[1] - start[1]
    squared_length = along_x**2 + along_y**2
    x, y = x - start[0], y - start[1]
    share = np.clip((x * along_x + y * along_y) / squared_length, 0, 1)
    return np.hypot(x - share * along_x, y - share * along_y) - np.float32(radius)
