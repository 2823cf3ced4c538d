"""Whole views against torchvision on Pillow, with the same parameters."""

import io
import itertools
import os

import numpy as np
import pytest
import skimage.data
from PIL import Image, ImageFilter, ImageOps
from scipy import stats
from torchvision.transforms import functional as F

from moco_d2.data import mapper as mapper_module
from moco_d2.data import operations as ops
from moco_d2.data.augmentation import VIEW_RECIPES, ViewRecipe, get_view_recipe
from moco_d2.data.colour import apply_colour
from moco_d2.data.image_io import REDUCTIONS, decode_image
from moco_d2.data.index import ImageIndex
from moco_d2.data.mapper import ViewMapper
from moco_d2.data.pixels import PixelFormat
from moco_d2.data.streams import Stream, generator

PHOTOS = (
    *("astronaut.png", "coffee.png", "chelsea.png", "rocket.jpg", "motorcycle_left.png"),
    *("ihc.png", "hubble_deep_field.jpg"),
)
RANDOM = ("moco_v1", "moco_v2", "moco_v3_1", "moco_v3_2", "supervised")


@pytest.fixture(scope="module", params=PHOTOS)
def photo(request) -> np.ndarray:
    """A photograph at the size of most of ImageNet's."""
    image = Image.open(os.path.join(os.path.dirname(skimage.data.__file__), request.param))
    return np.asarray(ImageOps.fit(image.convert("RGB"), (500, 375)))


def with_pillow(recipe: ViewRecipe, image: np.ndarray, params: tuple, size: int) -> np.ndarray:
    """What torchvision makes of the same parameters, operation by operation."""
    view = Image.fromarray(image)
    for operation, drawn in zip(recipe.operations, params, strict=True):
        if drawn is None:
            continue
        kind = getattr(operation, "operation", operation)
        if isinstance(kind, ops.RandomResizedCrop):
            box = drawn.top, drawn.left, drawn.height, drawn.width
            view = F.resized_crop(view, *box, [size, size], antialias=True)
        elif isinstance(kind, ops.ColorJitter):
            for name, factor in drawn:
                view = getattr(F, f"adjust_{name}")(view, factor)
        elif isinstance(kind, ops.Grayscale):
            view = F.rgb_to_grayscale(view, num_output_channels=3)
        elif isinstance(kind, ops.GaussianBlur):
            view = view.filter(ImageFilter.GaussianBlur(drawn[0]))
        elif isinstance(kind, ops.Solarize):
            view = ImageOps.solarize(view, 128)
        elif isinstance(kind, ops.HorizontalFlip):
            view = F.hflip(view)
        else:
            raise AssertionError(f"no reference for {kind}")
    return np.asarray(view).astype(int)


@pytest.mark.parametrize("name", RANDOM)
def test_a_whole_recipe_stays_within_a_mean_of_one_and_a_half_levels(photo, name):
    recipe = get_view_recipe(name)
    differences = []
    for position in range(24):
        params = recipe.draw(generator(Stream.VIEW, 1, position), photo.shape[:2], 224)
        if any(isinstance(getattr(o, "operation", o), ops.Solarize) for o in recipe.operations):
            # A value beside the threshold lands on either side of it, far apart.
            params = tuple(
                None if isinstance(getattr(o, "operation", o), ops.Solarize) else drawn
                for o, drawn in zip(recipe.operations, params, strict=True)
            )
        expected = with_pillow(recipe, photo, params, 224)
        differences.append(np.abs(recipe.apply(photo, params) - expected).mean())
    assert np.mean(differences) < 1.5
    assert max(differences) < 3


def test_solarize_equals_pillow(photo):
    for threshold in (0, 1, 128, 200, 256):
        expected = ImageOps.solarize(Image.fromarray(photo), threshold)
        np.testing.assert_array_equal(ops.Solarize(threshold).apply(photo, ()), expected)


