"""VGG-16 (Simonyan and Zisserman, 2014, configuration D)."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from pipeplan_launch.job.job import Job
from pipeplan_launch.models.synthetic_data import generated_images

# Output channels of the 3×3 convolutions; "M" halves the size by max pooling.
CONFIGURATION = [64, 64, "M", 128, 128, "M", 256, 256, 256, "M", 512, 512, 512, "M", 512, 512, 512, "M"]


def vgg16(classes: int = 1000) -> nn.Module:
    """The network for images of 3×224×224: 138,357,544 parameters with 1000 classes."""
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
    model = nn.Sequential()
    model.add_module("features", nn.Sequential(*features))
    model.add_module("flatten", nn.Flatten())
    model.add_module("classifier", nn.Sequential(*classifier))
    return model


def build() -> Job:
    """The job with cross entropy over 1000 classes, on generated images."""
    return Job(
        vgg16(),
        inputs=lambda n: torch.randn(n, 3, 224, 224),
        loss=functional.cross_entropy,
        data=lambda: generated_images((3, 224, 224), classes=1000),
        name="vgg16",
        minibatch=64,
    )
