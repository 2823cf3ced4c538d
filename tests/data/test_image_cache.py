"""Keeping decoded images: shared, bounded, and without effect on the views."""

import logging
import multiprocessing
import os
from multiprocessing.util import _run_finalizers

import numpy as np
import pytest
import torch
from PIL import Image

from moco_d2.data.build import build_pretrain_loader
from moco_d2.data.datasets import load_image_index
from moco_d2.data.image_cache import ImageCache, image_key, open_image_cache
from moco_d2.errors import UserError

MEAN = (123.675, 116.28, 103.53)


@pytest.fixture
def folder(tmp_path, monkeypatch) -> str:
    """Six images, large enough to be shrunk for views of 16 pixels."""
    monkeypatch.setenv("MOCO_D2_CACHE", str(tmp_path / "cache"))
    root = tmp_path / "images"
    root.mkdir()
    for i in range(6):
        coarse = np.random.default_rng(i).integers(0, 256, (6, 8, 3), dtype=np.uint8)
        Image.fromarray(coarse).resize((160, 120)).save(root / f"{i}.jpg")
    return str(root)


def batches(folder: str, **options) -> torch.Tensor:
    loader = build_pretrain_loader(
        load_image_index([folder]),
        **{"batch_size": 4, "size": 16, "recipes": ("moco_v2", "moco_v1"), "seed": 1},
        pixel_mean=MEAN,
        num_iters=4,
        **options,
    )
    return torch.cat([torch.cat(batch["views"]) for batch in loader])


def test_views_do_not_depend_on_what_finds_room(folder, tmp_path):
    empty = batches(folder, cache="disk", cache_gb=0.001)
    full = batches(folder, cache="disk", cache_gb=0.001, num_workers=2)
    assert torch.equal(empty, full)
    assert ImageCache(str(tmp_path / "cache/images"), 0).usage()[1] == 6
    (tmp_path / "other").mkdir()
    os.environ["MOCO_D2_CACHE"] = str(tmp_path / "other")
    assert torch.equal(batches(folder, cache="disk", cache_gb=2e-5), empty)
    size, images = ImageCache(str(tmp_path / "other/images"), 0).usage()
    assert size <= 20_000 and 0 < images < 6


def test_cached_views_are_like_those_of_the_whole_images(folder):
    """Crops are rounded to other pixels, so that views differ by a part of a pixel's shift."""
    cached, whole = batches(folder, cache="disk").float(), batches(folder).float()
    assert (cached - whole).abs().mean() < 0.3 * (cached - whole.flip(0)).abs().mean()


def test_what_the_cache_holds_is_reported(folder, caplog):
    caplog.set_level(logging.INFO)
    batches(folder, cache="disk")
    assert "The image cache holds 6 images in 0.00 of 8 GB" in caplog.text


def test_a_changed_file_is_another_image(folder):
    index = load_image_index([folder])
    before = image_key(index, 0, "whole")
    assert before != image_key(index, 1, "whole") and before != image_key(index, 0, "shrunk")
    assert before == image_key(load_image_index([folder]), 0, "whole")
    Image.new("RGB", (9, 9)).save(index.path(0))
    assert before != image_key(index, 0, "whole")


def test_images_come_back_as_they_were_and_cannot_be_changed(tmp_path):
    cache = ImageCache(str(tmp_path / "cache"), 100_000)
    image = np.random.default_rng(0).integers(0, 256, (7, 5, 4), dtype=np.uint8)
    assert cache.get("ab12") is None and cache.put("ab12", image)
    np.testing.assert_array_equal(cache.get("ab12"), image)
    with pytest.raises(ValueError, match="read-only"):
        cache.get("ab12")[0] = 1


def _fill(cache: ImageCache, worker: int) -> None:
    for i in range(40):
        cache.put(f"{i:02d}{worker}", np.zeros((10, 10, 1), np.uint8))


def test_processes_together_stay_below_the_limit(tmp_path):
    cache = ImageCache(str(tmp_path), 60 * 112)
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_fill, args=(cache, worker)) for worker in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert cache.usage() == (60 * 112, 60)
    stored = [name for folder, _, names in os.walk(tmp_path) for name in names if name != "used"]
    assert len(stored) == 60


def _use_and_end(folder: str) -> None:
    ImageCache(folder, 1000, temporary=True).put("abc", np.zeros((2, 2, 1), np.uint8))


def test_the_last_process_removes_a_cache_in_memory(tmp_path):
    folder = str(tmp_path / "cache")
    first = ImageCache(folder, 1000, temporary=True)
    process = multiprocessing.get_context("spawn").Process(target=_use_and_end, args=(folder,))
    process.start()
    process.join()
    assert first.get("abc") is not None
    _run_finalizers(0)
    assert not os.path.exists(folder)


def test_what_cannot_be_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("MOCO_D2_CACHE", str(tmp_path))
    assert open_image_cache("none", 8.0) is None
    with pytest.raises(UserError, match="DATALOADER.CACHE is 'gpu': it takes one of none, ram"):
        open_image_cache("gpu", 8.0)
    for size in (0.0, 1e9):
        with pytest.raises(UserError, match="DATALOADER.CACHE_GB is .* has room for"):
            open_image_cache("disk", size)