EXTREME = (
    *((name, factor) for name in ("brightness", "contrast") for factor in (0.0, 0.05, 3.0)),
    *(("saturation", factor) for factor in (0.0, 0.05, 2.0)),
)


@pytest.mark.parametrize("name, factor", EXTREME)
def test_extreme_colour_equals_pillow(photo, name, factor):
    expected = np.asarray(getattr(F, f"adjust_{name}")(Image.fromarray(photo), factor))
    assert np.abs(apply_colour(photo, ((name, factor),)) - expected.astype(int)).max() <= 2


@pytest.mark.parametrize("level", [0, 1, 127, 128, 254, 255])
@pytest.mark.parametrize("order", [1, -1])
def test_flat_images_through_jitter_equal_pillow(level, order):
    image = np.full((32, 32, 3), level, np.uint8)
    steps = (("brightness", 1.4), ("contrast", 0.6), ("saturation", 1.4), ("hue", 0.1))[::order]
    expected = Image.fromarray(image)
    for name, factor in steps:
        expected = getattr(F, f"adjust_{name}")(expected, factor)
    assert np.abs(apply_colour(image, steps) - np.asarray(expected).astype(int)).max() <= 2


def test_clipping_in_between_is_kept_where_it_shows(photo):
    """Brightness drives most of the image beyond white; less contrast must not bring it back."""
    steps = (("brightness", 3.0), ("contrast", 0.3))
    expected = F.adjust_contrast(F.adjust_brightness(Image.fromarray(photo), 3.0), 0.3)
    assert np.abs(apply_colour(photo, steps) - np.asarray(expected).astype(int)).mean() < 1.5


