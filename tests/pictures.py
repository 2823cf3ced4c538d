"""What a run has drawn for TensorBoard."""

from pathlib import Path

import cv2
import numpy as np
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def tensorboard_pictures(folder: Path) -> dict[str, dict[int, torch.Tensor]]:
    """Pictures in a run's TensorBoard files, uint8 (3, H, W), RGB, by name and iteration."""
    events = EventAccumulator(str(folder), size_guidance={"images": 0}).Reload()
    pictures = {}
    for name in events.Tags()["images"]:
        pictures[name] = {}
        for event in events.Images(name):
            pixels = cv2.imdecode(np.frombuffer(event.encoded_image_string, np.uint8), 1)
            picture = torch.from_numpy(pixels[..., ::-1].copy()).permute(2, 0, 1)
            pictures[name][event.step] = picture
    return pictures
