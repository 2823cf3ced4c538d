"""Loaders on real files: the same batches however they are loaded, and unreadable images."""

import logging
import os
from itertools import islice

import numpy as np
import pytest
import skimage.data
import torch
from PIL import Image

from moco_d2.data.build import UnreadableImages, build_eval_loader, build_pretrain_loader
from moco_d2.data.datasets import load_image_index
from moco_d2.data.mapper import NoReadableImages
from moco_d2.errors import UserError

MEAN = (123.675, 116.28, 103.53)
OPTIONS = {"size": 32, "recipes": ("moco_v1", "moco_v2"), "seed": 7, "pixel_mean": MEAN}
PHOTOS = ("astronaut.png", "coffee.png", "chelsea.png", "rocket.jpg", "camera.png", "logo.png")


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> str:
    """A folder of small photographs: colour, grayscale and one with alpha."""
    root = tmp_path_factory.mktemp("photos")
    for name in PHOTOS:
        image = Image.open(os.path.join(os.path.dirname(skimage.data.__file__), name))
        image.resize((90, 70)).save(root / name)
    return str(root)


@pytest.fixture
def damaged(tmp_path) -> str:
    """Twelve good images, and one each of truncated, empty, text and missing."""
    pixels = np.random.default_rng(0).integers(0, 256, (13, 40, 40, 3), dtype=np.uint8)
    for i, image in enumerate(pixels):
        Image.fromarray(image).save(tmp_path / f"{i:02d}.jpg")
    whole = (tmp_path / "12.jpg").read_bytes()
    (tmp_path / "12.jpg").unlink()
    (tmp_path / "truncated.jpg").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "empty.jpg").touch()
    (tmp_path / "text.jpg").write_text("not an image")
    (tmp_path / "missing.jpg").symlink_to("nowhere.jpg")
    return str(tmp_path)


