"""ResNet-50 with all fifty layers, a quarter as wide and on 32×32 pixels, so that two cores train it in seconds.

`pipeplan profile resnet50.py:job` measures it.
"""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from pipeplan_launch import Data, Job

BLOCKS = (3, 4, 6, 3)
TRAIN = 1437
EPOCHS = 3
MINIBATCHES = 45
"""Minibatches of an epoch."""


class Bottleneck(nn.Module):
    """Three convolutions with a shortcut around them."""

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride > 1 or inside != 4 * width:
            self.downsample = nn.Sequential(
                nn.Conv2d(inside, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, x: Tensor) -> Tensor:
        skip = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.bn2(self.conv2(x)))
        return self.relu(self.bn3(self.conv3(x)) + skip)


class ResNet50(nn.Module):
    """ResNet-50 of He et al., 2015, where `width` is 64 and `classes` is 1000."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        layers, inside = [], width
        for layer, blocks in enumerate(BLOCKS):
            for block in range(blocks):
                layers.append(Bottleneck(inside, width << layer, stride=2 if layer and not block else 1))
                inside = 4 * (width << layer)
        self.blocks = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(inside, classes)

    def forward(self, image: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(image))))
        return self.fc(self.avgpool(self.blocks(x)).flatten(1))


def digits() -> Data:
    """The scanned digits of scikit-learn, enlarged from 8×8 to 32×32 and repeated in all three colours."""
    scans = load_digits()
    small = torch.tensor(scans.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    images = functional.interpolate(small, size=(32, 32), mode="bilinear").repeat(1, 3, 1, 1)
    labels = torch.tensor(scans.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:TRAIN], order[TRAIN:]
    return Data(TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test]))


def job() -> Job:
    return Job(
        model=ResNet50(width=16, classes=10),
        loss=functional.cross_entropy,
        data=digits,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05),
        scheduler=lambda sgd: torch.optim.lr_scheduler.CosineAnnealingLR(sgd, EPOCHS * MINIBATCHES),
        scheduler_interval="minibatch",
        name="resnet50-quarter",
        minibatch=32,
    )


def full() -> Job:
    """The published network, for planning only: it has the shapes of ImageNet but no data."""
    return Job(
        model=ResNet50(width=64, classes=1000),
        inputs=lambda n: torch.empty(n, 3, 224, 224),
        loss=functional.cross_entropy,
        name="resnet50",
        minibatch=128,
    )
