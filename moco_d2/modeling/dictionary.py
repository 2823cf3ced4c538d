"""Where keys come from: the queue, the memory bank and the batch itself, behind one interface.

The three mechanisms that Figure 2 of the MoCo paper (arXiv 1911.05722) compares:

| | keys come from | negatives | after a step |
|---|---|---|---|
| queue | a key encoder that follows | earlier keys | enqueue the step's keys |
| memory_bank | earlier queries of the same image | rows drawn at random | move the images' rows |
| in_batch | the query encoder, with gradient | the other keys of the batch | nothing |
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from detectron2.config import CfgNode
from torch import Tensor, nn

from moco_d2.data.streams import Stream, generator
from moco_d2.engine.distributed import all_gather_rows
from moco_d2.errors import UserError


class Contrast(NamedTuple):
    """What N queries are compared with, as :func:`moco_d2.modeling.loss.info_nce` takes it."""

    k: Tensor  # (N, C), the positives
    negatives: Tensor  # (K, C)
    ids: Tensor | None = None  # int64 (N,), and (K,) below: a negative with a query's id is left
    negative_ids: Tensor | None = None  # out for that query

    def chunk(self, parts: int) -> list["Contrast"]:
        """Divide the queries."""
        ids = [None] * parts if self.ids is None else self.ids.chunk(parts)
        return [
            Contrast(k, self.negatives, i, self.negative_ids)
            for k, i in zip(self.k.chunk(parts), ids, strict=True)
        ]


@dataclass
class Step:
    """A training step as far as it has come. B images in all, N of them on this process."""

    iteration: int
    own: slice  # of the batch, what is on this process
    index: Tensor | None  # int64 (N,), places of this process's images in the data set
    keys: list[Tensor]  # (B, C) per direction: encoded keys of all processes, L2-normalised
    queries: list[Tensor] = field(default_factory=list)  # (n, C) per forward, without gradient


class Dictionary(nn.Module):
    """What a model asks of a dictionary."""

    # "follows": a copy that moves slowly; "query": the query encoder itself, with gradient; "none".
    key_encoder = "follows"

    def contrast(self, step: Step, direction: int = 0) -> Contrast:
        """What this process's queries of a direction are compared with, before the step is in the
        dictionary."""
        raise NotImplementedError

    def candidates(self, batch_size: int) -> int:
        """Keys that a query is compared with, its positive among them, in a batch of all
        processes."""
        raise NotImplementedError

    def finish_(self, step: Step) -> None:
        """Take in what the step has brought. A collective, where that lies on several processes."""


class KeyQueue(Dictionary):
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
        self.register_buffer("keys", _random_unit_rows(size, dim, seed))
        self.register_buffer("pointer", torch.zeros((), dtype=torch.int64))
        self.register_buffer("filled", torch.zeros((), dtype=torch.int64))

    def contrast(self, step, direction=0):
        return Contrast(step.keys[direction][step.own], self.keys)

    def candidates(self, batch_size):
        return len(self.keys) + 1

    def finish_(self, step):
        """Enqueue the keys of all directions, as the authors' demo with a symmetric loss does."""
        for keys in step.keys:
            self.enqueue_(keys)

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


