"""Training batches of detectors: places of a sample stream, the same after a stop as without."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count, islice

import numpy as np
import torch
from detectron2.data import DatasetFromList
from torch.utils.data import DataLoader, Dataset, Sampler

from moco_d2.data.seeding import globally_seeded
from moco_d2.data.streams import SampleStream, Stream, generator

Place = tuple[int, int]  # position in the sample stream, index of an image


class RepeatedStream:
    """Epochs in which image i comes up r_i times on average, in random order (LVIS,
    arXiv 1908.03195, Appendix B.2): floor(r_i) times, and once more with the probability of what
    is left of it."""

    def __init__(self, repeats: Sequence[float], seed: int):
        """
        Args:
            repeats: r_i, at least 1 each.
            seed: any integer of 64 bits.
        """
        self._repeats = np.asarray(repeats, dtype=np.float64)
        self._seed = seed

    def order(self, epoch: int) -> np.ndarray:
        """The images of an epoch, int64, of a length that varies."""
        draw = generator(Stream.REPEAT, self._seed, epoch)
        times = np.floor(self._repeats + draw.random(len(self._repeats))).astype(np.int64)
        return draw.permutation(np.repeat(np.arange(len(times)), times))


class ShareSampler(Sampler[list[Place]]):
    """Yields the places of each iteration that belong to one process.

    The stream of images is cut into shares, iteration t of W processes takes shares tW to
    (t + 1)W, process r the r-th of them. Where shapes are told apart, a share holds either wide or
    other images; shares count in the order in which they fill up. (detectron2 groups so in each
    process on its own, and begins anew after a stop.) To go on at iteration t, all earlier places
    are gone through, which takes a second for some millions.
    """

    def __init__(
        self,
        stream: SampleStream | RepeatedStream,
        *,
        share: int,
        wide: Sequence[bool] | None = None,
        start_iter: int = 0,
        num_iters: int | None = None,
        rank: int = 0,
        world_size: int = 1,
    ):
        """
        Args:
            stream: the images of each epoch.
            share: images of a process in an iteration.
            wide: whether an image is wider than high; None: shares mix all.
            start_iter: iteration of the first batch.
            num_iters: number of batches; None: no end.
            rank, world_size: this process and the number of processes.
        """
        self._stream = stream
        self._share = share
        self._wide = wide
        self._first = start_iter * world_size + rank
        self._num_iters = num_iters
        self._world_size = world_size

    def __iter__(self) -> Iterator[list[Place]]:
        mine = islice(self._shares(), self._first, None, self._world_size)
        return islice(mine, self._num_iters)

    def _shares(self) -> Iterator[list[Place]]:
        open_shares: dict[bool, list[Place]] = {}
        for place, image in enumerate(self._images()):
            kind = self._wide is not None and self._wide[image]
            share = open_shares.setdefault(kind, [])
            share.append((place, image))
            if len(share) == self._share:
                yield open_shares.pop(kind)

    def _images(self) -> Iterator[int]:
        for epoch in count():
            yield from self._stream.order(epoch).tolist()


def wide_images(samples: Iterable[dict]) -> list[bool] | None:
    """Whether each image is wider than high; None where a data set does not state sizes."""
    try:
        return [sample["width"] > sample["height"] for sample in samples]
    except KeyError:
        return None


class _Mapped(Dataset):
    """Samples at places, augmented with random numbers of the place."""

    def __init__(self, samples: list[dict], mapper: Callable[[dict], dict], seed: int):
        self._samples = DatasetFromList(samples, copy=False)  # workers share the memory
        self._mapper = mapper
        self._seed = seed

    def __getitem__(self, place: Place) -> dict:
        position, image = place
        with globally_seeded(Stream.AUGMENT, self._seed, position):
            return self._mapper(self._samples[image])


def build_detection_loader(
    samples: list[dict],
    mapper: Callable[[dict], dict],
    sampler: ShareSampler,
    *,
    seed: int,
    num_workers: int = 0,
) -> DataLoader:
    """Build the loader of a process's share of each batch, as detectron2's lists of dicts.

    What an iteration holds depends on the samples, the sampler's arguments and the seed, and not
    on workers or the iteration that the loader starts with.

    Args:
        samples: dicts of the data set.
        mapper: turns one into the model's input; draws from NumPy's or Python's global generator.
        sampler: of the places.
        seed: of the augmentations, 64 bits.
        num_workers: processes that load; 0 loads in this one.
    """
    return DataLoader(
        _Mapped(samples, mapper, seed),
        batch_sampler=sampler,
        collate_fn=_as_list,
        num_workers=num_workers,
        generator=torch.Generator(),  # so that loading takes nothing from the global one
    )


def _as_list(batch: list[dict]) -> list[dict]:
    return batch
