"""Run a traced model layer by layer, each layer a function of its own, forwards and then backwards.

The layers run in place, in one pass over the model: memory and caches are as in training. Between layers the
tensors are detached, so that the backward pass of each layer can be run by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_unflatten

from pipeplan_launch.aliasing import attribute
from pipeplan_launch.job import Batch
from pipeplan_launch.layers import LOSS
from pipeplan_launch.segment import Segment, cut
from pipeplan_launch.split import output_spec
from pipeplan_launch.trace import TensorSpec, TracedModel

Measure = Callable[[Callable[[], None]], Callable[[], float]]
Loss = Callable[[Any, Any], Tensor]


@dataclass(frozen=True, eq=False)
class _Layer:
    name: str
    segment: Segment
    state: tuple[Tensor, ...]
    trained: tuple[Tensor, ...]
    """Its parameters that take gradients."""
    receives: tuple[TensorSpec, ...]
    makes: tuple[TensorSpec, ...]
    writes_in_place: bool
    """Whether it may write to what it receives: then it gets a copy, which may be written."""


class LayerRun:
    """A traced model on a device with one minibatch, ready to be run layer by layer, again and again."""

    def __init__(self, traced: TracedModel, batch: Batch, loss: Loss, minibatch: int, device: torch.device) -> None:
        self.traced, self.batch, self.loss, self.minibatch = traced, batch, loss, minibatch
        self._output_spec = output_spec(traced)
        self.layers = tuple(_prepare(traced, info.name, device) for info in traced.layers)
        self._leaves: dict[str, dict[str, Tensor]] = {}
        self._made: dict[str, Tensor] = {}
        self._gradients: dict[str, dict[str, Tensor | None]] = {}
        self._of_parameters: list[Tensor | None] = []

    def forward(
        self, measure: Measure, around: Callable[[str], AbstractContextManager[Any]] = nullcontext
    ) -> dict[str, Callable[[], float]]:
        """Run all layers forwards; the times by layer. `around` gives a context to run each layer in, by its name."""
        times = {}
        for layer in self.layers:
            received = self._receive(layer)
            data = [self.batch.inputs[index] for index in layer.segment.inputs]
            results: list[Any] = []

            def call(layer: _Layer = layer, received: list[Tensor] = received, data: list[Tensor] = data) -> None:
                made = layer.segment.run(*layer.state, *received, *data, self.minibatch)
                results.extend(made)  # noqa: B023
                if layer.name == LOSS:
                    results[:] = [self.loss(tree_unflatten(list(made), self._output_spec), self.batch.target)]  # noqa: B023

            with around(layer.name):
                times[layer.name] = measure(call)
            if layer.name == LOSS:
                self._made[LOSS] = results[0]
            else:
                self._made.update({spec.name: one for spec, one in zip(layer.makes, results, strict=True)})
        return times

    def made(self, name: str) -> Iterable[tuple[str, Tensor]]:
        """The tensors that a layer made in the last forward pass, by name; the loss for the layer `loss`."""
        if name == LOSS:
            return [(LOSS, self._made[LOSS])]
        return [
            (spec.name, self._made[spec.name]) for layer in self.layers for spec in layer.makes if layer.name == name
        ]

    def backward(self, measure: Measure) -> dict[str, Callable[[], float]]:
        """Run all layers backwards, after `forward`; the times by layer. What forward kept is let go on the way."""
        times = {}
        for layer in reversed(self.layers):
            leaves = {name: leaf for name, leaf in self._leaves[layer.name].items() if leaf.requires_grad}
            targets = [*leaves.values(), *layer.trained]

            def call(
                layer: _Layer = layer, leaves: dict[str, Tensor] = leaves, targets: list[Tensor] = targets
            ) -> None:
                gradients = self._differentiate(layer, targets)
                self._gradients[layer.name] = dict(zip(leaves, gradients, strict=False))
                # Held to the end of the pass, as in training: freeing them here would give later layers warm memory.
                self._of_parameters += gradients[len(leaves) :]

            times[layer.name] = measure(call)
            del self._leaves[layer.name]
            for spec in layer.makes:
                del self._made[spec.name]
                for consumer in spec.consumers:
                    self._gradients[consumer].pop(spec.name, None)
        self._made.clear()
        self._gradients.clear()
        self._of_parameters.clear()
        return times

    def _differentiate(self, layer: _Layer, targets: list[Tensor]) -> Sequence[Tensor | None]:
        if not targets:
            return ()
        if layer.name == LOSS:
            return torch.autograd.grad(self._made[LOSS], targets, allow_unused=True)
        pairs = [(self._made[spec.name], self._gradient(spec)) for spec in layer.makes if spec.requires_grad]
        given = [(tensor, gradient) for tensor, gradient in pairs if gradient is not None]
        if not given:
            return ()
        # Not `backward`: it would copy a gradient that the layer passes on unchanged, as `add` does, into the leaf.
        return torch.autograd.grad([one for one, _ in given], targets, [one for _, one in given], allow_unused=True)

    def _receive(self, layer: _Layer) -> list[Tensor]:
        leaves, received = {}, []
        for spec in layer.receives:
            leaf = self._made[spec.name].detach().requires_grad_(spec.requires_grad)
            leaves[spec.name] = leaf
            received.append(leaf.clone() if layer.writes_in_place else leaf)
        self._leaves[layer.name] = leaves
        return received

    def _gradient(self, spec: TensorSpec) -> Tensor | None:
        """The sum of what the consumers sent back, the last one first, as autograd adds them up."""
        total: Tensor | None = None
        for consumer in reversed(spec.consumers):
            gradient = self._gradients[consumer].get(spec.name)
            if gradient is not None:
                total = gradient if total is None else total + gradient
        return total


def _prepare(traced: TracedModel, name: str, device: torch.device) -> _Layer:
    receives = tuple(spec for spec in traced.tensors if name in spec.consumers)
    makes = tuple(spec for spec in traced.tensors if spec.producer == name)
    segment = cut(traced, [name], [spec.name for spec in receives], [spec.name for spec in makes], device=device)
    parameters, buffers = dict(traced.model.named_parameters()), dict(traced.model.named_buffers())
    state = tuple(
        parameters[one] if one in parameters else buffers[one] if one in buffers else _constant(traced, one, device)
        for one in segment.state
    )
    grouped = any(name in group for group in traced.together)
    trained = tuple(one for one in state if one.requires_grad)
    return _Layer(name, segment, state, trained, receives, makes, grouped)


def _constant(traced: TracedModel, name: str, device: torch.device) -> Tensor:
    tensor: Tensor = attribute(traced.graph_module, name)
    return tensor.to(device)
