"""Networks for images: AlexNet, VGG-16, ResNet-50, and a small ResNet for tests."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeplan_launch.job.job import Job
from pipeplan_launch.models.synthetic_data import generated_images

# Output channels of the 3×3 convolutions; "M" halves the size by max pooling.
CONFIGURATION = [64, 64, "M", 128, 128, "M", 256, 256, 256, "M", 512, 512, 512, "M", 512, 512, 512, "M"]


def _chain(features: nn.Module, classifier: nn.Module) -> nn.Module:
    """A network with the parts `features`, `flatten` and `classifier`."""
    return nn.Sequential(OrderedDict(features=features, flatten=nn.Flatten(), classifier=classifier))


def _alexnet(classes: int = 1000) -> nn.Module:
    """AlexNet, in the one-column form of Krizhevsky (2014): 61,100,840 parameters with 1000 classes."""
    features = nn.Sequential(
        *(nn.Conv2d(3, 64, kernel_size=11, stride=4, padding=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, stride=2)),
        *(nn.Conv2d(64, 192, kernel_size=5, padding=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, stride=2)),
        *(nn.Conv2d(192, 384, kernel_size=3, padding=1), nn.ReLU(inplace=True)),
        *(nn.Conv2d(384, 256, kernel_size=3, padding=1), nn.ReLU(inplace=True)),
        *(nn.Conv2d(256, 256, kernel_size=3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(3, stride=2)),
    )
    classifier = nn.Sequential(
        *(nn.Dropout(0.5), nn.Linear(256 * 6 * 6, 4096), nn.ReLU(inplace=True)),
        *(nn.Dropout(0.5), nn.Linear(4096, 4096), nn.ReLU(inplace=True)),
        nn.Linear(4096, classes),
    )
    return _chain(features, classifier)


def _vgg16(classes: int = 1000) -> nn.Module:
    """VGG-16 (Simonyan and Zisserman, 2014, configuration D): 138,357,544 parameters with 1000 classes."""
    features: list[nn.Module] = []
    channels = 3
    for width in CONFIGURATION:
        if isinstance(width, int):
            features += [nn.Conv2d(channels, width, kernel_size=3, padding=1), nn.ReLU(inplace=True)]
            channels = width
        else:
            features.append(nn.MaxPool2d(kernel_size=2))
    classifier = [
        *(nn.Linear(512 * 7 * 7, 4096), nn.ReLU(inplace=True), nn.Dropout(0.5)),
        *(nn.Linear(4096, 4096), nn.ReLU(inplace=True), nn.Dropout(0.5)),
        nn.Linear(4096, classes),
    ]
    return _chain(nn.Sequential(*features), nn.Sequential(*classifier))


BLOCKS = (3, 4, 6, 3)
EXPANSION = 4


class Bottleneck(nn.Module):
    """1×1, 3×3 and 1×1 convolutions, with a skip connection around them."""

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
    """ResNet-50 (He et al., 2015), with the stride in the 3×3 convolution of each block: 25,557,032 parameters with
    1000 classes.
    """

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


WIDTHS = (16, 32, 64)


class Block(nn.Module):
    """Two 3×3 convolutions with a skip connection around them, added and activated in place."""

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
    """A ResNet for images of 3×32×32, small enough for tests. Like larger ResNets it has a stem, blocks in each of
    three stages (widths 16, 32 and 64), and a linear layer.
    """

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


def _job(model: nn.Module, name: str, minibatch: int, side: int = 224, classes: int = 1000) -> Job:
    """A job with cross entropy, on generated images of `side` × `side`."""
    return Job(
        model,
        inputs=lambda n: torch.randn(n, 3, side, side),
        loss=functional.cross_entropy,
        data=lambda: generated_images((3, side, side), classes=classes),
        name=name,
        minibatch=minibatch,
    )


def alexnet() -> Job:
    """AlexNet over 1000 classes."""
    return _job(_alexnet(), "alexnet", 256)


def vgg16() -> Job:
    """VGG-16 over 1000 classes."""
    return _job(_vgg16(), "vgg16", 64)


def resnet50() -> Job:
    """ResNet-50 over 1000 classes."""
    return _job(ResNet50(), "resnet50", 128)


def resnet_tiny() -> Job:
    """The small ResNet over 10 classes."""
    return _job(ResNetTiny(), "resnet-tiny", 32, side=32, classes=10)
