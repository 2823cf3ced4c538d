"""Two views of an image file: this project beside torchvision and albumentations."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence

import cv2
import numpy as np
import torch
from PIL import Image, ImageFilter
from torch.utils.data import default_collate
from torchvision import io as tvio
from torchvision import transforms as T
from torchvision.transforms import v2

from moco_d2.benchmark.timing import Timing, ratio, time_in_turns, timing_table
from moco_d2.data.build import build_pretrain_loader
from moco_d2.data.index import ImageIndex

_SIZE = 224
_SCALE = (0.2, 1.0)
_JITTER = (0.4, 0.4, 0.4, 0.1)
_SIGMA = (0.1, 2.0)
_MEAN = (123.675, 116.28, 103.53)

OURS, PIL, TENSORS, ALBUMENTATIONS, DECODING = (
    "moco_d2",
    "torchvision + PIL",
    "torchvision v2 on tensors",
    "albumentations",
    "decoding alone",
)


class _PillowBlur:
    """The blur of MoCo v2's own code."""

    def __call__(self, image: Image.Image) -> Image.Image:
        return image.filter(ImageFilter.GaussianBlur(np.random.uniform(*_SIGMA)))


def _with_pillow() -> Callable[[str], object]:
    view = T.Compose(
        [
            T.RandomResizedCrop(_SIZE, scale=_SCALE),
            T.RandomApply([T.ColorJitter(*_JITTER)], p=0.8),
            T.RandomGrayscale(p=0.2),
            T.RandomApply([_PillowBlur()], p=0.5),
            T.RandomHorizontalFlip(),
            T.ToTensor(),
            T.Normalize(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225]),
        ]
    )

    def load(path: str) -> object:
        with Image.open(path) as image:
            image = image.convert("RGB")
        return view(image), view(image)

    return load


def _with_tensors() -> Callable[[str], object]:
    view = v2.Compose(
        [
            v2.RandomResizedCrop(_SIZE, scale=_SCALE, antialias=True),
            v2.RandomApply([v2.ColorJitter(*_JITTER)], p=0.8),
            v2.RandomGrayscale(p=0.2),
            v2.RandomApply([v2.GaussianBlur(13, _SIGMA)], p=0.5),
            v2.RandomHorizontalFlip(),
        ]
    )

    def load(path: str) -> object:
        image = tvio.decode_jpeg(tvio.read_file(path), tvio.ImageReadMode.RGB)
        return view(image), view(image)

    return load


def _with_albumentations() -> Callable[[str], object]:
    import albumentations as A

    view = A.Compose(
        [
            # The recipe shrinks without aliasing, as Pillow does; INTER_LINEAR would not.
            A.RandomResizedCrop(size=(_SIZE, _SIZE), scale=_SCALE, interpolation=cv2.INTER_AREA),
            A.ColorJitter(
                brightness=_JITTER[0],
                contrast=_JITTER[1],
                saturation=_JITTER[2],
                hue=_JITTER[3],
                p=0.8,
            ),
            A.ToGray(p=0.2),
            A.GaussianBlur(sigma_limit=_SIGMA, blur_limit=0, p=0.5),
            A.HorizontalFlip(p=0.5),
            A.ToTensorV2(),
        ]
    )

    def load(path: str) -> object:
        image = cv2.cvtColor(_decode(path), cv2.COLOR_BGR2RGB)
        return view(image=image)["image"], view(image=image)["image"]

    return load


def _decode(path: str) -> np.ndarray:
    return cv2.imdecode(np.fromfile(path, np.uint8), cv2.IMREAD_COLOR)


def _ours(paths: Sequence[str]) -> Callable[[], object]:
    loader = build_pretrain_loader(
        ImageIndex(paths, [-1] * len(paths)),
        batch_size=len(paths),
        size=_SIZE,
        recipes=("moco_v2", "moco_v2"),
        seed=0,
        pixel_mean=_MEAN,
    )
    batches = iter(loader)
    return lambda: next(batches)


def measure_pipeline(paths: Sequence[str], repeats: int) -> tuple[str, dict[str, float]]:
    """Time the v2 recipe on one core, in process time, from files to a batch of two views.

    Args:
        paths: of JPEGs.
        repeats: of all images, for every way.

    Returns:
        a table, and ratios: ``vs_torchvision_pil``, ``vs_albumentations`` (without that package,
        left out) and ``over_decode``.
    """
    loads = {PIL: _with_pillow(), TENSORS: _with_tensors()}
    note = ""
    try:
        loads[ALBUMENTATIONS] = _with_albumentations()
    except ImportError:
        note = "\nalbumentations is not installed: pip install albumentations==2.0.8 to compare."
    ways: dict[str, Callable[[], object]] = {OURS: _ours(paths)}
    for name, load in loads.items():
        ways[name] = lambda load=load: default_collate([load(path) for path in paths])
    ways[DECODING] = lambda: [_decode(path) for path in paths]
    with _one_thread():
        timings = time_in_turns(ways, repeats=repeats, units=len(paths), clock=time.process_time)
    return timing_table(timings, "image of two views", OURS) + note, _ratios(timings)


def _ratios(timings: dict[str, Timing]) -> dict[str, float]:
    ratios = {"vs_torchvision_pil": ratio(timings, PIL, OURS)}
    if ALBUMENTATIONS in timings:
        ratios["vs_albumentations"] = ratio(timings, ALBUMENTATIONS, OURS)
    ratios["over_decode"] = ratio(timings, OURS, DECODING)
    return ratios


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads(), cv2.getNumThreads()
    torch.set_num_threads(1)
    cv2.setNumThreads(0)
    yield
    torch.set_num_threads(threads[0])
    cv2.setNumThreads(threads[1])
