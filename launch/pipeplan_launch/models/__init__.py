"""The bundled models, by name. Each module `<name>.py` here has a `build() -> Job`; this file needs no torch."""

from __future__ import annotations

BUNDLED: dict[str, str] = {
    "mnist": "two convolutions and three linear layers on scikit-learn's scanned digits (real data)",
    "vgg16": "VGG-16, 138 M parameters, on generated 224×224 images",
    "resnet50": "ResNet-50, 25.6 M parameters, on generated 224×224 images",
    "alexnet": "AlexNet, 61 M parameters, on generated 224×224 images",
    "resnet-tiny": "a ResNet of three stages for 32×32 images, 0.08 M parameters, on generated images",
}
"""Name and one line about each."""
