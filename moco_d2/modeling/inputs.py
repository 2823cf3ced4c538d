"""What every model of this project does with its input: collate and normalise uint8 images."""

import torch
from torch import Tensor, nn


class ImageModel(nn.Module):
    """A model that takes uint8 images and normalises them on its own device."""

    def __init__(self, pixel_mean: list[float], pixel_std: list[float]):
        """
        Args:
            pixel_mean, pixel_std: per channel, on the 0-255 scale.
        """
        super().__init__()
        self.register_buffer("pixel_mean", torch.tensor(pixel_mean).view(-1, 1, 1), False)
        self.register_buffer("pixel_std", torch.tensor(pixel_std).view(-1, 1, 1), False)

    @property
    def device(self) -> torch.device:
        return self.pixel_mean.device

    def normalise(self, images: Tensor) -> Tensor:
        """uint8 (N, C, H, W) -> float, (x - mean) / std per channel, on this model's device."""
        if images.dtype != torch.uint8 or images.ndim != 4:
            raise ValueError(
                f"{type(self).__name__} takes images as uint8 (N, C, H, W); got {images.dtype} "
                f"{tuple(images.shape)}"
            )
        return (images.to(self.device, non_blocking=True) - self.pixel_mean) / self.pixel_std


def full_precision(x: Tensor) -> Tensor:
    """Half precision -> float32; float32 and float64 as they are."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def collate(batch: dict | list[dict]) -> dict:
    """detectron2's list of one dict per image -> one dict of tensors; such a dict stays."""
    if isinstance(batch, dict):
        return batch
    if "views" in batch[0]:
        collated = {
            "views": [torch.stack(v) for v in zip(*(s["views"] for s in batch), strict=True)]
        }
        for name in {"position", "index", "label"} & batch[0].keys():
            collated[name] = torch.as_tensor([int(s[name]) for s in batch])
        return collated
    return {"image": torch.stack([s["image"] for s in batch])}
