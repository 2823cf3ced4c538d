"""Training pictures for semantic segmentation: scaled, flipped and cropped with their labels."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from detectron2.config import CfgNode, configurable
from detectron2.data import DatasetMapper, MetadataCatalog
from detectron2.data import detection_utils as utils
from detectron2.data import transforms as T
from detectron2.utils.file_io import PathManager
from PIL import Image

from moco_d2.errors import UserError


def build_mapper(cfg: CfgNode, is_train: bool) -> Callable[[dict], dict]:
    """What turns a data set's dict into the model's input: detectron2's own, or `SemSegMapper`."""
    mapper = SemSegMapper if cfg.INPUT.SEM_SEG.CROP_SIZE else DatasetMapper
    return mapper(cfg, is_train)


class SemSegMapper:
    """Maps a dict with `file_name` and `sem_seg_file_name` to what `SemanticSegmentor` takes.

    detectron2's mapper reads label files as grey pictures, which makes grey levels of the colours
    that Pascal VOC's have as a palette; here, labels are the values in the file.
    """

    @configurable
    def __init__(
        self,
        is_train: bool,
        *,
        augmentations: Sequence[T.Augmentation],
        image_format: str,
        num_classes: int,
        ignore_value: int,
    ):
        """
        Args:
            is_train: whether labels are read.
            augmentations: of picture and labels.
            image_format: INPUT.FORMAT.
            num_classes, ignore_value: which labels there may be.
        """
        self._is_train = is_train
        self._augmentations = T.AugmentationList(augmentations)
        self._image_format = image_format
        self._num_classes = num_classes
        self._ignore_value = ignore_value

    @classmethod
    def from_config(cls, cfg, is_train: bool = True):
        return {
            "is_train": is_train,
            "augmentations": (
                train_augmentations(cfg) if is_train else utils.build_augmentation(cfg, False)
            ),
            "image_format": cfg.INPUT.FORMAT,
            "num_classes": cfg.MODEL.SEM_SEG_HEAD.NUM_CLASSES,
            "ignore_value": cfg.MODEL.SEM_SEG_HEAD.IGNORE_VALUE,
        }

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        """
        Returns:
            the dict with `image`, uint8 (3, H, W), and, in training, `sem_seg`, int64 (H, W).

        Raises:
            ValueError: a label is no class, or the files differ in size.
        """
        sample = copy.deepcopy(sample)
        image = utils.read_image(sample["file_name"], format=self._image_format)
        utils.check_image_size(sample, image)
        label_file = sample.pop("sem_seg_file_name", None)
        labels = self._read_labels(label_file, image.shape[:2]) if self._is_train else None
        augmented = T.AugInput(image, sem_seg=labels)
        self._augmentations(augmented)
        image = augmented.image.transpose(2, 0, 1)  # (H, W, 3) to (3, H, W)
        sample["image"] = torch.from_numpy(np.ascontiguousarray(image))
        if self._is_train:
            sample["sem_seg"] = torch.from_numpy(augmented.sem_seg.astype(np.int64))
        return sample

    def _read_labels(self, file: str, shape: tuple[int, int]) -> np.ndarray:
        with PathManager.open(file, "rb") as opened:
            labels = np.array(Image.open(opened))
        if labels.shape != shape:
            raise UserError(
                f"{file} has shape {labels.shape}, its picture has {shape}; labels are one number "
                "for each pixel"
            )
        known = (labels < min(self._num_classes, 256)) | (labels == self._ignore_value)
        if not known.all():
            raise UserError(
                f"{file} holds the label {labels[~known][0]}, which is none of the "
                f"{self._num_classes} of MODEL.SEM_SEG_HEAD.NUM_CLASSES and not IGNORE_VALUE "
                f"{self._ignore_value}"
            )
        return labels.astype(np.uint8)  # what detectron2 can resize


def train_augmentations(cfg: CfgNode) -> list[T.Augmentation]:
    """Random scale, flip and crop, as INPUT says (A.5 of arXiv 1911.05722)."""
    flip = [T.RandomFlip()] if cfg.INPUT.RANDOM_FLIP == "horizontal" else []
    mean = tuple(round(value) for value in cfg.MODEL.PIXEL_MEAN)
    crop = RandomPaddedCrop(cfg.INPUT.SEM_SEG.CROP_SIZE, mean, cfg.MODEL.SEM_SEG_HEAD.IGNORE_VALUE)
    return [RandomScale(*cfg.INPUT.SEM_SEG.SCALE), *flip, crop]


