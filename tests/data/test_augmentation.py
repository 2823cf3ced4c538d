"""The view recipes as tables, and what making a view guarantees."""

import numpy as np
import pytest

from moco_d2.data.augmentation import (
    VIEW_RECIPES,
    ViewRecipe,
    get_view_recipe,
    register_view_recipe,
)
from moco_d2.data.operations import (
    ColorJitter,
    GaussianBlur,
    Grayscale,
    HorizontalFlip,
    RandomResizedCrop,
    Sometimes,
)
from moco_d2.data.streams import Stream, generator


@pytest.fixture(scope="module")
def image() -> np.ndarray:
    return generator(Stream.VIEW, 1).integers(0, 256, (80, 100, 3), dtype=np.uint8)


def test_v1_as_in_the_paper_grayscale_before_jitter():
    assert VIEW_RECIPES["moco_v1"].operations == (
        RandomResizedCrop((0.2, 1.0), (3 / 4, 4 / 3)),
        Sometimes(0.2, Grayscale()),
        ColorJitter(0.4, 0.4, 0.4, 0.4),
        Sometimes(0.5, HorizontalFlip()),
    )


def test_v2_as_in_the_paper():
    assert VIEW_RECIPES["moco_v2"].operations == (
        RandomResizedCrop((0.2, 1.0), (3 / 4, 4 / 3)),
        Sometimes(0.8, ColorJitter(0.4, 0.4, 0.4, 0.1)),
        Sometimes(0.2, Grayscale()),
        Sometimes(0.5, GaussianBlur((0.1, 2.0))),
        Sometimes(0.5, HorizontalFlip()),
    )


@pytest.mark.parametrize("name", VIEW_RECIPES)
@pytest.mark.parametrize("size", [17, 48, 64])
@pytest.mark.parametrize("shape", [(80, 100), (64, 64), (1, 1), (3, 90)])
def test_views_have_the_size_asked_for_and_repeat(image, name, size, shape):
    picture = image[: shape[0], : shape[1]]
    recipe = get_view_recipe(name)
    for position in range(5):
        views = [recipe(picture, generator(Stream.VIEW, 0, position), size) for _ in range(2)]
        assert views[0].shape == (size, size, 3) and views[0].dtype == np.uint8
        np.testing.assert_array_equal(*views)


@pytest.mark.parametrize("name", sorted(set(VIEW_RECIPES) - {"center_crop"}))
def test_views_of_an_image_differ(image, name):
    recipe = get_view_recipe(name)
    views = [recipe(image, generator(Stream.VIEW, 0, 0, view), 48) for view in range(2)]
    assert np.abs(views[0].astype(int) - views[1]).mean() > 5


def test_unknown_recipes_are_listed():
    with pytest.raises(ValueError, match="'moco_v9'.*center_crop, moco_demo, moco_v1, moco_v2"):
        get_view_recipe("moco_v9")


def test_recipes_can_be_added(monkeypatch, image):
    monkeypatch.setattr("moco_d2.data.augmentation.VIEW_RECIPES", dict(VIEW_RECIPES))
    recipe = ViewRecipe(RandomResizedCrop((1.0, 1.0)), Grayscale())
    register_view_recipe("gray", recipe)
    view = get_view_recipe("gray")(image, generator(Stream.VIEW, 0), 32)
    assert (view == view[..., :1]).all()
    with pytest.raises(ValueError, match="'gray' is taken"):
        register_view_recipe("gray", recipe)
