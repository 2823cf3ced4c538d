"""Few-label subsets: what a number means, the same for the same seed, small in large."""

import cv2
import numpy as np
import pytest

from moco_d2.data.few_labels import few_images, few_per_class
from moco_d2.data.index import ImageIndex, IndexBuilder
from moco_d2.errors import UserError

# 1000 images of class 0, 37 of class 1, 3 of class 3, none of class 2, in no order.
LABELS = np.random.default_rng(0).permutation(np.repeat([0, 1, 3], [1000, 37, 3]))


@pytest.mark.parametrize(
    ("few", "expected"),
    [
        (0.0, {0: 1000, 1: 37, 3: 3}),
        (0.01, {0: 10, 1: 1, 3: 1}),
        (0.1, {0: 100, 1: 4, 3: 1}),
        (0.5, {0: 500, 1: 18, 3: 2}),
        (1.0, {0: 1, 1: 1, 3: 1}),
        (3.0, {0: 3, 1: 3, 3: 3}),
    ],
)
def test_every_class_keeps_its_share_or_as_many_images(few, expected):
    kept = few_per_class(LABELS, few, seed=5)
    assert (np.diff(kept) > 0).all()
    assert dict(zip(*np.unique(LABELS[kept], return_counts=True), strict=True)) == expected


@pytest.mark.parametrize("small_large", [(0.01, 0.1), (1.0, 0.1), (1.0, 3.0), (0.1, 0.0)])
def test_a_small_subset_lies_in_a_large_one_of_the_same_seed(small_large):
    small, large = (set(few_per_class(LABELS, few, seed=5)) for few in small_large)
    assert small < large
    small, large = (set(few_images(200, few, seed=5)) for few in small_large)
    assert small < large


def test_the_seed_decides_and_classes_are_drawn_independently():
    assert few_images(1000, 10.0, 1).tolist() == few_images(1000, 10.0, 1).tolist()
    assert few_images(1000, 10.0, 1).tolist() != few_images(1000, 10.0, 2).tolist()
    assert len(few_images(1000, 0.013, 1)) == 13
    two = few_per_class(np.repeat([0, 1], 1000), 10.0, 1)
    assert two[:10].tolist() != (two[10:] - 1000).tolist()


def test_a_draw_is_uniform():
    """Of 4 images 2 are kept: each in half of 2000 draws, standard deviation 22."""
    counts = np.bincount(np.concatenate([few_images(4, 2.0, seed) for seed in range(2000)]))
    assert np.abs(counts - 1000).max() < 5 * 22.4


@pytest.mark.parametrize(
    ("few", "message"),
    [
        (-0.1, "FEW_LABELS is -0.1: give 0 for all labels"),
        (1.5, "FEW_LABELS is 1.5: give"),
        (4.0, "FEW_LABELS is 4, and there are only 3 images"),
    ],
)
def test_numbers_that_mean_nothing_are_refused(few, message):
    with pytest.raises(UserError, match=message):
        few_per_class(LABELS, few, seed=0)


def test_an_index_of_some_images_reads_as_they_did(tmp_path):
    """Files in several folders and, in the end, a member of a shard."""
    paths = [str(tmp_path / name) for name in ("a/1.png", "ü/22.png", "a/333.png", "4.png")]
    for i, path in enumerate(paths):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_bytes(cv2.imencode(".png", np.full((2, 2, 3), i, np.uint8))[1])
    builder = IndexBuilder()
    for label, path in enumerate(paths):
        builder.add_path(path, label)
    builder.add_member(paths[3], "inside.png", 4, 10, 1)
    whole = builder.finish(["a", "b", "c", "d"])
    some = whole.take(np.array([4, 1, 2]))
    assert [some.path(i) for i in range(3)] == [whole.path(i) for i in (4, 1, 2)]
    assert [some.read(i) for i in range(3)] == [whole.read(i) for i in (4, 1, 2)]
    assert some.labels.tolist() == [1, 1, 2] and some.classes == whole.classes
    none = ImageIndex(paths, [0] * 4, ["a"]).take(np.array([], dtype=np.int64))
    assert len(none) == 0