class RandomScale(T.Augmentation):
    """Resizes a picture by a factor drawn evenly from [low, high]."""

    def __init__(self, low: float, high: float):
        super().__init__()
        self._init(locals())

    def get_transform(self, image: np.ndarray) -> T.Transform:
        factor = np.random.uniform(self.low, self.high)
        height, width = image.shape[:2]
        new = (max(1, round(height * factor)), max(1, round(width * factor)))
        return T.ResizeTransform(height, width, *new)


class RandomPaddedCrop(T.Augmentation):
    """Cuts out a square at a place drawn evenly; where the picture ends before, it is padded on
    the right and below."""

    def __init__(self, size: int, fill: Sequence[int], fill_label: int):
        """
        Args:
            size: side of the square, pixels.
            fill: value of each channel in the padding.
            fill_label: label of the padding.
        """
        super().__init__()
        self._init(locals())

    def get_transform(self, image: np.ndarray) -> T.Transform:
        top, left = (np.random.randint(max(n - self.size, 0) + 1) for n in image.shape[:2])
        return PaddedCropTransform(top, left, self.size, self.fill, self.fill_label)


class PaddedCropTransform(T.Transform):
    """The crop of `RandomPaddedCrop` at a known place. For pictures and labels only."""

    def __init__(self, top: int, left: int, size: int, fill: Sequence[int], fill_label: int):
        super().__init__()
        self._set_attributes(locals())

    def apply_image(self, img: np.ndarray) -> np.ndarray:
        return self._crop(img, np.asarray(self.fill, dtype=img.dtype))

    def apply_segmentation(self, segmentation: np.ndarray) -> np.ndarray:
        return self._crop(segmentation, self.fill_label)

    def apply_coords(self, coords: np.ndarray) -> np.ndarray:
        return coords - (self.left, self.top)

    def _crop(self, array: np.ndarray, fill: np.ndarray | int) -> np.ndarray:
        part = array[self.top : self.top + self.size, self.left : self.left + self.size]
        square = np.empty((self.size, self.size, *array.shape[2:]), array.dtype)
        square[...] = fill
        square[: part.shape[0], : part.shape[1]] = part
        return square


def check_semantic(cfg: CfgNode) -> None:
    """Refuse a config of a semantic segmentor that does not fit its data sets or cannot crop.

    Raises:
        ValueError: classes, ignored label, or a value of INPUT.
    """
    scale, size = tuple(cfg.INPUT.SEM_SEG.SCALE), cfg.INPUT.SEM_SEG.CROP_SIZE
    if len(scale) != 2 or not 0 < scale[0] <= scale[1] or size < 0:
        raise UserError(
            f"INPUT.SEM_SEG.SCALE {scale} and CROP_SIZE {size} must be "
            "two rising factors above 0 and a number of pixels (0: detectron2's augmentations)"
        )
    if size and cfg.INPUT.RANDOM_FLIP not in ("horizontal", "none"):
        raise UserError(
            f"INPUT.RANDOM_FLIP is {cfg.INPUT.RANDOM_FLIP!r}; with INPUT.SEM_SEG.CROP_SIZE it is "
            "'horizontal' or 'none'"
        )
    if cfg.MODEL.META_ARCHITECTURE != "SemanticSegmentor":
        if size:
            raise UserError(
                f"INPUT.SEM_SEG.CROP_SIZE {size} is for the meta-architecture SemanticSegmentor, "
                f"not for {cfg.MODEL.META_ARCHITECTURE}; set it to 0"
            )
        return
    head = cfg.MODEL.SEM_SEG_HEAD
    for name in (*cfg.DATASETS.TRAIN, *cfg.DATASETS.TEST):
        metadata = MetadataCatalog.get(name)
        for key, stated, known in (
            ("NUM_CLASSES", head.NUM_CLASSES, len(metadata.get("stuff_classes", ())) or None),
            ("IGNORE_VALUE", head.IGNORE_VALUE, metadata.get("ignore_label")),
        ):
            if known is not None and stated != known:
                raise UserError(
                    f"MODEL.SEM_SEG_HEAD.{key} is {stated}, data set {name!r} has {known}: set "
                    f"MODEL.SEM_SEG_HEAD.{key} {known}"
                )
