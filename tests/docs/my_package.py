"""What the README's job file imports, so that it can be run as it is printed there."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset


class Net(nn.Sequential):
    """A small classifier."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))


def _samples(count: int, seed: int) -> TensorDataset:
    values = torch.randn(count, 16, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(values, values[:, :4].argmax(dim=1))


def train_set() -> TensorDataset:
    return _samples(1024, 0)


def test_set() -> TensorDataset:
    return _samples(256, 1)