class MemoryBank(Dictionary):
    """A representation of every image of the data set (InstDisc, arXiv 1805.01978).

    A query's positive is its image's row, written when the image was last seen, and K rows drawn
    at random are the negatives; those of the query's own image are left out. After the step the
    rows of its images move: v <- normalise(m v + (1 - m) q). This momentum is on the
    representations of the same image, not on an encoder (Sec. 3.2 of the MoCo paper), and without
    a key encoder there is nothing to shuffle: positives come from other batches (Sec. 3.3).

    Buffer, saved in checkpoints:
        keys: float32 (images, C), rows L2-normalised; random ones for images not seen yet.
    """

    key_encoder = "none"

    def __init__(self, num_images: int, dim: int, num_negatives: int, momentum: float, seed: int):
        """
        Args:
            num_images: size of the data set.
            dim: C, length of a representation.
            num_negatives: K, drawn uniformly and with replacement, as in InstDisc.
            momentum: m of the representations.
            seed: of the first representations and the draws; the same on every process.
        """
        super().__init__()
        if num_images < 1 or num_negatives < 1:
            raise UserError(
                f"a memory bank of {num_images} images (MODEL.MOCO.BANK_SIZE) with {num_negatives} "
                "negatives (MODEL.MOCO.QUEUE_SIZE): both must be above 0; PretrainTrainer sets the "
                "number of images itself"
            )
        self.register_buffer("keys", _random_unit_rows(num_images, dim, seed))
        self.num_negatives = num_negatives
        self.momentum = momentum
        self.seed = seed

    def drawn(self, iteration: int) -> Tensor:
        """int64 (K,): images whose rows are the negatives of an iteration, on every process."""
        draws = generator(Stream.NEGATIVES, self.seed, iteration)
        rows = draws.integers(len(self.keys), size=self.num_negatives)
        return torch.from_numpy(rows).to(self.keys.device)

    def contrast(self, step, direction=0):
        if step.index is None:
            raise UserError(
                "a memory bank is kept by image: a batch needs 'index', int64 (N,), the places of "
                "its images in the data set"
            )
        drawn = self.drawn(step.iteration)
        return Contrast(self.keys[step.index], self.keys[drawn], step.index, drawn)

    def candidates(self, batch_size):
        return self.num_negatives + 1

    def finish_(self, step):
        self.update_(all_gather_rows(step.index), all_gather_rows(torch.cat(step.queries)))

    @torch.no_grad()
    def update_(self, index: Tensor, queries: Tensor) -> None:
        """Move the rows of images towards their queries.

        Args:
            index: int64 (B,), images. Of one that comes several times its last query counts.
            queries: (B, C) L2-normalised; both the same on every process.
        """
        order = torch.arange(len(index), dtype=torch.int32, device=index.device)
        last = ((index[:, None] == index) * order).amax(1)
        rows = torch.lerp(queries[last].to(self.keys.dtype), self.keys[index], self.momentum)
        self.keys.index_copy_(0, index, F.normalize(rows, dim=1))

    def extra_repr(self) -> str:
        images, dim = self.keys.shape
        return f"images={images}, dim={dim}, negatives={self.num_negatives}, m={self.momentum}"


class InBatch(Dictionary):
    """No memory: the keys of a batch are each other's negatives, and gradients flow into them (the
    end-to-end mechanism of Figure 2a; both encoders are the query encoder, as in SimCLR)."""

    key_encoder = "query"

    def contrast(self, step, direction=0):
        keys = step.keys[direction]
        ids = torch.arange(len(keys), device=keys.device)
        # The own key is a positive and not also a negative.
        return Contrast(keys[step.own], keys, ids[step.own], ids)

    def candidates(self, batch_size):
        return batch_size


def _random_unit_rows(count: int, dim: int, seed: int) -> Tensor:
    rows = torch.randn(count, dim, generator=torch.Generator().manual_seed(seed))
    return rows.div_(rows.norm(dim=1, keepdim=True))  # in place: a memory bank is large


def build_dictionary(cfg: CfgNode) -> Dictionary:
    """Build the dictionary that a config describes, `MODEL.MOCO.DICTIONARY`."""
    moco, seed = cfg.MODEL.MOCO, max(cfg.SEED, 0)
    if moco.DICTIONARY == "queue":
        return KeyQueue(moco.QUEUE_SIZE, moco.DIM, seed)
    if moco.DICTIONARY == "memory_bank":
        size, momentum = moco.BANK_SIZE, moco.BANK_MOMENTUM
        return MemoryBank(size, moco.DIM, moco.QUEUE_SIZE, momentum, seed)
    if moco.DICTIONARY == "in_batch":
        return InBatch()
    raise UserError(
        f"MODEL.MOCO.DICTIONARY is {moco.DICTIONARY!r}; known: queue, memory_bank, in_batch"
    )
