"""The images that Precise BN measures statistics on: the same on any number of processes."""

from collections.abc import Callable, Iterator, Sequence

from detectron2.utils import comm

from moco_d2.data.seeding import globally_seeded
from moco_d2.data.streams import SampleStream, Stream


class PreciseBatches:
    """Batches of a detector's training images for Precise BN, as detectron2's lists of dicts.

    Batch i holds places [iB, (i+1)B) of the sample stream, process r the r-th block of them; what
    augmentations draw depends on the place alone. After `num_iter` batches it starts again, so that
    every use sees the same images. (detectron2's hook takes what each process's own training
    loader comes to: its issues 5398 and 5409.)
    """

    def __init__(
        self,
        samples: Sequence[dict],
        mapper: Callable[[dict], dict],
        *,
        batch_size: int,
        num_iter: int,
        seed: int,
    ):
        """
        Args:
            samples: dicts of the data set.
            mapper: turns one into the model's input; its random numbers come from NumPy's or
                Python's global generator.
            batch_size: B, of all processes together.
            num_iter: batches per use.
            seed: of order and augmentations.
        """
        self._samples = samples
        self._mapper = mapper
        self._share = batch_size // comm.get_world_size()
        self._batch_size = batch_size
        self._num_iter = num_iter
        self._seed = seed

    def __iter__(self) -> Iterator[list[dict]]:
        stream = SampleStream(len(self._samples), self._seed)
        while True:
            for i in range(self._num_iter):
                first = i * self._batch_size + comm.get_rank() * self._share
                numbers = stream.samples(first, self._share).tolist()
                yield [self._map(first + j, number) for j, number in enumerate(numbers)]

    def _map(self, place: int, number: int) -> dict:
        with globally_seeded(Stream.PRECISE_BN, self._seed, place):
            return self._mapper(self._samples[number])
