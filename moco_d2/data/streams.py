"""Random numbers and the order of samples as functions of (seed, position) and nothing else."""

from enum import IntEnum

import numpy as np

_WORD = 2**64


class Stream(IntEnum):
    """What random numbers are for. Different purposes never share a number."""

    ORDER = 1  # the order of the samples in an epoch
    VIEW = 2  # the augmentation of one view
    SUBSTITUTE = 3  # which image replaces an unreadable one
    SHUFFLE = 4  # which BN group a key is encoded in
    KNN_BANK = 5  # which images of a large bank vote
    PRECISE_BN = 6  # augmentations of the images that BN statistics are measured on
    FEW_LABELS = 7  # which images keep their label
    AUGMENT = 8  # augmentations of a detector's training image
    REPEAT = 9  # how often images of rare classes come up in an epoch, and the order
    STEP = 10  # what a detector draws in a step: which proposals it learns from
    NEGATIVES = 11  # which rows of a memory bank are a step's negatives


def generator(stream: int, seed: int, position: int = 0, part: int = 0) -> np.random.Generator:
    """Make the generator of one purpose at one position: a counter-based Philox.

    Seed and purpose form the key, position and part the upper half of the 256-bit counter; the
    lower half counts the numbers drawn, so that two streams never overlap.

    Args:
        stream: the purpose, see :class:`Stream`.
        seed: any integer of 64 bits, negative ones included.
        position: place in the sample stream (or epoch), 0 to 2**64 - 1.
        part: view, attempt, ... at this position, 0 to 2**64 - 1.

    Returns:
        A generator at its first number.
    """
    key = np.array([seed % _WORD, stream], dtype=np.uint64)
    counter = np.array([0, 0, position, part], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


class SampleStream:
    """The endless stream of samples: position p shows sample ``perm(seed, p // N)[p % N]``."""

    def __init__(self, num_samples: int, seed: int):
        """
        Args:
            num_samples: N, samples in an epoch, at least 1.
            seed: any integer of 64 bits.
        """
        self.num_samples = num_samples
        self.seed = seed
        self._epoch = -1
        self._order = np.empty(0, dtype=np.int64)

    def order(self, epoch: int) -> np.ndarray:
        """Return the permutation of an epoch, int64 (N,). The latest one is kept."""
        if epoch != self._epoch:
            self._order = generator(Stream.ORDER, self.seed, epoch).permutation(self.num_samples)
            self._epoch = epoch
        return self._order

    def samples(self, first: int, count: int) -> np.ndarray:
        """Return the samples at positions ``first`` to ``first + count - 1``, int64 (count,)."""
        pieces = []
        position, end = first, first + count
        while position < end:
            epoch, offset = divmod(position, self.num_samples)
            piece = self.order(epoch)[offset : offset + end - position]
            pieces.append(piece)
            position += len(piece)
        return np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int64)
