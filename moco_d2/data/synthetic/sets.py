"""The table of the built-in data sets: what each shows, its classes and its default size."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from moco_d2.data.synthetic.figures import FIGURE_CLASSES, render_figures
from moco_d2.data.synthetic.pictures import Picture, render_object, render_scene
from moco_d2.data.synthetic.shapes import NOVEL_CLASSES, PRETRAINING_CLASSES, SCENE_CLASSES


@dataclass(frozen=True)
class DemoSet:
    """One set of pictures. Pictures are numbered from 1.

    Attributes:
        family: what it shows, e.g. "scenes".
        split: "train", "val" or "test".
        stream: tells the random numbers of the sets apart.
        default_size: number of pictures, where none is asked for.
        classes: names, in the order of the labels.
        render: called with a picture's number, the classes and a random generator.
    """

    family: str
    split: str
    stream: int
    default_size: int
    classes: tuple[str, ...]
    render: Callable[[int, tuple[str, ...], np.random.Generator], Picture]

    @property
    def name(self) -> str:
        return f"{self.family}_{self.split}"

    def picture(self, number: int, seed: int) -> Picture:
        """Render picture ``number``, which depends on it, the set and the seed alone."""
        rng = np.random.default_rng([seed, self.stream, number])
        return self.render(number, self.classes, rng)


# Family, split, stream, size, classes, renderer. A stream belongs to its set for ever.
_TABLE = (
    ("objects", "train", 0, 24_000, PRETRAINING_CLASSES, render_object),
    ("objects", "val", 1, 1_000, PRETRAINING_CLASSES, render_object),
    ("scenes", "train", 2, 100, SCENE_CLASSES, render_scene),
    ("scenes", "test", 3, 300, SCENE_CLASSES, render_scene),
    ("novel", "train", 4, 100, NOVEL_CLASSES, render_scene),
    ("novel", "test", 5, 300, NOVEL_CLASSES, render_scene),
    ("figures", "train", 6, 100, FIGURE_CLASSES, render_figures),
    ("figures", "test", 7, 300, FIGURE_CLASSES, render_figures),
    # What is tuned is chosen on these, so that the test sets only report.
    ("scenes", "val", 8, 300, SCENE_CLASSES, render_scene),
    ("novel", "val", 9, 300, NOVEL_CLASSES, render_scene),
    ("figures", "val", 10, 300, FIGURE_CLASSES, render_figures),
)
SETS: dict[str, DemoSet] = {f"{row[0]}_{row[1]}": DemoSet(*row) for row in _TABLE}
