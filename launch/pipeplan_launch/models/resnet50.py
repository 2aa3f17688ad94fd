"""ResNet-50 (He et al., 2015), with the stride in the 3×3 convolution of each block."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeplan_launch.job.job import Job
from pipeplan_launch.models.synthetic_data import generated_images

BLOCKS = (3, 4, 6, 3)
EXPANSION = 4


class Bottleneck(nn.Module):
    """1×1, 3×3 and 1×1 convolutions beside a skip connection."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = width * EXPANSION
        self.conv1 = nn.Conv2d(channels, width, kernel_size=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, kernel_size=3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, out, kernel_size=1, bias=False)
        self.bn3 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or channels != out:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels, out, kernel_size=1, stride=stride, bias=False), nn.BatchNorm2d(out)
            )

    def forward(self, x: Tensor) -> Tensor:
        """The block's output, with 4 × `width` channels."""
        skip = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.bn2(self.conv2(x)))
        x = self.bn3(self.conv3(x))
        x += skip
        activated: Tensor = self.relu(x)
        return activated


class ResNet50(nn.Module):
    """The network for images of 3×224×224: 25,557,032 parameters with 1000 classes."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, kernel_size=7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
        channels = 64
        for stage, blocks in enumerate(BLOCKS):
            width = 64 * 2**stage
            layers = []
            for block in range(blocks):
                layers.append(Bottleneck(channels, width, stride=2 if stage and not block else 1))
                channels = width * EXPANSION
            self.add_module(f"layer{stage + 1}", nn.Sequential(*layers))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(channels, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Class scores."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for stage in range(len(BLOCKS)):
            x = self.get_submodule(f"layer{stage + 1}")(x)
        scores: Tensor = self.fc(self.avgpool(x).flatten(1))
        return scores


def build() -> Job:
    """The job with cross entropy over 1000 classes, on generated images."""
    return Job(
        ResNet50(),
        inputs=lambda n: torch.randn(n, 3, 224, 224),
        loss=functional.cross_entropy,
        data=lambda: generated_images((3, 224, 224), classes=1000),
        name="resnet50",
        minibatch=128,
    )
