"""Shuffling BN: which process encodes which key, and how images get there and keys back."""

import numpy as np
import torch
import torch.distributed as dist
from detectron2.utils import comm
from torch import Tensor

from moco_d2.data.streams import Stream, generator
from moco_d2.engine.distributed import all_gather_rows


def shuffle_permutation(batch_size: int, seed: int, iteration: int) -> np.ndarray:
    """int64 (B,): slot j of the shuffled batch holds the image at position `permutation[j]`.

    A function of its arguments alone, so every process computes the same one.
    """
    return generator(Stream.SHUFFLE, seed, iteration).permutation(batch_size)


def shuffle_images(images: Tensor, permutation: np.ndarray) -> Tensor:
    """Exchange images so that each process holds its slots of the shuffled batch.

    Every image travels once, as uint8, to the process that encodes it.

    Args:
        images: (n, ...) this process's images, positions [rn, (r+1)n) of the global batch.
        permutation: (B,) from :func:`shuffle_permutation`, B = world size x n.

    Returns:
        (n, ...) images at positions `permutation[rn:(r+1)n]`.
    """
    rank, world_size, n = comm.get_rank(), comm.get_world_size(), len(images)
    if world_size == 1:
        return take_images(images, permutation)
    owner, local = np.divmod(permutation.reshape(world_size, n), n)  # both (encoding rank, slot)
    sent = [local[encoder][owner[encoder] == rank] for encoder in range(world_size)]
    slots = [np.flatnonzero(owner[rank] == sender) for sender in range(world_size)]
    outgoing = take_images(images, np.concatenate(sent))
    incoming = torch.empty_like(outgoing)
    dist.all_to_all_single(incoming, outgoing, [len(s) for s in slots], [len(s) for s in sent])
    arrival = np.argsort(np.concatenate(slots))  # slot -> place in `incoming`
    return take_images(incoming, arrival)


def take_images(images: Tensor, numbers: np.ndarray) -> Tensor:
    """(n, ...) images, int64 (m,) -> (m, ...). Unlike indexing, this copies whole images: eight
    times as fast on a CPU."""
    return images.index_select(0, torch.from_numpy(numbers).to(images.device))


def gather_keys(keys: Tensor, permutation: np.ndarray | None) -> Tensor:
    """Keys of all processes in the order of position; the all-gather also undoes the shuffle.

    Args:
        keys: (n, C) keys of this process's slots.
        permutation: that the images were shuffled by, or None.

    Returns:
        (B, C), the same on every process; a gradient finds its way back to `keys`.
    """
    keys = all_gather_rows(keys)
    if permutation is None:
        return keys
    return keys[torch.from_numpy(np.argsort(permutation)).to(keys.device)]
