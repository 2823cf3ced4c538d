"""Linear classifiers of fixed features, one for each of several learning rates, trained at once."""

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from moco_d2.data.streams import SampleStream

# MoCo's main_lincls.py: 100 epochs, x 0.1 at 60 and 80, momentum 0.9, no weight decay; weights
# begin at N(0, 0.01).
EPOCHS = 100
MILESTONES = (0.6, 0.8)
GAMMA = 0.1
MOMENTUM = 0.9
INITIAL_STD = 0.01
# The batch that learning rates are for. A smaller one takes them in proportion.
BATCH_SIZE = 256

_LOGITS = 1 << 25  # at a time, which bounds memory


class LinearHeads:
    """Fully connected layers on the same features, all of which begin alike.

    The heads lie side by side in one matrix, so that a step of all is one product.
    """

    def __init__(self, weight: Tensor, bias: Tensor):
        """
        Args:
            weight: float (C, L, classes), of L heads.
            bias: float (L, classes).
        """
        self.weight = weight
        self.bias = bias

    @classmethod
    def create(
        cls, features: int, classes: int, heads: int, *, seed: int, like: Tensor
    ) -> "LinearHeads":
        """
        Args:
            features: C, length of a feature.
            seed: of the weights.
            like: a tensor of the data type and on the device that the heads shall have.
        """
        draws = torch.Generator().manual_seed(seed)
        weight = torch.randn(features, 1, classes, generator=draws) * INITIAL_STD
        weight = weight.to(like).expand(-1, heads, -1).clone()
        return cls(weight, weight.new_zeros(heads, classes))

    def logits(self, features: Tensor) -> Tensor:
        """(n, C) -> (n, L, classes)."""
        return (features @ self.weight.flatten(1)).unflatten(1, self.bias.shape) + self.bias

    def gradients(self, features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of each head's mean cross-entropy: (softmax - one-hot) times what was seen.

        Args:
            features: (n, C).
            labels: int64 (n,).

        Returns:
            those of `weight` and of `bias`.
        """
        error = self.logits(features).softmax(dim=2)  # (n, L, classes)
        error -= F.one_hot(labels, error.shape[2])[:, None]
        error /= len(features)
        return (features.T @ error.flatten(1)).unflatten(1, self.bias.shape), error.sum(dim=0)

    def ranked(self, features: Tensor, top: int) -> Iterator[Tensor]:
        """Rank classes by score; of equal scores, the lower number first.

        Args:
            features: (N, C).
            top: how many classes are wanted.

        Yields:
            int64 (n, L, top), part by part of the N.
        """
        for part in features.split(max(1, _LOGITS // self.bias.numel())):
            ranked = self.logits(part).argsort(dim=2, descending=True, stable=True)
            yield ranked[:, :, :top].clone()  # the slice itself would keep all classes in memory


def train_heads(
    features: Tensor,
    labels: Tensor,
    *,
    classes: int,
    learning_rates: Sequence[float],
    epochs: int = EPOCHS,
    batch_size: int = BATCH_SIZE,
    seed: int = 0,
    progress: Callable[[int], None] = lambda iterations: None,
) -> LinearHeads:
    """Train a head for each learning rate: SGD with momentum, cross-entropy, published steps.

    All see the same batches, in the order in which `ClassificationTrainer` shows images with
    this seed.

    Args:
        features: float (N, C).
        labels: int64 (N,), on the same device.
        learning_rates: for 256 images; with smaller batches they are scaled in proportion.
        epochs: passes over the features.
        batch_size: images in a step, at most N are used.
        seed: of the initial weights and of the order of the images.
        progress: called with the number of iterations done since the last call.
    """
    batch_size = min(batch_size, len(features))
    iterations = max(1, epochs * len(features) // batch_size)
    heads = LinearHeads.create(
        features.shape[1], classes, len(learning_rates), seed=seed, like=features
    )
    rates = features.new_tensor(learning_rates)[:, None] * (batch_size / BATCH_SIZE)  # (L, 1)
    milestones = [round(share * iterations) for share in MILESTONES]
    stream = SampleStream(len(features), seed)
    parameters = (heads.weight, heads.bias)
    velocities = [torch.zeros_like(p) for p in parameters]
    for iteration in range(iterations):
        decay = GAMMA ** sum(iteration >= milestone for milestone in milestones)
        batch = torch.from_numpy(stream.samples(iteration * batch_size, batch_size))
        batch = batch.to(features.device)
        gradients = heads.gradients(features[batch], labels[batch])
        for p, gradient, velocity in zip(parameters, gradients, velocities, strict=True):
            velocity.mul_(MOMENTUM).add_(gradient)
            p.sub_(decay * rates * velocity)
        progress(1)
    return heads


def standardise(features: Tensor, like: Tensor) -> Tensor:
    """Features whose channels have mean 0 and standard deviation 1 over a set.

    Args:
        features: float (N, C).
        like: float (M, C), the set; a channel that is constant in it is only centred.
    """
    mean, std = like.mean(dim=0), like.std(dim=0, correction=0)
    return (features - mean) / torch.where(std > 0, std, 1)
