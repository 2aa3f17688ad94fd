"""Layers that are the same computation, of which one needs to be measured.

Two layers are alike if their functions are the same graph of the same operators with the same constants, and if
everything that a pass showed of them is equal: type, shape, strides and need of a gradient of all that they are given
(tensors, data, parameters, buffers), which of these share memory, what they make of it, and the gradients that come
back. What is left to differ is the values of floating-point numbers, on which no dense operator's time depends.
Integers decide what is read and written (an embedding's rows): layers that are given some are alike only if these are
the same tensor, or in buffers and data the same numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from pipeplan.profiler.layer_inputs import RunLayer
from pipeplan.profiler.layer_run import LayerRun
from pipeplan_launch.tracing.layers import LOSS_LAYER


def describe(tensor: Tensor | None) -> Hashable:
    """What the time of an operator may depend on in a tensor, but for its integers."""
    if tensor is None:
        return None
    return tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.requires_grad, tensor.device


class Observer:
    """Sees one full pass of a `LayerRun`, and tells which layers are alike."""

    def __init__(self, run: LayerRun) -> None:
        self.run = run
        self._seen: dict[str, list[Hashable]] = {}

    def forward(self, layer: RunLayer, received: Sequence[Tensor], data: Sequence[Tensor], made: Sequence[Any]) -> None:
        """A layer has run on this."""
        given = [*layer.state, *received, *data]
        results = [one for one in made if isinstance(one, Tensor)]
        integers = [_integers(one) for one in (*layer.state, *data)]
        integers += [spec.name for spec, one in zip(layer.receives, received, strict=True) if _chooses(one)]
        self._seen[layer.name] = [
            tuple(map(describe, given)),
            tuple(integers),
            tuple(map(describe, results)),
            _sharing([*given, *results]),
            layer.writes_in_place,
        ]

    def backward(self, layer: RunLayer, gradients: Sequence[Sequence[Tensor | None]]) -> None:
        """These gradients have come for what a layer made: for each tensor, one or None from each consumer."""
        self._seen[layer.name].append(tuple(tuple(map(describe, one)) for one in gradients))

    def classes(self) -> dict[str, str]:
        """For every layer that another one before it can stand for, that other one; the first of its kind."""
        first: dict[Hashable, str] = {}
        found = {}
        for layer in self.run.layers:
            if layer.name == LOSS_LAYER:
                continue
            signature = (structure(layer.segment.run), tuple(self._seen[layer.name]))
            source = first.setdefault(signature, layer.name)
            if source != layer.name:
                found[layer.name] = source
        return found


def _integers(tensor: Tensor) -> str | None:
    """The content of a tensor of integers, in short."""
    if not _chooses(tensor):
        return None
    return hashlib.sha256(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def _chooses(tensor: Tensor) -> bool:
    """Whether its values may decide where memory is touched."""
    return not (tensor.is_floating_point() or tensor.is_complex()) and tensor.numel() > 1


def _sharing(tensors: Iterable[Tensor]) -> Hashable:
    """For each tensor the first one whose memory it is in."""
    first: dict[int, int] = {}
    return tuple(first.setdefault(tensor.untyped_storage()._cdata, index) for index, tensor in enumerate(tensors))


def structure(module: fx.GraphModule) -> Hashable:
    """A graph as a value: equal for graphs that run the same operators on the same arguments in the same order."""
    number = {node: index for index, node in enumerate(module.graph.nodes)}

    def value(argument: Any) -> Hashable:
        if isinstance(argument, fx.Node):
            return "node", number[argument]
        if isinstance(argument, list | tuple):
            return type(argument).__name__, tuple(map(value, argument))
        if isinstance(argument, dict):
            return "dict", tuple((key, value(one)) for key, one in argument.items())
        if isinstance(argument, slice):
            return "slice", value(argument.start), value(argument.stop), value(argument.step)
        if isinstance(argument, bool | int | float | complex | str | None):
            return type(argument).__name__, repr(argument)
        if isinstance(argument, torch.dtype | torch.device | torch.layout | torch.memory_format):
            return str(argument)
        return _Same(argument)

    def target(node: fx.Node) -> Hashable:
        if node.op == "placeholder":
            return ""
        if node.op == "get_attr":
            inner = getattr(module, str(node.target))
            return structure(inner) if isinstance(inner, fx.GraphModule) else _Same(inner)
        return node.target if isinstance(node.target, str) else _Same(node.target)

    return tuple(
        (node.op, target(node), tuple(map(value, node.args)), value(dict(node.kwargs))) for node in module.graph.nodes
    )


class _Same:
    """Equal to what wraps the very same object, and holds on to it, so that no other one takes its address."""

    def __init__(self, wrapped: object) -> None:
        self.wrapped = wrapped

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.wrapped is self.wrapped

    def __hash__(self) -> int:
        return id(self.wrapped)
