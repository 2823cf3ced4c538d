"""Image sets with a class label for every image, whose classes agree."""

from collections.abc import Sequence

import numpy as np

from moco_d2.data.datasets import load_image_index
from moco_d2.data.index import ImageIndex
from moco_d2.errors import UserError


def load_labelled_index(names: Sequence[str], key: str) -> ImageIndex:
    """Read image sets of which every image has a label, see :func:`load_image_index`.

    Args:
        names: names or paths.
        key: what names them in the config, for errors.

    Raises:
        UserError: an image has none.
    """
    index = load_image_index(names)
    unknown = np.flatnonzero(index.labels < 0)
    if len(unknown):
        raise UserError(
            f"{len(unknown)} of {len(index)} images of {', '.join(names)} are images without a "
            f"class label, among them {index.path(int(unknown[0]))}: put images into one folder "
            f"per class, list them with a column 'label', or name another set in {key}"
        )
    return index


def with_classes(
    index: ImageIndex, classes: Sequence[str], name: str, trained_on: str = "DATASETS.TRAIN"
) -> ImageIndex:
    """The same images with labels that are numbers in `classes`.

    Args:
        index: labelled images, of some or all of these classes.
        classes: class names that a model was trained with.
        name: what the config calls the images, for errors.
        trained_on: what names the images that the classes are from, for errors.

    Raises:
        UserError: an image is of another class.
    """
    if index.classes == tuple(classes):
        return index
    number = {class_name: i for i, class_name in enumerate(classes)}
    present = [index.classes[label] for label in np.unique(index.labels)]
    strange = [class_name for class_name in present if class_name not in number]
    if strange:
        shown = ", ".join(strange[:3]) + (" and others" if len(strange) > 3 else "")
        raise UserError(
            f"{name} has images of {len(strange)} class(es) that {trained_on} does not have "
            f"({shown}): classes are matched by name, so give both sets the same names"
        )
    translate = np.array([number.get(class_name, -1) for class_name in index.classes])
    relabelled = index.take(np.arange(len(index)))
    relabelled.labels[:] = translate[index.labels]
    relabelled.classes = tuple(classes)
    return relabelled
