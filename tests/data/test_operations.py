"""Every operation draws and computes what torchvision's and Pillow's counterpart does."""

import os

import numpy as np
import pytest
import skimage.data
import torch
from PIL import Image, ImageFilter
from scipy import stats
from torchvision import transforms as T
from torchvision.transforms import functional as F

from moco_d2.data import operations as ops
from moco_d2.data.streams import Stream, generator

PHOTOS = ("astronaut.png", "coffee.png", "chelsea.png", "rocket.jpg", "motorcycle_left.png")


@pytest.fixture(scope="module", params=PHOTOS)
def photo(request) -> np.ndarray:
    path = os.path.join(os.path.dirname(skimage.data.__file__), request.param)
    return np.asarray(Image.open(path).convert("RGB"))


def difference(ours: np.ndarray, reference: Image.Image) -> np.ndarray:
    assert ours.dtype == np.uint8
    return np.abs(ours.astype(int) - np.asarray(reference).astype(int))


def draws(operation, count, shape=(300, 400), size=224) -> list:
    return [
        operation.draw(generator(Stream.VIEW, 5, position), shape, size)
        for position in range(count)
    ]


@pytest.mark.parametrize("name", ["brightness", "contrast", "saturation"])
@pytest.mark.parametrize("factor", [0.0, 0.6, 0.93, 1.0, 1.4])
def test_pointwise_colour_equals_pillow(photo, name, factor):
    reference = getattr(F, f"adjust_{name}")(Image.fromarray(photo), factor)
    ours = ops.ColorJitter(0, 0, 0, 0).apply(photo, ((name, factor),))
    assert difference(ours, reference).max() <= 2


@pytest.mark.parametrize("turns", [-0.4, -0.1, 0.0, 0.05, 0.33])
def test_hue_equals_pillow(photo, turns):
    reference = F.adjust_hue(Image.fromarray(photo), turns)
    ours = ops.ColorJitter(0, 0, 0, 0).apply(photo, (("hue", turns),))
    assert difference(ours, reference).mean() < 1


def test_jitter_applies_its_parts_in_the_order_drawn(photo):
    params = (("hue", 0.33), ("saturation", 0.2), ("brightness", 1.8), ("contrast", 0.6))
    reference = Image.fromarray(photo)
    for name, factor in params:
        reference = getattr(F, f"adjust_{name}")(reference, factor)
    assert difference(ops.ColorJitter(0, 0, 0, 0).apply(photo, params), reference).mean() < 1
    # Another order gives another image, so that the comparison above can fail.
    other = ops.ColorJitter(0, 0, 0, 0).apply(photo, params[::-1])
    assert difference(other, reference).mean() > 2


def test_grayscale_equals_pillow(photo):
    reference = F.rgb_to_grayscale(Image.fromarray(photo), num_output_channels=3)
    assert difference(ops.Grayscale().apply(photo, ()), reference).max() <= 1


@pytest.mark.parametrize("sigma", [0.1, 0.5, 1.0, 1.5, 2.0])
def test_blur_equals_pillow(photo, sigma):
    image = photo[:224, :224]
    reference = Image.fromarray(image).filter(ImageFilter.GaussianBlur(radius=sigma))
    kernel = draws(ops.GaussianBlur((sigma, sigma)), 1)[0][1]
    assert (
        difference(ops.GaussianBlur((0.1, 2.0)).apply(image, (sigma, kernel)), reference).mean() < 1
    )


def test_flip_and_turns_equal_pillow(photo):
    image = Image.fromarray(photo)
    assert difference(ops.HorizontalFlip().apply(photo, ()), F.hflip(image)).max() == 0
    for turns in range(4):
        reference = image.rotate(90 * turns, expand=True)
        assert difference(ops.QuarterTurn().apply(photo, turns), reference).max() == 0


@pytest.mark.parametrize(
    "box",
    [(0, 0, 50, 60), (10, 5, 224, 224), (3, 9, 260, 280), (9, 3, 280, 320), (20, 7, 270, 370)],
)
@pytest.mark.parametrize("size", [224, 96, 48])
def test_resized_crop_equals_pillow(photo, box, size):
    top, left, height, width = box
    reference = F.resized_crop(
        Image.fromarray(photo), top, left, height, width, [size, size], antialias=True
    )
    crop = ops.Crop(top, left, height, width, size)
    ours = ops.RandomResizedCrop((0.2, 1.0)).apply(photo, crop)
    assert ours.shape == (size, size, 3)
    assert difference(ours, reference).mean() < 1


