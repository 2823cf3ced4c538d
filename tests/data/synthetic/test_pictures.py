"""Objects and scenes: what is annotated is what is drawn."""

import numpy as np
import pytest

from moco_d2.data.synthetic.drawing import draw_object_
from moco_d2.data.synthetic.pictures import (
    IGNORE_LABEL,
    MIN_VISIBLE_PIXELS,
    Instance,
    annotate,
)
from moco_d2.data.synthetic.sets import SETS
from moco_d2.data.synthetic.shapes import PRETRAINING_CLASSES

SCENES = [SETS["scenes_train"].picture(number, seed=3) for number in range(1, 61)]


@pytest.mark.parametrize("name", SETS)
def test_a_picture_is_a_function_of_seed_set_and_number(name):
    one, two = (SETS[name].picture(5, seed=11).image for _ in range(2))
    assert np.array_equal(one, two) and one.dtype == np.uint8
    assert one.shape == ((64, 64, 3) if name.startswith("objects") else (128, 128, 3))
    others = [SETS[name].picture(5, seed=12), SETS[name].picture(6, seed=11)]
    others += [SETS[other].picture(5, seed=11) for other in SETS if other != name]
    assert not any(np.array_equal(one, other.image) for other in others)


def test_classes_of_objects_are_balanced():
    labels = [SETS["objects_val"].picture(number, seed=0).label for number in range(1, 33)]
    assert np.array_equal(np.bincount(labels, minlength=16), np.full(16, 2))


def test_masks_do_not_overlap_and_agree_with_the_semantic_labels():
    for scene in SCENES:
        stacked = np.array([instance.mask for instance in scene.instances])
        assert stacked.sum(axis=0).max() <= 1
        expected = np.zeros(scene.image.shape[:2], int)
        for instance in scene.instances:
            expected[instance.mask] = 1 + instance.label
        known = scene.semantic != IGNORE_LABEL
        assert np.array_equal(scene.semantic[known], expected[known])


def test_scenes_have_one_to_five_objects_and_few_scenes_show_all_classes():
    counts = {len(scene.instances) for scene in SCENES}
    assert counts == {1, 2, 3, 4, 5}
    first_labels = {scene.instances[0].label for scene in SCENES[:12]}
    assert first_labels == set(range(12))


@pytest.mark.parametrize("class_name", PRETRAINING_CLASSES)
def test_an_object_changes_the_image_where_its_mask_is(class_name):
    image = np.full((100, 120, 3), 1000.0, np.float32)  # brighter than any object
    rng = np.random.default_rng(0)
    window, inside = draw_object_(image, class_name, (50.3, 41.8), 20.0, rng)
    mask = np.zeros(image.shape[:2], bool)
    mask[window] = inside
    # At least half covered by at least 90 %, by colours of at most 255 * 1.5.
    assert (image[mask] < 800).all()
    assert (image[~mask] > 1000 - 0.5 * 1000 - 1).all() and (image == 1000).any()


@pytest.mark.parametrize("centre", [(-5.0, 3.0), (63.0, 70.0), (-80.0, 30.0), (30.0, 300.0)])
def test_an_object_may_leave_the_image(centre):
    image = np.zeros((64, 64, 3), np.float32)
    window, inside = draw_object_(image, "plain_disk", centre, 10.0, np.random.default_rng(0))
    y, x = np.mgrid[:64, :64]
    covered = np.zeros((64, 64), bool)
    covered[window] = inside
    # The aspect is at most exp(0.18), the disk's radius 0.85 of the object's.
    assert not covered[np.hypot(x - centre[0], y - centre[1]) > 8.5 * np.exp(0.18) + 1].any()
    assert covered.any() == (np.hypot(*(np.clip(centre, 0, 63) - centre)) < 8)


def test_what_is_hardly_seen_is_ignored_rather_than_annotated():
    seen, hidden = np.zeros((2, 20, 20), bool)
    seen[:10], hidden[15, : MIN_VISIBLE_PIXELS // 3] = True, True
    picture = annotate(np.zeros((20, 20, 3), np.uint8), [Instance(4, seen), Instance(7, hidden)])
    assert [instance.label for instance in picture.instances] == [4]
    assert set(np.unique(picture.semantic)) == {0, 5, IGNORE_LABEL}
    assert np.array_equal(picture.semantic == IGNORE_LABEL, hidden)
