"""View recipes: what happens to an image on its way to a view, as a table of operations."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from moco_d2.data.colour import ColourStep, apply_colour
from moco_d2.data.operations import (
    CenterCrop,
    ColorJitter,
    GaussianBlur,
    Grayscale,
    HorizontalFlip,
    Operation,
    QuarterTurn,
    RandomResizedCrop,
    Solarize,
    Sometimes,
)
from moco_d2.errors import UserError

# Called with an image, a generator and a size, returns a view; see ViewRecipe.__call__.
Recipe = Callable[[np.ndarray, np.random.Generator, int], np.ndarray]


@dataclass(frozen=True, init=False)
class ViewRecipe:
    """Operations in the order in which they are applied."""

    operations: tuple[Operation, ...]

    def __init__(self, *operations: Operation):
        object.__setattr__(self, "operations", operations)

    def __call__(self, image: np.ndarray, rng: np.random.Generator, size: int) -> np.ndarray:
        """Make a view.

        Args:
            image: uint8 (H, W, C), RGB where C = 3. It is not changed.
            rng: where all random numbers come from, in a fixed order.
            size: side of the view, in pixels.

        Returns:
            uint8 (size, size, C).
        """
        return self.apply(image, self.draw(rng, image.shape[:2], size))

    def draw(self, rng: np.random.Generator, shape: tuple[int, int], size: int) -> tuple:
        """Draw the parameters of all operations for an image of ``shape`` (H, W)."""
        first, *others = self.operations
        params = [first.draw(rng, shape, size)]
        params += [operation.draw(rng, (size, size), size) for operation in others]
        return tuple(params)

    def apply(self, image: np.ndarray, params: tuple) -> np.ndarray:
        """Make the view that was drawn. Colour operations in a row are fused."""
        colour: tuple[ColourStep, ...] = ()
        for operation, drawn in zip(self.operations, params, strict=True):
            steps = operation.colour_steps(drawn)
            if steps is not None:
                colour += steps
                continue
            if drawn is None:
                continue
            image, colour = operation.apply(apply_colour(image, colour), drawn), ()
        return apply_colour(image, colour)

    def shrinkage(self, params: tuple, shape: tuple[int, int]) -> float:
        """How many pixels of an image of ``shape`` become one of the view that was drawn."""
        return self.operations[0].shrinkage(params[0], shape)

    def for_reduced(self, params: tuple, factor: int) -> tuple:
        """The same view, of the image decoded at 1 / ``factor`` of its size."""
        return (self.operations[0].for_reduced(params[0], factor), *params[1:])

    def largest_useful(self, size: int) -> float:
        """Shorter side of an image that has all pixels which views of side ``size`` can show."""
        return self.operations[0].largest_useful(size)

    def with_smallest_crop(self, share: float) -> "ViewRecipe":
        """The recipe with crops of at least that share of an image's area."""
        first, *others = self.operations
        if not isinstance(first, RandomResizedCrop) or not 0 < share <= first.scale[1]:
            raise UserError(
                f"INPUT.VIEWS.MIN_CROP is {share:g}: it must lie above 0 and not above 1, and "
                "recipes must begin with a random crop."
            )
        return ViewRecipe(replace(first, scale=(share, first.scale[1])), *others)

    def for_channels(self, channels: int) -> tuple["ViewRecipe", tuple[str, ...]]:
        """The recipe for images of so many channels, and the names of what was dropped."""
        adapted = [operation.for_channels(channels) for operation in self.operations]
        kept = [operation for operation, _ in adapted if operation is not None]
        return ViewRecipe(*kept), tuple(name for _, names in adapted for name in names)


def _moco_v3(blur: float, solarize: float) -> ViewRecipe:
    return ViewRecipe(
        RandomResizedCrop(scale=(0.2, 1.0)),
        Sometimes(0.8, ColorJitter(0.4, 0.4, 0.2, 0.1)),
        Sometimes(0.2, Grayscale()),
        Sometimes(blur, GaussianBlur(sigma=(0.1, 2.0))),
        Sometimes(solarize, Solarize()),
        Sometimes(0.5, HorizontalFlip()),
    )


VIEW_RECIPES: dict[str, Recipe] = {
    # MoCo v1 (arXiv 1911.05722, Sec. 3.3, "Technical details"), in the order of its code.
    "moco_v1": ViewRecipe(
        RandomResizedCrop(scale=(0.2, 1.0)),
        Sometimes(0.2, Grayscale()),
        ColorJitter(0.4, 0.4, 0.4, 0.4),
        Sometimes(0.5, HorizontalFlip()),
    ),
    # MoCo v2 (arXiv 2003.04297, Sec. 3): weaker hue, jitter only sometimes, blur.
    "moco_v2": ViewRecipe(
        RandomResizedCrop(scale=(0.2, 1.0)),
        Sometimes(0.8, ColorJitter(0.4, 0.4, 0.4, 0.1)),
        Sometimes(0.2, Grayscale()),
        Sometimes(0.5, GaussianBlur(sigma=(0.1, 2.0))),
        Sometimes(0.5, HorizontalFlip()),
    ),
    # MoCo v3 (arXiv 2104.02057, App. A), BYOL's two views: the first always blurred, the second
    # seldom, but sometimes solarized.
    "moco_v3_1": _moco_v3(blur=1.0, solarize=0.0),
    "moco_v3_2": _moco_v3(blur=0.1, solarize=0.2),
    # Training with labels on ImageNet (torchvision's references/classification).
    "supervised": ViewRecipe(
        RandomResizedCrop(scale=(0.08, 1.0)), Sometimes(0.5, HorizontalFlip())
    ),
    # v2 for the built-in data set at 48 to 64 pixels: in it neither colour nor the way up tells
    # the class, and a crop below 0.4 shows less than an object.
    "moco_demo": ViewRecipe(
        RandomResizedCrop(scale=(0.4, 1.0)),
        Sometimes(0.8, ColorJitter(0.4, 0.4, 0.4, 0.1)),
        Sometimes(0.8, Grayscale()),
        Sometimes(0.5, GaussianBlur(sigma=(0.1, 2.0), kernel_share=0.1)),
        QuarterTurn(),
        Sometimes(0.5, HorizontalFlip()),
    ),
    # Evaluation: 256 pixels on the shorter side for a centre of 224, and so in proportion.
    "center_crop": ViewRecipe(CenterCrop(share=224 / 256)),
}


def register_view_recipe(name: str, recipe: Recipe) -> None:
    """Add a recipe that INPUT.VIEWS.QUERY and INPUT.VIEWS.KEY may name.

    Args:
        name: a name not yet taken.
        recipe: called and answering like :class:`ViewRecipe`. Random numbers must all come from
            the generator it is given, or runs will not repeat.

    Raises:
        ValueError: the name is taken.
    """
    if name in VIEW_RECIPES:
        raise UserError(f"The view recipe {name!r} is taken: register yours under another name.")
    VIEW_RECIPES[name] = recipe


def get_view_recipe(name: str) -> Recipe:
    """Return a recipe of ``VIEW_RECIPES``; an unknown name is a ValueError that lists them."""
    if name not in VIEW_RECIPES:
        raise UserError(
            f"Unknown view recipe {name!r}: INPUT.VIEWS.QUERY and KEY take one of "
            f"{', '.join(sorted(VIEW_RECIPES))}, or register it with register_view_recipe."
        )
    return VIEW_RECIPES[name]
