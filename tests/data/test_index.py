"""The index of a big data set: bytes, shared, and kept between starts."""

import multiprocessing
import os
import pickle
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moco_d2.data import index_cache
from moco_d2.data.datasets import load_image_index
from moco_d2.data.index import ImageIndex, IndexBuilder

paths = st.lists(st.text(st.characters(exclude_characters="\0"), max_size=12), max_size=20)


@settings(max_examples=60, deadline=None)
@given(first=paths, second=paths)
def test_paths_come_back_as_they_were(first, second):
    first, second = ([p for p in ps if not _is_surrogate(p)] for ps in (first, second))
    index = ImageIndex.concatenate(
        [ImageIndex(first, [0] * len(first), ("x",)), ImageIndex(second, [-1] * len(second))]
    )
    assert [index.path(i) for i in range(len(index))] == first + second
    assert index.labels.tolist() == [0] * len(first) + [-1] * len(second)


def _is_surrogate(path: str) -> bool:
    return os.fsdecode(path.encode("utf-8", "replace")) != path


def test_an_index_of_imagenets_size_stays_below_150_megabytes():
    """A tenth of it, with paths that are longer than most."""
    builder = IndexBuilder()
    for i in range(128_000):
        builder.add_path(
            f"/data/shared/group/datasets/imagenet/train/n{i % 100:08d}/n_{i:012d}.JPEG"
        )
    index = builder.finish()
    assert len(index) == 128_000 and 10 * index.nbytes < 150e6


@pytest.fixture
def big_folder(tmp_path, monkeypatch) -> str:
    """A folder that counts as big and as unchanged for a while."""
    monkeypatch.setattr(index_cache, "_SMALLEST", 5)
    monkeypatch.setenv("MOCO_D2_CACHE", str(tmp_path / "cache"))
    root = tmp_path / "images"
    for folder in ("a", "b"):
        (root / folder).mkdir(parents=True)
        for i in range(4):
            (root / folder / f"{i}.jpg").touch()
    settle(root)
    return str(root)


def settle(root) -> None:
    """Set the times of change of all folders to a minute ago."""
    for folder, _, _ in os.walk(root):
        os.utime(folder, (time.time() - 60,) * 2)


def test_a_second_start_finds_the_scan(big_folder, caplog):
    caplog.set_level("INFO")
    first = load_image_index([big_folder])
    assert "from the scan kept" not in caplog.text
    second = load_image_index([big_folder])
    assert "8 images, from the scan kept" in caplog.text
    assert [second.path(i) for i in range(8)] == [first.path(i) for i in range(8)]
    assert second.classes == ("a", "b") and (second.labels == first.labels).all()


@pytest.mark.parametrize(
    "change",
    [
        lambda root: open(f"{root}/a/new.jpg", "w").close(),
        lambda root: os.remove(f"{root}/b/0.jpg"),
        lambda root: os.rename(f"{root}/b/0.jpg", f"{root}/b/9.jpg"),
        lambda root: os.rename(f"{root}/b", f"{root}/c"),
    ],
)
def test_a_change_is_noticed(big_folder, change):
    load_image_index([big_folder])
    change(big_folder)
    index = load_image_index([big_folder])
    there = sorted(
        os.path.join(folder, name) for folder, _, names in os.walk(big_folder) for name in names
    )
    assert [index.path(i) for i in range(len(index))] == there


def test_a_scan_of_what_is_changing_is_not_kept(big_folder, tmp_path):
    open(f"{big_folder}/a/new.jpg", "w").close()
    load_image_index([big_folder])
    assert not (tmp_path / "cache").exists()


def test_a_damaged_scan_is_made_again(big_folder, tmp_path):
    load_image_index([big_folder])
    (kept,) = (tmp_path / "cache").iterdir()
    (kept / "name_bytes.npy").unlink()
    assert len(load_image_index([big_folder])) == 8


def test_a_cache_that_cannot_be_written_costs_time_only(big_folder, tmp_path, monkeypatch, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv("MOCO_D2_CACHE", str(tmp_path / "file" / "cache"))
    assert len(load_image_index([big_folder])) == 8
    assert "set MOCO_D2_CACHE to a folder" in caplog.text


def _mapped_from(index: ImageIndex, folder: str) -> bool:
    index.path(0)
    with open("/proc/self/maps") as maps:
        return any(folder in line for line in maps)


def test_processes_share_the_kept_index(big_folder, tmp_path):
    load_image_index([big_folder])
    index = load_image_index([big_folder])
    assert len(pickle.dumps(index)) < 500
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(_mapped_from, (index, str(tmp_path / "cache")))


def test_the_kept_index_cannot_be_changed(big_folder):
    load_image_index([big_folder])
    with pytest.raises(ValueError, match="read-only"):
        load_image_index([big_folder]).labels[0] = 5
    assert np.all(load_image_index([big_folder]).labels >= 0)
