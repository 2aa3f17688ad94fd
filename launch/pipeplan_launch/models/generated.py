"""Generated images for models whose data is too large to ship: the right shapes and sizes, nothing to learn from."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import Dataset

from pipeplan_launch.job import Data


class GeneratedImages(Dataset[tuple[Tensor, Tensor]]):
    """Images of normal noise, each made from its own index when it is asked for; the class follows the index."""

    def __init__(self, samples: int, shape: tuple[int, ...], classes: int, seed: int) -> None:
        self.samples, self.shape, self.classes, self.seed = samples, shape, classes, seed

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < self.samples:
            raise IndexError(index)
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        return torch.randn(self.shape, generator=generator), torch.tensor(index % self.classes)


def generated_images(shape: tuple[int, ...], classes: int, samples: int = 512) -> Data:
    """A training set of that many samples and a test set of a quarter of it."""
    return Data(
        train=GeneratedImages(samples, shape, classes, seed=1),
        test=GeneratedImages(max(1, samples // 4), shape, classes, seed=2),
    )
