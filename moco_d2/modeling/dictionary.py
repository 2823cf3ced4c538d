"""Where the negatives come from: the queue of keys."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class KeyQueue(nn.Module):
    """The dictionary of MoCo: the last K keys, first in, first out (Sec. 3.2 of arXiv 1911.05722).

    K need not be a multiple of the batch: writing wraps around. Slots that no key has reached yet
    hold random unit vectors, as in the paper's code.

    Buffers, all saved in checkpoints:
        keys: float32 (K, C), rows L2-normalised. Oldest key at `pointer` once the queue is full.
        pointer: int64 scalar, the slot that the next key is written to.
        filled: int64 scalar, how many slots hold keys.
    """

    def __init__(self, size: int, dim: int, seed: int = 0):
        """
        Args:
            size: K, at least 1.
            dim: C, length of a key.
            seed: of the random vectors in slots not yet reached. The same on every process, so
                that the dictionary is the same everywhere from the first iteration.
        """
        super().__init__()
        if size < 1:
            raise ValueError(f"the queue needs room for at least one key; its size is {size}")
        generator = torch.Generator().manual_seed(seed)
        keys = F.normalize(torch.randn(size, dim, generator=generator), dim=1)
        self.register_buffer("keys", keys)
        self.register_buffer("pointer", torch.zeros((), dtype=torch.int64))
        self.register_buffer("filled", torch.zeros((), dtype=torch.int64))

    @torch.no_grad()
    def enqueue_(self, keys: Tensor) -> None:
        """Write keys over the oldest ones.

        Args:
            keys: (N, C) L2-normalised keys in order, the same on every process. Any N; of more
                than K only the last K stay.
        """
        size, (count, dim) = len(self.keys), keys.shape
        if dim != self.keys.shape[1]:
            raise ValueError(f"keys of length {dim} do not fit a queue of {self.keys.shape[1]}")
        kept = min(count, size)
        # Index arithmetic on the device: reading the pointer would wait for the GPU.
        slots = torch.arange(count - kept, count, device=self.keys.device)
        slots = (slots + self.pointer) % size
        self.keys.index_copy_(0, slots, keys[count - kept :].to(self.keys.dtype))
        self.pointer.add_(count).remainder_(size)
        self.filled.add_(count).clamp_(max=size)

    def extra_repr(self) -> str:
        return f"size={self.keys.shape[0]}, dim={self.keys.shape[1]}"
