"""AlexNet, in the one-column form of Krizhevsky (2014)."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from pipeplan_launch.job.job import Job
from pipeplan_launch.models.synthetic_data import generated_images


def alexnet(classes: int = 1000) -> nn.Module:
    """The network for images of 3×224×224: 61,100,840 parameters with 1000 classes."""
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
    model = nn.Sequential()
    model.add_module("features", features)
    model.add_module("flatten", nn.Flatten())
    model.add_module("classifier", classifier)
    return model


def build() -> Job:
    """The job with cross entropy over 1000 classes, on generated images."""
    return Job(
        alexnet(),
        inputs=lambda n: torch.randn(n, 3, 224, 224),
        loss=functional.cross_entropy,
        data=lambda: generated_images((3, 224, 224), classes=1000),
        name="alexnet",
        minibatch=256,
    )