@pytest.mark.parametrize("factor", REDUCTIONS)
def test_a_reduced_image_shows_the_same_crop(factor):
    """JPEGs decoded at 1 / factor, cropped there, against Pillow on the whole images."""
    pixels, differences = PixelFormat((0.0, 0.0, 0.0)), []
    operation, crop = ops.RandomResizedCrop((0.2, 1.0)), ops.Crop(104, 200, 1000, 1200, 100)
    for name in PHOTOS:
        image = Image.open(os.path.join(os.path.dirname(skimage.data.__file__), name))
        file = io.BytesIO()
        ImageOps.fit(image.convert("RGB"), (2000, 1500)).save(file, "JPEG", quality=95)
        whole = Image.fromarray(decode_image(file.getvalue(), "", pixels))
        reduced = decode_image(file.getvalue(), "", pixels, factor)
        view = operation.apply(reduced, operation.for_reduced(crop, factor))
        expected = F.resized_crop(whole, 104, 200, 1000, 1200, [100, 100], antialias=True)
        differences.append(np.abs(view - np.asarray(expected).astype(int)).mean())
    assert np.mean(differences) < 1 and max(differences) < 2


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize("channels", [1, 3])
def test_every_kind_of_jpeg_is_reduced_as_asked(mode, channels):
    """Pillow's too, which decodes in full what OpenCV does not know."""
    coarse = np.random.default_rng(0).integers(0, 256, (5, 5, 3), dtype=np.uint8)
    image = Image.fromarray(coarse).resize((301, 203), Image.Resampling.BICUBIC).convert(mode)
    file = io.BytesIO()
    image.save(file, "JPEG", quality=95)
    pixels = PixelFormat((0.0,) * channels)
    whole = decode_image(file.getvalue(), "", pixels)
    for factor in REDUCTIONS:
        reduced = decode_image(file.getvalue(), "", pixels, factor)
        assert reduced.shape == (-(-203 // factor), -(-301 // factor), channels)
        inside = whole[: 203 // factor * factor, : 301 // factor * factor].astype(float)
        blocks = inside.reshape(203 // factor, factor, 301 // factor, factor, channels)
        squares = blocks.mean(axis=(1, 3))
        compared = reduced[: squares.shape[0], : squares.shape[1]]
        assert np.abs(compared - squares).mean() < 1


@pytest.mark.parametrize("shape", [(1500, 2000), (3000, 700), (449, 1000)])
@pytest.mark.parametrize("sideways", [False, True])
def test_reduced_decoding_keeps_the_resolution_of_both_views(
    tmp_path, shape, sideways, monkeypatch
):
    """Views are made of crops of 1.25 times their pixels a side, and no more than twice that."""
    exif = Image.Exif()
    exif[0x0112] = 6 if sideways else 1
    coarse = np.random.default_rng(0).integers(0, 256, (5, 5, 3), dtype=np.uint8)
    Image.fromarray(coarse).resize(shape[::-1]).save(tmp_path / "large.jpg", exif=exif)
    decoded, drawn = [], []
    original = mapper_module.decode_image

    def record(data, path, pixels, factor):
        decoded.append(factor)
        return original(data, path, pixels, factor)

    class Recording(ViewRecipe):
        def apply(self, image, params):
            drawn[-1].append((image.shape[:2], params[0]))
            return super().apply(image, params)

    monkeypatch.setattr(mapper_module, "decode_image", record)
    recipe = Recording(*get_view_recipe("moco_v2").operations)
    index = ImageIndex([str(tmp_path / "large.jpg")], [-1])
    mapper = ViewMapper(index, (recipe, recipe), 64, 0, PixelFormat((0.0, 0.0, 0.0)))
    upright = shape[::-1] if sideways else shape
    for position in range(12):
        drawn.append([])
        mapper[position, 0]
        for stored, crop in drawn[-1]:
            assert stored == tuple(-(-side // decoded[-1]) for side in upright)
            assert min(crop.height, crop.width) >= 1.25 * 64 or decoded[-1] == 1
            assert crop.top + crop.height <= stored[0] and crop.left + crop.width <= stored[1]
        smallest = min(min(crop.height, crop.width) for _, crop in drawn[-1])
        assert smallest < 2 * 1.25 * 64 + 2 or decoded[-1] == 8
    assert max(decoded) > 1


def test_v3_as_in_the_paper():
    first, second = (VIEW_RECIPES[name].operations for name in ("moco_v3_1", "moco_v3_2"))
    shared = (
        ops.RandomResizedCrop((0.2, 1.0), (3 / 4, 4 / 3)),
        ops.Sometimes(0.8, ops.ColorJitter(0.4, 0.4, 0.2, 0.1)),
        ops.Sometimes(0.2, ops.Grayscale()),
    )
    blur, flip = ops.GaussianBlur((0.1, 2.0)), ops.Sometimes(0.5, ops.HorizontalFlip())
    assert first[:3] == second[:3] == shared
    assert first[3:] == (ops.Sometimes(1.0, blur), ops.Sometimes(0.0, ops.Solarize()), flip)
    assert second[3:] == (ops.Sometimes(0.1, blur), ops.Sometimes(0.2, ops.Solarize()), flip)


def test_supervised_as_in_torchvision():
    assert VIEW_RECIPES["supervised"].operations == (
        ops.RandomResizedCrop((0.08, 1.0), (3 / 4, 4 / 3)),
        ops.Sometimes(0.5, ops.HorizontalFlip()),
    )


@pytest.mark.parametrize("name", RANDOM)
def test_operations_are_applied_as_often_as_stated_and_independently(name):
    recipe = get_view_recipe(name)
    drawn = [recipe.draw(generator(Stream.VIEW, 9, p), (300, 400), 224) for p in range(2000)]
    applied = np.array([[params is not None for params in row] for row in drawn])
    for column, operation in enumerate(recipe.operations):
        p = getattr(operation, "p", 1.0)
        assert stats.binomtest(int(applied[:, column].sum()), 2000, p).pvalue > 1e-4
    varying = [c for c in range(applied.shape[1]) if 0 < applied[:, c].mean() < 1]
    for i, j in itertools.combinations(varying, 2):
        table = np.histogram2d(applied[:, i], applied[:, j], bins=2)[0]
        assert stats.fisher_exact(table).pvalue > 1e-4
