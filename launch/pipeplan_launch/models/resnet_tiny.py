"""A ResNet of three stages for images of 3×32×32, small enough for tests, with all that larger ResNets have."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeplan_launch.job.job import Job
from pipeplan_launch.models.synthetic_data import generated_images

WIDTHS = (16, 32, 64)


class Block(nn.Module):
    """Two 3×3 convolutions beside a skip connection, added and activated in place."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, kernel_size=3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, kernel_size=3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.skip: nn.Module | None = None
        if stride != 1 or channels != width:
            self.skip = nn.Sequential(nn.Conv2d(channels, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        """The block's output, with `width` channels."""
        skip = x if self.skip is None else self.skip(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.bn2(self.conv2(x))
        x += skip
        activated: Tensor = self.relu(x)
        return activated


class ResNetTiny(nn.Module):
    """A stem, `blocks` blocks in each of three stages of widths 16, 32 and 64, and a linear layer."""

    def __init__(self, blocks: int = 1, classes: int = 10) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, WIDTHS[0], kernel_size=3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(WIDTHS[0])
        self.relu = nn.ReLU(inplace=True)
        channels = WIDTHS[0]
        stages = []
        for stage, width in enumerate(WIDTHS):
            layers = []
            for block in range(blocks):
                layers.append(Block(channels, width, stride=2 if stage and not block else 1))
                channels = width
            stages.append(nn.Sequential(*layers))
        self.stages = nn.Sequential(*stages)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores."""
        x = self.relu(self.bn(self.conv(x)))
        scores: Tensor = self.fc(self.pool(self.stages(x)).flatten(1))
        return scores


def build() -> Job:
    """The job with cross entropy over 10 classes, on generated images."""
    return Job(
        ResNetTiny(),
        inputs=lambda n: torch.randn(n, 3, 32, 32),
        loss=functional.cross_entropy,
        data=lambda: generated_images((3, 32, 32), classes=10),
        name="resnet-tiny",
        minibatch=32,
    )