def assert_equal_batches(first: dict, second: dict) -> None:
    assert first.keys() == second.keys()
    for name in ("position", "index", "label"):
        assert first[name].dtype == torch.int64
        torch.testing.assert_close(first[name], second[name], rtol=0, atol=0)
    for ours, theirs in zip(first["views"], second["views"], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert sorted(first["unreadable"]) == sorted(second["unreadable"])


def join(batches: list[dict]) -> dict:
    return {
        "views": [torch.cat(views) for views in zip(*(b["views"] for b in batches), strict=True)],
        **{n: torch.cat([b[n] for b in batches]) for n in ("position", "index", "label")},
        "unreadable": [entry for b in batches for entry in b["unreadable"]],
    }


def test_batches_do_not_depend_on_workers_ranks_or_start(damaged):
    index = load_image_index([damaged])
    options = OPTIONS | {"batch_size": 8}
    expected = list(build_pretrain_loader(index, **options, num_iters=5))
    assert len(expected) == 5 and any(batch["unreadable"] for batch in expected)
    workers = list(build_pretrain_loader(index, **options, num_iters=5, num_workers=2))
    ranks = [
        list(build_pretrain_loader(index, **options, num_iters=5, rank=rank, world_size=2))
        for rank in range(2)
    ]
    later = list(build_pretrain_loader(index, **options, start_iter=3, num_iters=2))
    for i, batch in enumerate(expected):
        assert_equal_batches(batch, workers[i])
        assert_equal_batches(batch, join([ranks[0][i], ranks[1][i]]))
    for batch, same in zip(expected[3:], later, strict=True):
        assert_equal_batches(batch, same)


def test_a_batch(photos):
    index = load_image_index([photos])
    batch = next(iter(build_pretrain_loader(index, batch_size=20, start_iter=2, **OPTIONS)))
    assert batch["position"].tolist() == list(range(40, 60))
    assert [tuple(views.shape) for views in batch["views"]] == [(20, 3, 32, 32)] * 2
    assert all(views.dtype == torch.uint8 and views.is_contiguous() for views in batch["views"])
    assert batch["label"].tolist() == index.labels[batch["index"]].tolist()
    assert batch["unreadable"] == []
    # Positions 42 to 53 are two whole epochs of six images.
    assert np.bincount(batch["index"][2:14]).tolist() == [2] * 6
    # All views of the batch are different, also those of the same image.
    views = torch.cat(batch["views"]).flatten(1)
    assert len(views.unique(dim=0)) == 40


def test_the_loader_has_no_end_and_leaves_the_global_generator_alone(photos):
    index = load_image_index([photos])
    state = torch.get_rng_state()
    loader = build_pretrain_loader(index, batch_size=2, **OPTIONS)
    positions = [batch["position"][0].item() for batch in islice(loader, 10)]
    assert positions == list(range(0, 20, 2))
    assert torch.equal(torch.get_rng_state(), state)


def test_format_reverses_the_channels(photos):
    index = load_image_index([photos])
    options = OPTIONS | {"batch_size": 6}
    rgb = next(iter(build_pretrain_loader(index, **options)))
    options["pixel_mean"] = MEAN[::-1]
    bgr = next(iter(build_pretrain_loader(index, **options, format="BGR")))
    for ours, reversed_ in zip(rgb["views"], bgr["views"], strict=True):
        torch.testing.assert_close(ours, reversed_.flip(1), rtol=0, atol=0)
    with pytest.raises(ValueError, match="INPUT.FORMAT is 'L'"):
        build_pretrain_loader(index, **options, format="L")


def test_an_unknown_recipe_is_refused_before_anything_is_read(photos):
    with pytest.raises(ValueError, match="Unknown view recipe 'v9'"):
        build_pretrain_loader(
            load_image_index([photos]), batch_size=2, **OPTIONS | {"recipes": ("moco_v1", "v9")}
        )


def test_unreadable_images_are_replaced_and_named(damaged):
    index = load_image_index([damaged])
    epoch = next(iter(build_pretrain_loader(index, batch_size=len(index), **OPTIONS)))
    named = {os.path.basename(path): reason for _, path, reason in epoch["unreadable"]}
    assert named.keys() == {"truncated.jpg", "empty.jpg", "text.jpg", "missing.jpg"}
    assert "truncated" in named["truncated.jpg"] and "empty" in named["empty.jpg"]
    assert "not an image" in named["text.jpg"] and "no such file" in named["missing.jpg"]
    for i, path, _ in epoch["unreadable"]:
        assert index.path(i) == path
    shown = [os.path.basename(index.path(i)) for i in epoch["index"]]
    assert set(shown) <= {f"{i:02d}.jpg" for i in range(12)} and len(shown) == 16


@pytest.mark.parametrize("num_workers", [0, 1])
def test_nothing_readable_is_one_error_that_names_files(tmp_path, num_workers):
    for i in range(3):
        (tmp_path / f"{i}.jpg").write_text("text")
    index = load_image_index([str(tmp_path)])
    loader = build_pretrain_loader(index, batch_size=2, num_workers=num_workers, **OPTIONS)
    with pytest.raises(NoReadableImages) as error:
        next(iter(loader))
    message = str(error.value)
    assert "0.jpg (not an image" in message and "\n" not in message


def test_counter_names_each_image_once(caplog):
    counter = UnreadableImages(1000)
    with caplog.at_level(logging.WARNING):
        counter.update([(3, "a.jpg", "empty"), (3, "a.jpg", "empty")])
        counter.update([(3, "a.jpg", "empty"), (5, "b.jpg", "truncated")])
    assert len(counter) == 2
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [
        "Unreadable image left out: a.jpg (empty). So far 1 of 1000.",
        "Unreadable image left out: b.jpg (truncated). So far 2 of 1000.",
    ]


@pytest.mark.parametrize(
    "num_images, unreadable, seen, stops",
    [
        (10, 1, 10, False),  # one file never stops a run
        (10, 2, 4, True),
        (1000, 10, 10_000, False),  # just 1 %
        (1000, 11, 10_000, True),
        (1_000_000, 50, 100, False),  # too few to tell
        (1_000_000, 100, 9_000, True),
        (1_000_000, 100, 10_000, False),
        (20_000, 201, 100_000, True),
    ],
)
def test_limit_of_unreadable_images(num_images, unreadable, seen, stops):
    counter = UnreadableImages(num_images)
    counter.update([(i, f"{i}.jpg", "empty") for i in range(unreadable)])
    if stops:
        with pytest.raises(UserError, match=rf"{unreadable} of .*0.jpg \(empty\)"):
            counter.check(seen)
    else:
        counter.check(seen)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_eval_loader_shows_each_image_once_in_order(tmp_path, num_workers):
    for name, levels in {"a": (10, 20), "b": (30, 40, 50)}.items():
        (tmp_path / name).mkdir()
        for level in levels:
            image = Image.new("RGB", (50, 40), (level, level, 2 * level))
            image.save(tmp_path / name / f"{level}.png")
    index = load_image_index([str(tmp_path)])
    indices = np.array([4, 0, 2, 1])
    options = {"size": 28, "batch_size": 3, "indices": indices, "pixel_mean": MEAN}
    batches = list(build_eval_loader(index, **options, num_workers=num_workers))
    assert [len(batch["index"]) for batch in batches] == [3, 1]
    assert batches[0].keys() == {"image", "label", "index"}
    assert torch.cat([batch["index"] for batch in batches]).tolist() == indices.tolist()
    assert torch.cat([batch["label"] for batch in batches]).tolist() == [1, 0, 1, 0]
    images = torch.cat([batch["image"] for batch in batches])
    assert images.shape == (4, 3, 28, 28) and images.dtype == torch.uint8
    assert images[:, :, 5, 5].tolist() == [[50, 50, 100], [10, 10, 20], [30, 30, 60], [20, 20, 40]]


def test_eval_loader_leaves_out_one_unreadable_image(photos, tmp_path, caplog):
    (tmp_path / "empty.jpg").touch()
    index = load_image_index([photos, str(tmp_path)])
    options = {"size": 28, "batch_size": 1, "pixel_mean": MEAN}
    loader = build_eval_loader(index, **options, indices=np.arange(7))
    assert [batch["index"].item() for batch in loader] == list(range(6))
    assert "empty.jpg (the file is empty)" in caplog.text
    assert list(build_eval_loader(index, **options, indices=np.arange(0))) == []


def test_eval_loader_stops_when_too_many_are_unreadable(damaged):
    index = load_image_index([damaged])
    options = {"size": 28, "batch_size": 4, "pixel_mean": MEAN}
    with pytest.raises(UserError, match="images cannot be read"):
        list(build_eval_loader(index, **options, indices=np.arange(len(index))))
