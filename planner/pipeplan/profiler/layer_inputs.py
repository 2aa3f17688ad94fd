"""The layers of a traced model, each as a function with its state, and what may be said of a pass over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from pipeplan_launch.tracing.aliasing import attribute_at
from pipeplan_launch.tracing.subgraph import Subgraph, cut_subgraph
from pipeplan_launch.tracing.trace import TensorSpec, TracedModel


@dataclass(frozen=True, eq=False)
class RunLayer:
    """A layer, ready to run."""

    name: str
    segment: Subgraph
    state: tuple[Tensor, ...]
    trained: tuple[Tensor, ...]
    """Its parameters that take gradients."""
    receives: tuple[TensorSpec, ...]
    makes: tuple[TensorSpec, ...]
    writes_in_place: bool
    """Whether it may write to what it receives: then it gets a copy, which may be written."""


@dataclass(frozen=True)
class Kind:
    """What a gradient is but for its numbers."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    device: torch.device

    @staticmethod
    def of(tensor: Tensor) -> Kind:
        return Kind(tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.device)

    def make(self) -> Tensor:
        """A tensor of this kind, just written; its numbers are small, and none is subnormal."""
        extent = 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        memory = torch.full((max(0, extent),), 1e-3, dtype=self.dtype, device=self.device)
        return memory.as_strided(self.shape, self.stride)


class Watcher(Protocol):
    """Told of a pass."""

    def forward(self, layer: RunLayer, received: Sequence[Tensor], data: Sequence[Tensor], made: Sequence[Any]) -> None:
        """A layer made this of what it was given."""

    def backward(self, layer: RunLayer, gradients: Sequence[Sequence[Tensor | None]]) -> None:
        """The gradients of what a layer made: for each tensor, from each consumer."""


def prepare(traced: TracedModel, name: str, device: torch.device) -> RunLayer:
    """The layer of this name, on a device."""
    receives = tuple(spec for spec in traced.tensors if name in spec.consumers)
    makes = tuple(spec for spec in traced.tensors if spec.producer == name)
    segment = cut_subgraph(
        traced, [name], [spec.name for spec in receives], [spec.name for spec in makes], device=device
    )
    parameters, buffers = dict(traced.model.named_parameters()), dict(traced.model.named_buffers())
    state = tuple(
        parameters[one] if one in parameters else buffers[one] if one in buffers else _constant(traced, one, device)
        for one in segment.state
    )
    grouped = any(name in group for group in traced.together)
    trained = tuple(one for one in state if one.requires_grad)
    return RunLayer(name, segment, state, trained, receives, makes, grouped)


def _constant(traced: TracedModel, name: str, device: torch.device) -> Tensor:
    tensor: Tensor = attribute_at(traced.graph_module, name)
    return tensor.to(device)
