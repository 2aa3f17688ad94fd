"""Layers of a traced model as functions with their state, and a search for layers with the same computation.

Two layers are duplicates if their functions are the same graph of the same operators with the same constants, and if
one pass observed the same about both: type, shape, strides and `requires_grad` of all inputs (tensors, data,
parameters, buffers), which of these share memory, and the same properties of the outputs and of the gradients that come
back. They may differ in the values of floating-point numbers, because no dense operator's time depends on them.
Integers, however, determine which memory is read and written (an embedding's rows). Layers with integer inputs are
duplicates only if they read the same tensor, or if the buffers and data hold the same numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from pipeplan_launch.tracing.layers import LOSS_LAYER
from pipeplan_launch.tracing.regions import attribute_at
from pipeplan_launch.tracing.shared_copies import SharedCopies
from pipeplan_launch.tracing.subgraph import Subgraph, cut_subgraph
from pipeplan_launch.tracing.trace import TensorSpec, TracedModel


@dataclass(frozen=True, eq=False)
class PreparedLayer:
    """A layer that is ready to run: its function, state and tensors."""

    name: str
    segment: Subgraph
    state: tuple[Tensor, ...]
    trained: tuple[Tensor, ...]
    """The parameters that take gradients."""
    receives: tuple[TensorSpec, ...]
    makes: tuple[TensorSpec, ...]
    writes_in_place: bool
    """Whether the layer may write to its inputs. It then gets copies."""


@dataclass(frozen=True)
class TensorKind:
    """Type, layout and device of a gradient."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    device: torch.device

    @staticmethod
    def of(tensor: Tensor) -> TensorKind:
        """The kind of a tensor."""
        return TensorKind(tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.device)

    def make(self) -> Tensor:
        """A new tensor of this kind, filled with a small number that is not subnormal."""
        extent = 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        memory = torch.full((max(0, extent),), 1e-3, dtype=self.dtype, device=self.device)
        return memory.as_strided(self.shape, self.stride)


def prepare_layer(traced: TracedModel, name: str, device: torch.device, copies: SharedCopies) -> PreparedLayer:
    """Cut the layer of this name out of the model, and put its constants on the device.

    If a stage computes a tensor once for several layers, the first of these layers computes the tensor for all.
    """
    tensors = (*traced.tensors, *copies.tensors)
    receives = tuple(spec for spec in tensors if name in spec.consumers)
    makes = tuple(spec for spec in tensors if spec.producer == name)
    segment = cut_subgraph(
        traced,
        [name],
        [spec.name for spec in receives],
        [spec.name for spec in makes],
        device=device,
        copies=copies.node_of,
    )
    state = state_tensors(traced, segment, device)
    grouped = any(name in group for group in traced.together)
    of_loss = traced.loss_state.parameters().values() if name == LOSS_LAYER and traced.loss_state is not None else ()
    trained = tuple(tensor for tensor in (*state, *of_loss) if tensor.requires_grad)
    return PreparedLayer(name, segment, state, trained, receives, makes, grouped)


def state_tensors(traced: TracedModel, segment: Subgraph, device: torch.device) -> tuple[Tensor, ...]:
    """The parameters, buffers and constants that a function takes."""
    parameters, buffers = dict(traced.model.named_parameters()), dict(traced.model.named_buffers())
    return tuple(
        parameters[key]
        if key in parameters
        else buffers[key]
        if key in buffers
        else attribute_at(traced.graph_module, key).to(device)
        for key in segment.state
    )


def tensor_signature(tensor: Tensor | None) -> Hashable:
    """The properties of a tensor that an operator's time may depend on, except for integer values."""
    if tensor is None:
        return None
    return tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.requires_grad, tensor.device


class DuplicateFinder:
    """Observes one full pass over the layers, and finds layers with the same computation."""

    def __init__(self, layers: Sequence[PreparedLayer]) -> None:
        self._layers = layers
        self._observed: dict[str, list[Hashable]] = {}

    def forward(
        self, layer: PreparedLayer, received: Sequence[Tensor], data: Sequence[Tensor], made: Sequence[Any]
    ) -> None:
        """Record the inputs and outputs of a layer that has run: `made` are its outputs."""
        inputs = [*layer.state, *received, *data]
        outputs = [value for value in made if isinstance(value, Tensor)]
        storages = [tensor.untyped_storage()._cdata for tensor in (*inputs, *outputs)]
        shared = tuple(map(storages.index, storages))  # for each tensor, the first one that shares its storage
        integers = [_integer_digest(tensor) for tensor in (*layer.state, *data)]
        integers += [
            spec.name for spec, tensor in zip(layer.receives, received, strict=True) if _may_be_indices(tensor)
        ]
        self._observed[layer.name] = [
            tuple(map(tensor_signature, inputs)),
            tuple(integers),
            tuple(map(tensor_signature, outputs)),
            shared,
            layer.writes_in_place,
        ]

    def backward(self, layer: PreparedLayer, gradients: Sequence[Sequence[Tensor | None]]) -> None:
        """Record the gradients of a layer's outputs before it runs backward: one or None from each consumer."""
        self._observed[layer.name].append(tuple(tuple(map(tensor_signature, tensors)) for tensors in gradients))

    def classes(self) -> dict[str, str]:
        """For every duplicate layer: the first layer with the same computation."""
        first: dict[Hashable, str] = {}
        duplicates = {}
        for layer in self._layers:
            if layer.name == LOSS_LAYER:
                continue
            signature = (graph_signature(layer.segment.run), tuple(self._observed[layer.name]))
            source = first.setdefault(signature, layer.name)
            if source != layer.name:
                duplicates[layer.name] = source
        return duplicates


def _integer_digest(tensor: Tensor) -> str | None:
    """A digest of an integer tensor's values; None for other tensors."""
    if not _may_be_indices(tensor):
        return None
    return hashlib.sha256(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def _may_be_indices(tensor: Tensor) -> bool:
    """Whether the tensor's values may determine which memory is accessed."""
    return not (tensor.is_floating_point() or tensor.is_complex()) and tensor.numel() > 1


def graph_signature(module: fx.GraphModule) -> Hashable:
    """A hashable key of a graph. Graphs that run the same operators on the same arguments in order have equal keys."""
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
        return _Identity(argument)

    def target(node: fx.Node) -> Hashable:
        if node.op == "placeholder":
            return ""
        if node.op == "get_attr":
            inner = getattr(module, str(node.target))
            return graph_signature(inner) if isinstance(inner, fx.GraphModule) else _Identity(inner)
        return node.target if isinstance(node.target, str) else _Identity(node.target)

    return tuple(
        (node.op, target(node), tuple(map(value, node.args)), value(dict(node.kwargs))) for node in module.graph.nodes
    )


class _Identity:
    """Compares by identity. Keeps the wrapped object alive, so that no other object gets its address."""

    def __init__(self, wrapped: object) -> None:
        self.wrapped = wrapped

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and other.wrapped is self.wrapped

    def __hash__(self) -> int:
        return id(self.wrapped)
