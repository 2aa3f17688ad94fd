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


_MODULES = {"gnmt": ("gnmt8", "gnmt16"), "image_networks": ("alexnet", "vgg16", "resnet50", "resnet-tiny")}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def builder_of(name: str) -> tuple[str, str]:
    """(module in pipeplan_launch.models, function in it that builds the job) of a bundled model."""
    function = name.replace("-", "_")
    return (_MODULE_OF[name], function) if name in _MODULE_OF else (function, "build")


_TABLE = (
    ("mnist", 369_258, 32, "course slides", "digits: 2 convolutions, 3 linear layers; real scans from scikit-learn"),
    ("vgg16", 138_357_544, 64, "Simonyan 2014", "VGG-16; generated 224×224 images"),
    ("resnet50", 25_557_032, 128, "He 2015", "ResNet-50; generated 224×224 images"),
    ("alexnet", 61_100_840, 256, "Krizhevsky 2014", "AlexNet, one column; generated 224×224 images"),
    ("gnmt8", 193_765_952, 64, "Wu 2016", "GNMT, 4 + 4 LSTM layers; generated sentences of 48 tokens"),
    ("gnmt16", 277_717_568, 64, "Wu 2016", "GNMT, 8 + 8 LSTM layers; generated sentences of 25 tokens"),
    ("awd-lm", 102_058_000, 80, "Merity 2018", "AWD-LM, 4 LSTMs whose weights drop out; generated text"),
    ("s2vt", 87_362_668, 80, "Venugopalan 2015", "S2VT, video to text; generated features of frames"),
    ("resnet-tiny", 78_042, 32, "He 2015", "a small ResNet, to test with; generated 32×32 images"),
)
BUNDLED = {
    name: Bundled(description=description, parameters=parameters, minibatch=minibatch, source=source)
    for name, parameters, minibatch, source, description in _TABLE
}
"""The bundled models by name."""
