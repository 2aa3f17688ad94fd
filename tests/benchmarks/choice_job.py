"""ResNet-18 (He et al., CVPR 2016) for images of 32 × 32, with a small first convolution, on random data."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from pipeplan_launch import Data, Job

CLASSES, IMAGES = 10, 4096


class _Block(nn.Module):
    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, width, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(width)
        shorter = nn.Conv2d(before, width, 1, stride, bias=False)
        self.short = nn.Identity() if before == width else nn.Sequential(shorter, nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        made = torch.relu(self.first_norm(self.first(x)))
        return torch.relu(self.second_norm(self.second(made)) + self.short(x))


def build() -> Job:
    """The job, with minibatches of 32."""
    widths = ((64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1), (256, 512, 2))
    blocks = [_Block(*sizes) for sizes in (*widths, (512, 512, 1))]
    stem = nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()
    net = nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, CLASSES))
    made = torch.Generator().manual_seed(0)
    images = torch.randn(IMAGES, 3, 32, 32, generator=made)
    labels = torch.randint(0, CLASSES, (IMAGES,), generator=made)
    return Job(
        net,
        loss=functional.cross_entropy,
        data=lambda: Data(TensorDataset(images, labels)),
        minibatch=32,
        name="resnet18",
    )
