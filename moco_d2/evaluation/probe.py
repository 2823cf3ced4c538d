"""The quick probe: features of frozen backbones, read once and kept on disk, then judged."""

import contextlib
import json
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from detectron2.utils import comm
from detectron2.utils.logger import setup_logger
from tqdm import tqdm

from moco_d2.checkpoint.files import replaced_file
from moco_d2.data.few_labels import few_per_class
from moco_d2.data.index import ImageIndex
from moco_d2.data.labels import load_labelled_index, with_classes
from moco_d2.engine.distributed import launch
from moco_d2.engine.environment import Job
from moco_d2.engine.setup import ending_in_a_sentence
from moco_d2.errors import UserError
from moco_d2.evaluation.feature_store import FeatureStore, fingerprint
from moco_d2.evaluation.frozen_features import FrozenFeatures, finite_batches
from moco_d2.evaluation.judging import LEARNING_RATES, NEIGHBOURS, Labelled, judge, table
from moco_d2.evaluation.linear_heads import EPOCHS
from moco_d2.visualization.confusion import draw_confusion

logger = logging.getLogger(__name__)

RESULTS = "results.json"


@dataclass(frozen=True)
class Settings:
    """How images are read and features judged.

    Attributes:
        size: side of the centre crops, in pixels.
        deep_range: values of 16-bit images that become 0 and 255.
        few_labels: what is kept of each class to learn from, see `data/few_labels.py`.
        neighbours, temperature, learning_rates, epochs, standardised: see :func:`judge`.
        seed: of the few labels and of the heads.
        batch_size: images that a backbone sees at a time.
        num_workers: processes that load images, of each process.
        device: "cuda" or "cpu".
        images_per_file: whose features are written at a time, and lost by a kill.
    """

    size: int = 224
    deep_range: tuple[int, int] = (0, 65535)
    few_labels: float = 0.0
    neighbours: tuple[int, ...] = NEIGHBOURS
    temperature: float = 0.07
    learning_rates: tuple[float, ...] = LEARNING_RATES
    epochs: int = EPOCHS
    standardised: bool = False
    seed: int = 0
    batch_size: int = 128
    num_workers: int = 0
    device: str = "cpu"
    images_per_file: int = 1024


@dataclass(frozen=True)
class ImageSet:
    """Some of the images of a labelled set."""

    names: tuple[str, ...]
    index: ImageIndex
    wanted: np.ndarray  # int64, rising
    fingerprint: str = field(repr=False)


def load_sets(
    train: Sequence[str], val: Sequence[str], few_labels: float = 0.0, seed: int = 0
) -> dict[str, ImageSet]:
    """Read which images there are, with labels that mean the same in both sets.

    Args:
        train: names as in DATASETS.TRAIN: who votes, and what heads are trained on.
        val: who is classified; all of its classes are in `train`.
        few_labels, seed: see `Settings`.

    Returns:
        "train" and "val".

    Raises:
        UserError: a set cannot be used.
    """
    index = load_labelled_index(train, "--train")
    if len(np.unique(index.labels)) < 2:
        raise UserError(
            f"{', '.join(train)} has images of 1 class: there is nothing to tell apart; name a set "
            "of several in --train"
        )
    queries = with_classes(
        load_labelled_index(val, "--val"), index.classes, ", ".join(val), trained_on="--train"
    )
    kept = few_per_class(index.labels, few_labels, seed, "--few-labels")
    return {
        "train": ImageSet(tuple(train), index, kept, fingerprint(index)),
        "val": ImageSet(tuple(val), queries, np.arange(len(queries)), fingerprint(queries)),
    }


def run_probe(
    networks: Mapping[str, FrozenFeatures],
    sets: Mapping[str, ImageSet],
    output: str,
    settings: Settings,
    job: Job,
) -> dict[str, Any]:
    """Judge the features of several backbones.

    Args:
        networks: name -> backbone.
        sets: of :func:`load_sets`.
        output: folder for the features, which later probes go on from, and the results.
        job: processes that read images and compute features, on this machine.

    Returns:
        what is in `results.json`.

    Raises:
        UserError: images, backbones or settings do not fit together; or too many images cannot be
            read.
        ProcessExitedException: the same happened in one of several processes, which has said so.
    """
    for network in networks.values():
        network.check_size(settings.size)
    _make_folder(output)
    stores = {
        (name, part): _store(output, network, images, settings)
        for name, network in networks.items()
        for part, images in sets.items()
    }
    work = {}  # by folder: weights may be there under two names, and images in both sets
    for (name, part), store in stores.items():
        wanted = sets[part].wanted
        missing = store.missing(wanted)
        logger.info(
            f"{name}, {part}: {len(wanted)} images, of {len(wanted) - len(missing)} the features "
            f"are in {store.folder}"
        )
        if len(missing):
            if store.folder in work:
                missing = np.union1d(work[store.folder][3], missing)
            title = f"{name}, {part}"
            work[store.folder] = (title, networks[name], sets[part].index, missing, store)
    if work:
        launch(_extract, job, settings.device, (list(work.values()), settings))
    classes = sets["train"].index.classes
    results, confusions = {}, {}
    for name, network in networks.items():
        train, val = (
            _labelled(stores[name, part], sets[part], settings.device) for part in ("train", "val")
        )
        results[name], confusions[name] = _judge(name, train, val, classes, settings)
        results[name] |= {
            "features": train.features.shape[1],
            "architecture": network.title,
            "input": network.convention,
            "fingerprint": network.fingerprint,
            "images": {"train": len(train.labels), "val": len(val.labels)},
        }
    counts = np.bincount(sets["val"].index.labels)
    content = {
        "sets": {part: images.names for part, images in sets.items()},
        "settings": asdict(settings),
        "classes": len(classes),
        "most_frequent_class": 100 * float(counts.max() / counts.sum()),
        "results": results,
    }
    with replaced_file(str(Path(output, RESULTS))) as aside:
        Path(aside).write_text(json.dumps(content, indent=1))
    for name, confusion in confusions.items():
        title = f"{name}, linear, lr {results[name]['best']['linear']['learning_rate']:g}"
        draw_confusion(confusion, classes, str(Path(output, f"confusion_{name}.png")), title)
    return content


