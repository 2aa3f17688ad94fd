"""Layers of a traced model as functions with their state, and the protocol of observers of a pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

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


class PassObserver(Protocol):
    """Observes a pass over the layers."""

    def forward(
        self, layer: PreparedLayer, received: Sequence[Tensor], data: Sequence[Tensor], made: Sequence[Any]
    ) -> None:
        """A layer has run forwards: `made` are its outputs."""

    def backward(self, layer: PreparedLayer, gradients: Sequence[Sequence[Tensor | None]]) -> None:
        """A layer is about to run backwards: the gradients of each of its outputs, one or None from each consumer."""


def prepare_layer(traced: TracedModel, name: str, device: torch.device, copies: SharedCopies) -> PreparedLayer:
    """Cut the layer of this name out of the model, and put its constants on the device.

    What a stage computes once for several layers, the first of them computes and the others receive.
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
        parameters[key] if key in parameters else buffers[key] if key in buffers else _constant(traced, key, device)
        for key in segment.state
    )


def _constant(traced: TracedModel, name: str, device: torch.device) -> Tensor:
    tensor: Tensor = attribute_at(traced.graph_module, name)
    return tensor.to(device)
