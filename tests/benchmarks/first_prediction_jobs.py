"""Small models for `first_prediction.py`: each takes one to five milliseconds a minibatch on one core."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from pipeplan_launch import Data, Job

SAMPLES, MINIBATCH, CLASSES = 2048, 32, 10


def _job(model: nn.Module, *shape: int) -> Job:
    def data() -> Data:
        fixed = torch.Generator().manual_seed(0)
        inputs = torch.randn(SAMPLES, *shape, generator=fixed)
        targets = torch.randint(CLASSES, (SAMPLES,), generator=fixed)
        return Data(train=TensorDataset(inputs, targets))

    return Job(
        model=model,
        loss=nn.functional.cross_entropy,
        data=data,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
        minibatch=MINIBATCH,
    )


def mlp() -> Job:
    """Five linear layers of 384."""
    layers: list[nn.Module] = []
    for _ in range(5):
        layers += [nn.Linear(384, 384), nn.ReLU()]
    return _job(nn.Sequential(*layers, nn.Linear(384, CLASSES)), 384)


def convolutions() -> Job:
    """Four convolutions on images of 16 x 16."""
    layers: list[nn.Module] = []
    for before, after in ((3, 16), (16, 16), (16, 32), (32, 32)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU()]
    return _job(nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 16 * 16, CLASSES)), 3, 16, 16)


class _Attention(nn.Module):
    """Self-attention beside a skip."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(samples, words, width) to the same."""
        query, key, value = self.mix(x).chunk(3, dim=-1)
        return x + self.out(nn.functional.scaled_dot_product_attention(query, key, value))


def attention() -> Job:
    """Four layers of self-attention over 16 words of 96 numbers."""
    blocks = [_Attention(96) for _ in range(4)]
    return _job(nn.Sequential(*blocks, nn.Flatten(), nn.Linear(16 * 96, CLASSES)), 16, 96)