def describe(content: Mapping[str, Any]) -> str:
    """The table, and what it is to be held against."""
    images = next(iter(content["results"].values()))["images"]
    return (
        f"{images['val']} images of {content['classes']} classes, by {images['train']} labelled "
        f"ones; always the most frequent class: {content['most_frequent_class']:.2f} %\n"
        + table(content["results"])
    )


def _make_folder(output: str) -> None:
    try:
        os.makedirs(output, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output {output} cannot be written to: {error.strerror}") from error


def _store(
    output: str, network: FrozenFeatures, images: ImageSet, settings: Settings
) -> FeatureStore:
    about = {
        "weights": network.fingerprint,
        "images": images.fingerprint,
        "size": settings.size,
        "deep_range": list(settings.deep_range),
        "view": "center_crop",
    }
    return FeatureStore(Path(output, "features"), about)


def _extract(work: list[tuple], settings: Settings) -> None:
    """Compute this process's share of the features that are missing."""
    setup_logger(name="moco_d2", distributed_rank=comm.get_rank())
    # From a process of its own, an error would reach the caller as a stack trace.
    several = comm.get_world_size() > 1
    with ending_in_a_sentence(_known) if several else contextlib.nullcontext():
        for title, network, index, missing, store in work:
            mine = missing[comm.get_rank() :: comm.get_world_size()]
            network.to(settings.device)
            extract(network, index, mine, store, settings, title)
            network.to("cpu")


def _known(error: Exception) -> Exception | None:
    return error if isinstance(error, (UserError, OSError)) else None


def extract(
    network: FrozenFeatures,
    index: ImageIndex,
    missing: np.ndarray,
    store: FeatureStore,
    settings: Settings,
    title: str = "",
) -> None:
    """Compute features of images and keep them in a store, file by file.

    Args:
        missing: rising numbers of images, int64 (M,).
        title: of the progress line.

    Raises:
        UserError: too many images cannot be read, or a feature is not a finite number.
    """
    batches = finite_batches(
        network,
        index,
        missing,
        title,
        size=settings.size,
        batch_size=settings.batch_size,
        num_workers=settings.num_workers,
        deep_range=settings.deep_range,
    )
    parts, first = [], 0
    with _progress(len(missing), title, " images") as bar:
        for numbers, features in batches:
            parts.append((numbers.numpy(), features.numpy()))
            # Images come in order, so that those before the last one are read, or never will be.
            end = int(np.searchsorted(missing, numbers[-1].item(), side="right"))
            bar.update(end - bar.n)
            if end - first >= settings.images_per_file:
                _keep(store, missing[first:end], parts)
                parts, first = [], end
    if first < len(missing):
        _keep(store, missing[first:], parts)


def _keep(store: FeatureStore, asked: np.ndarray, parts: list[tuple]) -> None:
    if parts:
        numbers, features = (np.concatenate(part) for part in zip(*parts, strict=True))
    else:
        numbers, features = np.empty(0, np.int64), np.empty((0, 0), np.float32)
    store.add(numbers, features, asked[~np.isin(asked, numbers)])


def _labelled(store: FeatureStore, images: ImageSet, device: str) -> Labelled:
    numbers, features = store.load(images.wanted)
    labels = torch.from_numpy(images.index.labels[numbers])
    return Labelled(torch.from_numpy(features).to(device), labels.to(device))


def _judge(
    name: str,
    train: Labelled,
    val: Labelled,
    classes: Sequence[str],
    settings: Settings,
) -> tuple[dict[str, Any], np.ndarray]:
    """What :func:`judge` returns, with a progress line meanwhile."""
    options = asdict(settings)
    chosen = ("neighbours", "temperature", "learning_rates", "epochs", "standardised", "seed")
    with _progress(None, f"{name}, linear heads", " iterations") as bar:
        return judge(
            train, val, classes, progress=bar.update, **{key: options[key] for key in chosen}
        )


def _progress(total: int | None, title: str, unit: str) -> tqdm:
    """A line that is renewed; where it cannot be, in a file, one every half a minute."""
    interval = 0.2 if sys.stderr.isatty() else 30.0
    return tqdm(
        total=total,
        desc=title,
        unit=unit,
        mininterval=interval,
        maxinterval=interval,
        disable=not comm.is_main_process(),
    )
