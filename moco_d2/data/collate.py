"""Samples to batches: bytes, written once to where the main process reads them."""

from collections.abc import Sequence
from typing import Any

import cv2
import numpy as np
import torch
from torch.utils.data import get_worker_info

from moco_d2.data.mapper import NoReadableImages, Sample


class Collate:
    """Stacks samples into tensors, (H, W, C) to (N, C, H, W) in the channel order asked for."""

    def __init__(self, order: Sequence[int]):
        """
        Args:
            order: where each channel of the result is in the samples, and the other way round.
        """
        self._order = order

    def _stack(self, images: Sequence[np.ndarray]) -> torch.Tensor:
        side = images[0].shape[0] if images else 0
        batch = torch.empty((len(images), len(self._order), side, side), dtype=torch.uint8)
        if get_worker_info() is not None:
            batch.share_memory_()  # written once, where the main process reads it
        for planes, image in zip(batch.numpy(), images, strict=True):
            cv2.split(image, [planes[channel] for channel in self._order])
        return batch


class CollateViews(Collate):
    def __call__(self, samples: list[Sample | NoReadableImages]) -> Any:
        failed = [sample for sample in samples if isinstance(sample, NoReadableImages)]
        if failed:
            return failed[0]
        views = zip(*(sample.images for sample in samples), strict=True)
        return {
            "views": [self._stack(images) for images in views],
            "position": torch.tensor([sample.position for sample in samples]),
            "index": torch.tensor([sample.index for sample in samples]),
            "label": torch.tensor([sample.label for sample in samples]),
            "unreadable": [entry for sample in samples for entry in sample.unreadable],
        }


class CollateLabelled(Collate):
    def __call__(self, samples: list[Sample | NoReadableImages]) -> dict[str, Any]:
        read = [sample for sample in samples if isinstance(sample, Sample)]
        return {
            "image": self._stack([sample.images[0] for sample in read]),
            "label": torch.tensor([sample.label for sample in read], dtype=torch.int64),
            "index": torch.tensor([sample.index for sample in read], dtype=torch.int64),
            "unreadable": [
                entry
                for sample in samples
                if isinstance(sample, NoReadableImages)
                for entry in sample.unreadable
            ],
        }