def test_center_crop_equals_torchvision(photo):
    reference = T.Compose([T.Resize(256, antialias=True), T.CenterCrop(224)])
    operation = ops.CenterCrop(share=224 / 256)
    params = operation.draw(generator(Stream.VIEW, 0), photo.shape[:2], 224)
    ours = operation.apply(photo, params)
    assert ours.shape == (224, 224, 3)
    assert difference(ours, reference(Image.fromarray(photo))).mean() < 1


@pytest.mark.parametrize("shape", [(300, 400), (500, 120), (64, 64)])
def test_crops_are_distributed_like_torchvision(shape):
    torch.manual_seed(0)
    blank = torch.empty(3, *shape)
    get = T.RandomResizedCrop.get_params
    theirs = np.array([get(blank, (0.2, 1.0), (3 / 4, 4 / 3)) for _ in range(3000)])
    crops = draws(ops.RandomResizedCrop((0.2, 1.0)), 3000, shape)
    ours = np.array([(c.top, c.left, c.height, c.width) for c in crops])
    for column in range(4):
        assert stats.ks_2samp(ours[:, column], theirs[:, column]).pvalue > 1e-3
    areas = [np.prod(crop[:, 2:], axis=1) for crop in (ours, theirs)]
    ratios = [crop[:, 3] / crop[:, 2] for crop in (ours, theirs)]
    assert stats.ks_2samp(*areas).pvalue > 1e-3
    assert stats.ks_2samp(*ratios).pvalue > 1e-3


@pytest.mark.parametrize("shape", [(10, 1000), (1000, 10), (1, 7), (1, 1)])
def test_crops_of_extreme_shapes_fall_back_to_the_centre(shape):
    torch.manual_seed(0)
    expected = T.RandomResizedCrop.get_params(torch.empty(3, *shape), (0.9, 1.0), (3 / 4, 4 / 3))
    for crop in draws(ops.RandomResizedCrop((0.9, 1.0)), 20, shape):
        assert (crop.top, crop.left, crop.height, crop.width) == tuple(expected)
        image = np.zeros((*shape, 3), np.uint8)
        assert ops.RandomResizedCrop((0.9, 1.0)).apply(image, crop).shape == (224, 224, 3)


def test_jitter_is_distributed_like_torchvision():
    torch.manual_seed(0)
    theirs = T.ColorJitter(0.4, 0.4, 0.3, 0.1)
    names = ("brightness", "contrast", "saturation", "hue")
    reference = [
        T.ColorJitter.get_params(theirs.brightness, theirs.contrast, theirs.saturation, theirs.hue)
        for _ in range(3000)
    ]
    ours = draws(ops.ColorJitter(0.4, 0.4, 0.3, 0.1), 3000)
    for i, name in enumerate(names):
        values = [dict(params)[name] for params in ours]
        assert stats.ks_2samp(values, [params[1 + i] for params in reference]).pvalue > 1e-3
    orders = [tuple(name for name, _ in params) for params in ours]
    _, counts = np.unique(orders, axis=0, return_counts=True)
    assert len(counts) == 24
    assert stats.chisquare(counts).pvalue > 1e-3


def test_blur_and_turns_are_uniform():
    sigmas = [sigma for sigma, _ in draws(ops.GaussianBlur((0.1, 2.0)), 2000)]
    assert stats.kstest(sigmas, stats.uniform(0.1, 1.9).cdf).pvalue > 1e-3
    turns = np.bincount(draws(ops.QuarterTurn(), 2000))
    assert stats.chisquare(turns).pvalue > 1e-3 and len(turns) == 4


@pytest.mark.parametrize("p", [0.0, 0.2, 0.8, 1.0])
def test_sometimes_applies_with_its_probability(p):
    drawn = draws(ops.Sometimes(p, ops.Grayscale()), 2000)
    applied = sum(params is not None for params in drawn)
    assert stats.binomtest(applied, 2000, p).pvalue > 1e-3
    image = np.zeros((2, 2, 3), np.uint8)
    assert ops.Sometimes(p, ops.Grayscale()).apply(image, None) is image


def test_operations_keep_their_input(photo):
    before = photo.copy()
    photo.flags.writeable = False
    for operation in (
        ops.RandomResizedCrop((0.2, 1.0)),
        ops.CenterCrop(0.875),
        ops.ColorJitter(0.4, 0.4, 0.4, 0.4),
        ops.Grayscale(),
        ops.GaussianBlur((0.1, 2.0)),
        ops.GaussianBlur((0.1, 2.0), kernel_share=0.1),
        ops.HorizontalFlip(),
        ops.QuarterTurn(),
    ):
        params = draws(operation, 1, photo.shape[:2])[0]
        operation.apply(photo, params)
        np.testing.assert_array_equal(photo, before)
