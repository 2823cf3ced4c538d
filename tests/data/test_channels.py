"""Numbers of channels and bits: what files hold, what MODEL.PIXEL_MEAN wants, what views do."""

import logging

import numpy as np
import pytest
import tifffile
from PIL import Image

from moco_d2.data.augmentation import VIEW_RECIPES, get_view_recipe
from moco_d2.data.build import build_pretrain_loader
from moco_d2.data.datasets import load_image_index
from moco_d2.data.image_io import read_image
from moco_d2.data.pixels import PixelFormat, UnreadableImage
from moco_d2.data.streams import Stream, generator
from moco_d2.errors import UserError

GRAY = PixelFormat((100.0,))
RGB = PixelFormat((120.0, 110.0, 100.0))


@pytest.fixture(scope="module")
def photo() -> np.ndarray:
    """uint8 (60, 80, 3), smooth."""
    coarse = np.random.default_rng(0).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return np.asarray(Image.fromarray(coarse).resize((80, 60), Image.Resampling.BICUBIC))


@pytest.mark.parametrize("extension", ["jpg", "png", "webp", "tif", "bmp", "gif"])
def test_colour_becomes_gray(photo, tmp_path, extension):
    path = tmp_path / f"photo.{extension}"
    Image.fromarray(photo).save(path)
    with Image.open(path) as image:
        expected = np.asarray(image.convert("L")).astype(int)
    ours = read_image(str(path), GRAY)
    assert ours.shape == (60, 80, 1) and ours.dtype == np.uint8
    assert np.abs(ours[..., 0] - expected).mean() < 1


@pytest.mark.parametrize("extension", ["png", "tif", "npy"])
@pytest.mark.parametrize("wanted", [GRAY, RGB])
def test_sixteen_bits_are_cut_to_the_range_asked_for(tmp_path, extension, wanted):
    deep = np.linspace(0, 8000, 4800).astype(np.uint16).reshape(60, 80)
    path = tmp_path / f"deep.{extension}"
    if extension == "npy":
        np.save(path, deep)
    else:
        Image.fromarray(deep).save(path)
    pixels = PixelFormat(wanted.mean, deep_range=(1000, 5000))
    expected = np.clip((deep - 1000.0) / 4001 * 256, 0, 255)[..., None]
    assert np.abs(read_image(str(path), pixels) - expected).max() <= 1


