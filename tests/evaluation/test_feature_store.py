"""The store of features: nothing is asked for twice, nothing old is served."""

import os
import tarfile

import numpy as np
import pytest

from moco_d2.data.datasets import load_image_index
from moco_d2.data.index import ImageIndex
from moco_d2.evaluation.feature_store import FeatureStore, fingerprint


def numbers(*values):
    return np.array(values, dtype=np.int64)


def features_of(images):
    return np.stack([images, images**2], axis=1).astype(np.float32)


def test_what_is_kept_is_not_missing_and_comes_back_in_order(tmp_path):
    store, wanted = FeatureStore(tmp_path, {"weights": "a"}), np.arange(10)
    assert store.missing(wanted).tolist() == wanted.tolist()
    store.add(numbers(4, 6, 7), features_of(numbers(4, 6, 7)), numbers(5))
    store.add(numbers(0, 1), features_of(numbers(0, 1)), numbers())
    again = FeatureStore(tmp_path, {"weights": "a"})
    assert again.missing(wanted).tolist() == [2, 3, 8, 9]
    found, features = again.load(numbers(1, 4, 5, 7))
    assert found.tolist() == [1, 4, 7]  # 5 cannot be read
    np.testing.assert_array_equal(features, features_of(found))
    assert features.dtype == np.float32


def test_the_same_images_twice_count_once(tmp_path):
    store = FeatureStore(tmp_path, {})
    for part in (numbers(0, 1, 2), numbers(1, 2, 3)):
        store.add(part, features_of(part), numbers())
    found, features = store.load(np.arange(4))
    assert found.tolist() == [0, 1, 2, 3]
    np.testing.assert_array_equal(features, features_of(found))


def test_other_weights_or_sizes_have_a_store_of_their_own(tmp_path):
    FeatureStore(tmp_path, {"size": 224}).add(numbers(0), features_of(numbers(0)), numbers())
    assert len(FeatureStore(tmp_path, {"size": 256}).missing(numbers(0))) == 1


def test_what_was_being_written_in_a_kill_is_not_read(tmp_path):
    store = FeatureStore(tmp_path, {})
    store.add(numbers(0), features_of(numbers(0)), numbers())
    (store.folder / ".abc.77.tmp.npz").write_bytes(b"PK half a file")
    assert store.missing(np.arange(2)).tolist() == [1]


def test_a_set_that_cannot_be_read_at_all_is_said_to_be_so(tmp_path):
    store = FeatureStore(tmp_path, {})
    store.add(numbers(), np.empty((0, 0), np.float32), numbers(0, 1))
    assert store.missing(numbers(0, 1)).tolist() == []
    with pytest.raises(ValueError, match="none of the images can be read"):
        store.load(numbers(0, 1))


def test_the_fingerprint_is_of_paths_and_of_what_the_files_were(tmp_path):
    paths = [tmp_path / name for name in ("a.png", "b.png")]
    for path in paths:
        path.write_bytes(b"1234")
    index = ImageIndex([str(path) for path in paths], [0, 1], ("x", "y"))
    first = fingerprint(index)
    assert first == fingerprint(ImageIndex([str(path) for path in paths], [1, 1], ("x", "y")))
    assert first != fingerprint(index.take(numbers(1, 0)))
    os.utime(paths[0], ns=(1, 1))
    second = fingerprint(index)
    assert second != first
    paths[1].write_bytes(b"12345")
    third = fingerprint(index)
    assert third not in (first, second)
    paths[0].unlink()
    assert fingerprint(index) not in (first, second, third)


def test_a_shards_images_change_with_the_shard(tmp_path):
    for name in ("a.png", "b.png"):
        (tmp_path / name).write_bytes(b"1234")
    shard = tmp_path / "s.tar"
    with tarfile.open(shard, "w") as tar:
        for name in ("a.png", "b.png"):
            tar.add(tmp_path / name, arcname=name)
    index = load_image_index([str(shard)])
    first = fingerprint(index)
    assert first == fingerprint(load_image_index([str(shard)]))
    os.utime(shard, ns=(1, 1))
    assert fingerprint(index) != first
