"""Catalogue of the bundled models. Torch-free.

A model is a module in pipeplan_launch/models with a function that builds a `Job`; `builder_of` names both.
"""

from __future__ import annotations

from typing import TypedDict


class Bundled(TypedDict):
    """Facts about one model, for `pipeplan list models`."""

    description: str
    parameters: int
    """Number of parameters, of 4 bytes each."""
    minibatch: int
    """Samples in a minibatch, unless the command line overrides it."""
    source: str
    """First author and year of the model's paper."""


def _model(description: str, parameters: int, minibatch: int, source: str) -> Bundled:
    return {"description": description, "parameters": parameters, "minibatch": minibatch, "source": source}


_MODULES = {"gnmt": ("gnmt8", "gnmt16"), "image_networks": ("alexnet", "vgg16", "resnet50", "resnet-tiny")}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def builder_of(name: str) -> tuple[str, str]:
    """(module in pipeplan_launch.models, function in it that builds the job) of a bundled model."""
    function = name.replace("-", "_")
    return (_MODULE_OF[name], function) if name in _MODULE_OF else (function, "build")


BUNDLED: dict[str, Bundled] = {
    "mnist": _model(
        "digits: 2 convolutions, 3 linear layers; real scans from scikit-learn",
        *(369_258, 32, "course slides"),
    ),
    "vgg16": _model(
        "VGG-16; generated 224×224 images",
        *(138_357_544, 64, "Simonyan 2014"),
    ),
    "resnet50": _model(
        "ResNet-50; generated 224×224 images",
        *(25_557_032, 128, "He 2015"),
    ),
    "alexnet": _model(
        "AlexNet, one column; generated 224×224 images",
        *(61_100_840, 256, "Krizhevsky 2014"),
    ),
    "gnmt8": _model(
        "GNMT, 4 + 4 LSTM layers; generated sentences of 48 tokens",
        *(193_765_952, 64, "Wu 2016"),
    ),
    "gnmt16": _model(
        "GNMT, 8 + 8 LSTM layers; generated sentences of 25 tokens",
        *(277_717_568, 64, "Wu 2016"),
    ),
    "awd-lm": _model(
        "AWD-LM, 4 LSTMs whose weights drop out; generated text",
        *(102_058_000, 80, "Merity 2018"),
    ),
    "s2vt": _model(
        "S2VT, video to text; generated features of frames",
        *(87_362_668, 80, "Venugopalan 2015"),
    ),
    "resnet-tiny": _model(
        "a small ResNet, to test with; generated 32×32 images",
        *(78_042, 32, "He 2015"),
    ),
}
"""The bundled models by name."""