def test_sixteen_bit_colour_is_cut_too(tmp_path):
    deep = np.random.default_rng(0).integers(0, 4000, (10, 12, 3)).astype(np.uint16)
    tifffile.imwrite(tmp_path / "deep.tif", deep, photometric="rgb")
    ours = read_image(str(tmp_path / "deep.tif"), PixelFormat(RGB.mean, (0, 4095)))
    assert np.abs(ours.astype(int) - deep // 16).max() <= 1


def test_opacity_of_sixteen_bits_is_not_cut_to_the_range(tmp_path):
    deep = np.full((4, 4, 4), 3000, np.uint16)
    deep[..., 3] = [0, 0, 65535, 65535]
    tifffile.imwrite(tmp_path / "deep.tif", deep, photometric="rgb", extrasamples=["unassalpha"])
    ours = read_image(str(tmp_path / "deep.tif"), PixelFormat(RGB.mean, (0, 4095)))
    assert np.abs(ours[:, :2] - np.array(RGB.mean)).max() <= 1
    assert np.abs(ours[:, 2:].astype(int) - 3000 // 16).max() <= 1


@pytest.mark.parametrize("channels", [2, 4, 5, 9])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
@pytest.mark.parametrize("kind", ["npy", "npy planes", "tif", "tif planes"])
def test_any_number_of_channels(tmp_path, channels, dtype, kind):
    values = np.random.default_rng(0).integers(0, 256, (20, 30, channels)).astype(dtype)
    if dtype == np.uint16:
        values = values * 256
    stored = values.transpose(2, 0, 1) if "planes" in kind else values
    path = tmp_path / f"image.{kind[:3]}"
    if kind.startswith("npy"):
        np.save(path, stored)
    else:
        layout = "separate" if "planes" in kind else "contig"
        tifffile.imwrite(path, stored, photometric="minisblack", planarconfig=layout)
    ours = read_image(str(path), PixelFormat((0.0,) * channels))
    assert ours.shape == (20, 30, channels) and ours.flags.c_contiguous
    assert np.abs(ours.astype(int) - (values // 256 if dtype == np.uint16 else values)).max() <= 1


def test_four_channels_of_a_png_are_kept_as_they_are(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (5, 6, 4), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "four.png")
    ours = read_image(str(tmp_path / "four.png"), PixelFormat((0.0,) * 4))
    np.testing.assert_array_equal(ours, pixels)


def test_other_numbers_of_channels_are_refused(photo, tmp_path):
    Image.fromarray(photo).save(tmp_path / "photo.png")
    np.save(tmp_path / "five.npy", np.zeros((4, 4, 5), np.uint8))
    with pytest.raises(UnreadableImage, match="it has 3 channels and MODEL.PIXEL_MEAN has 4"):
        read_image(str(tmp_path / "photo.png"), PixelFormat((0.0,) * 4))
    with pytest.raises(UnreadableImage, match="it has 5 channels and MODEL.PIXEL_MEAN has 3"):
        read_image(str(tmp_path / "five.npy"), RGB)


@pytest.mark.parametrize(
    "array, reason",
    [
        (np.zeros((4, 4), np.float32), "floating point"),
        (np.full((4, 4), 70000), "more than 16 bits"),
        (np.full((4, 4), -1), "more than 16 bits"),
        (np.zeros((2, 3, 4, 5), np.uint8), "4 dimensions"),
        (np.array([{}]), "damaged or truncated"),
    ],
)
def test_arrays_that_are_no_images(tmp_path, array, reason):
    np.save(tmp_path / "array.npy", array, allow_pickle=True)
    with pytest.raises(UnreadableImage, match=reason):
        read_image(str(tmp_path / "array.npy"), GRAY)


@pytest.mark.parametrize("extension", ["jpg", "png", "tif", "gif", "npy"])
def test_more_pixels_than_allowed_are_not_decoded(photo, tmp_path, extension):
    path = str(tmp_path / f"photo.{extension}")
    np.save(path, photo) if extension == "npy" else Image.fromarray(photo).save(path)
    with pytest.raises(UnreadableImage, match="80 x 60 is more than INPUT.MAX_PIXELS 4799"):
        read_image(path, PixelFormat(RGB.mean, max_pixels=4799))
    assert read_image(path, PixelFormat(RGB.mean, max_pixels=4800)).shape == (60, 80, 3)


@pytest.mark.parametrize("name", sorted(VIEW_RECIPES))
@pytest.mark.parametrize("channels", [1, 2, 4, 6])
def test_views_of_any_number_of_channels(name, channels):
    recipe, _ = get_view_recipe(name).for_channels(channels)
    image = np.random.default_rng(0).integers(0, 256, (70, 90, channels), dtype=np.uint8)
    for position in range(8):
        view = recipe(image, generator(Stream.VIEW, 0, position), 32)
        assert view.shape == (32, 32, channels) and view.dtype == np.uint8


def test_equal_channels_stay_equal():
    """No operation mixes or confuses channels, in any number of them."""
    recipe, dropped = get_view_recipe("moco_v2").for_channels(5)
    assert dropped == ("saturation", "hue", "grayscale")
    gray = np.random.default_rng(0).integers(0, 256, (70, 90, 1), dtype=np.uint8)
    for position in range(8):
        view = recipe(np.repeat(gray, 5, 2), generator(Stream.VIEW, 0, position), 32)
        assert (view == view[..., :1]).all()


def test_what_is_dropped_is_logged(photo, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    Image.fromarray(photo).save(tmp_path / "photo.png")
    options = {"batch_size": 2, "size": 16, "recipes": ("moco_v2", "moco_v1"), "seed": 0}
    index = load_image_index([str(tmp_path)])
    batch = next(iter(build_pretrain_loader(index, **options, pixel_mean=[100.0])))
    assert [view.shape for view in batch["views"]] == [(2, 1, 16, 16)] * 2
    assert "Views moco_v2: without saturation, hue, grayscale, since images have 1" in caplog.text
    with pytest.raises(UserError, match=r"INPUT.DEEP_RANGE is \(5, 5\)"):
        build_pretrain_loader(index, **options, pixel_mean=[100.0], deep_range=(5, 5))
    with pytest.raises(UserError, match="INPUT.VIEWS.MIN_CROP is 2"):
        build_pretrain_loader(index, **options, pixel_mean=[100.0], min_crop=2.0)
