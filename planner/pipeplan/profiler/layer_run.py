"""Run a traced model layer by layer, each layer as a separate function, forward and then backward.

The layers run in order, in one pass over the model, so that memory and caches are as in training. Between layers the
tensors are detached, so that the backward pass of each layer can be run separately.

Duplicate layers (`LayerRun.alike`) are left out. The consumers of such a layer read the outputs of the layer that it
duplicates, and the gradients that it would send back are replaced by tensors of the same type, shape and strides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_unflatten

from pipeplan.profiler.prepared_layers import DuplicateFinder, PreparedLayer, TensorKind, prepare_layer
from pipeplan_launch.job.job import Batch
from pipeplan_launch.job.pass_conditions import autocast
from pipeplan_launch.tracing.layers import LOSS_LAYER
from pipeplan_launch.tracing.shared_copies import shared_copies
from pipeplan_launch.tracing.split import output_spec
from pipeplan_launch.tracing.trace import TensorSpec, TracedModel

Measure = Callable[[Callable[[], None]], Callable[[], float]]
Loss = Callable[[Any, Any], Tensor]
OnOutputs = Callable[[str, Sequence[Tensor]], None]


class _NonLeafInput(torch.autograd.Function):
    """Makes a tensor that starts its own autograd graph, but is not a leaf.

    A leaf would stay in memory until the backward pass. In training, a tensor is freed if no operator saved it.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensor: Tensor, writable: bool) -> Tensor:
        return tensor.clone() if writable else tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise AssertionError("the gradient is taken before it reaches this function")


class LayerRun:
    """A traced model on a device with one minibatch, ready to be run layer by layer, any number of times."""

    def __init__(self, traced: TracedModel, batch: Batch, loss: Loss, minibatch: int, device: torch.device) -> None:
        self.traced, self.batch, self.loss, self.minibatch = traced, batch, loss, minibatch
        self.device = device
        self._output_spec = output_spec(traced)
        copies = shared_copies(traced)
        self.layers = tuple(prepare_layer(traced, info.name, device, copies) for info in traced.layers)
        self._anchor = torch.zeros((), device=device, requires_grad=True)
        # By tensor name, until the last consumer has run. After that only the gradient edge is kept.
        self._values: dict[str, Tensor] = {}
        self._output_edges: dict[str, GradientEdge] = {}
        # By layer and tensor name: the edge that yields the gradient, and the gradient.
        self._input_edges: dict[str, dict[str, GradientEdge]] = {}
        self._gradients: dict[str, dict[str, Tensor | None]] = {}
        self._parameter_gradients: list[Tensor | None] = []
        self._loss: Tensor | None = None
        self.watcher: DuplicateFinder | None = None
        """Observes every layer that runs; None for no observer."""
        self._gradient_kinds: dict[tuple[str, str], TensorKind | None] = {}
        self.alike: dict[str, str] = {}
        """For each layer that is not run: the earlier layer that it duplicates. Empty before the first full pass."""
        self._last_duplicate: dict[str, str] = {}
        self._shared_outputs: dict[str, list[Tensor]] = {}

    @property
    def weights(self) -> dict[str, int]:
        """Number of layers that each layer with duplicates represents, itself included."""
        return {source: count + 1 for source, count in Counter(self.alike.values()).items()}

    def forward(
        self,
        measure: Measure,
        around: Callable[[str], AbstractContextManager[Any]] = nullcontext,
        look: OnOutputs = lambda layer, output: None,
    ) -> dict[str, Callable[[], float]]:
        """Run all layers forward, except duplicates. Returns the times by layer.

        `around` maps a layer's name to a context in which the layer runs. `look` is called with the name and the
        outputs of each layer; the output of the last layer is the loss.
        """
        times = {}
        self._last_duplicate = {source: name for name, source in self.alike.items()}
        for layer in self.layers:
            if layer.name in self.alike:
                self._reuse_outputs(layer)
                continue
            results: list[Any] = []
            times[layer.name] = self._forward_one(layer, results, measure, around)
            look(layer.name, results)
            if layer.name == LOSS_LAYER:
                self._loss = results[0]
                continue
            for spec, output in zip(layer.makes, results, strict=True):
                self._values[spec.name] = output
                if spec.requires_grad:
                    self._output_edges[spec.name] = get_gradient_edge(output)
            if layer.name in self._last_duplicate:
                self._shared_outputs[layer.name] = [output.detach() for output in results]
        return times

    def _reuse_outputs(self, layer: PreparedLayer) -> None:
        """Use the outputs of the layer that this layer duplicates."""
        source = self.alike[layer.name]
        for spec, output in zip(layer.makes, self._shared_outputs[source], strict=True):
            self._values[spec.name] = output
        self._free_consumed(layer)
        if self._last_duplicate[source] == layer.name:
            del self._shared_outputs[source]

    def _free_consumed(self, layer: PreparedLayer) -> None:
        """Free the tensors whose last consumer is this layer."""
        for spec in layer.receives:
            if spec.consumers[-1] == layer.name:
                del self._values[spec.name]

    def _forward_one(
        self,
        layer: PreparedLayer,
        results: list[Any],
        measure: Measure,
        around: Callable[[str], AbstractContextManager[Any]],
    ) -> Callable[[], float]:
        received = self._inputs(layer)
        data = [self.batch.inputs[index] for index in layer.segment.inputs]

        def call() -> None:
            outputs = layer.segment.run(*layer.state, *received, *data, self.minibatch)
            if layer.name == LOSS_LAYER:
                results.append(self.loss(tree_unflatten(list(outputs), self._output_spec), self.batch.target))
            else:
                results.extend(outputs)

        with around(layer.name), self.precision():
            seconds = measure(call)
        if self.watcher is not None:
            self.watcher.forward(layer, received, data, results)
        return seconds

    def precision(self) -> AbstractContextManager[object]:
        """The autocast context of the model's forward pass."""
        return autocast(self.traced.autocast, self.device)

    def backward(self, measure: Measure) -> dict[str, Callable[[], float]]:
        """Run all layers backward after `forward`, and free the tensors that it kept. Returns the times by layer."""
        times = {}
        for layer in reversed(self.layers):
            if layer.name in self.alike:
                continue
            self._complete_gradients(layer)
            times[layer.name] = self._backward_one(layer, measure)
            self._drop_gradients(layer)
        self._loss = None
        self._gradients.clear()
        self._parameter_gradients.clear()
        return times

    def _drop_gradients(self, layer: PreparedLayer) -> None:
        """Drop the edges and gradients that are not needed after the layer has run backward."""
        del self._input_edges[layer.name]
        for spec in layer.makes:
            self._output_edges.pop(spec.name, None)
            for consumer in spec.consumers:
                self._gradients[consumer].pop(spec.name, None)

    def alone_forward(self, layer: PreparedLayer, tensors: Sequence[Tensor], measure: Measure) -> Callable[[], float]:
        """Run a layer that is not part of the model, in the same way as the model's layers."""
        results: list[Any] = []
        self._values |= {spec.name: tensor for spec, tensor in zip(layer.receives, tensors, strict=True)}
        seconds = self._forward_one(layer, results, measure, nullcontext)
        self._output_edges |= {
            spec.name: get_gradient_edge(output) for spec, output in zip(layer.makes, results, strict=True)
        }
        return seconds

    def alone_backward(
        self, layer: PreparedLayer, gradients: Sequence[Tensor], measure: Measure
    ) -> Callable[[], float]:
        """Run the layer backward, after `alone_forward`."""
        for spec, gradient in zip(layer.makes, gradients, strict=True):
            self._gradients.setdefault(spec.consumers[0], {})[spec.name] = gradient
        seconds = self._backward_one(layer, measure)
        self._drop_gradients(layer)
        return seconds

    def _complete_gradients(self, layer: PreparedLayer) -> None:
        """Make the gradients that duplicate consumers would send, and show all gradients to the observer."""
        for spec in layer.makes:
            for consumer in spec.consumers:
                if consumer in self.alike:
                    kind = self._gradient_kinds[consumer, spec.name]
                    self._gradients.setdefault(consumer, {})[spec.name] = None if kind is None else kind.make()
        if self.watcher is not None:
            gradients_by_tensor = [
                [self._gradients[reader].get(spec.name) for reader in spec.consumers] for spec in layer.makes
            ]
            self.watcher.backward(layer, gradients_by_tensor)
            for spec, gradients in zip(layer.makes, gradients_by_tensor, strict=True):
                for consumer, gradient in zip(spec.consumers, gradients, strict=True):
                    self._gradient_kinds[consumer, spec.name] = None if gradient is None else TensorKind.of(gradient)

    def _backward_one(self, layer: PreparedLayer, measure: Measure) -> Callable[[], float]:
        edges = self._input_edges[layer.name]
        targets: list[Any] = [*edges.values(), *layer.trained]

        def call() -> None:
            gradients = self._differentiate(layer, targets)
            self._gradients[layer.name] = dict(zip(edges, gradients, strict=False))
            # Kept until the end of the pass, as in training: freeing them here would give later layers warm memory.
            self._parameter_gradients += gradients[len(edges) :]

        return measure(call)

    def _differentiate(self, layer: PreparedLayer, targets: list[Any]) -> Sequence[Tensor | None]:
        if not targets:
            return ()
        if layer.name == LOSS_LAYER:
            assert self._loss is not None
            return torch.autograd.grad(self._loss, targets, allow_unused=True)
        pairs = [(self._output_edges[spec.name], self._gradient(spec)) for spec in layer.makes if spec.requires_grad]
        known = [(edge, gradient) for edge, gradient in pairs if gradient is not None]
        if not known:
            return ()
        # Not `backward`, which would copy a gradient that the layer passes on unchanged, as `add` does.
        edges, gradients = [edge for edge, _ in known], [gradient for _, gradient in known]
        return torch.autograd.grad(edges, targets, gradients, allow_unused=True)

    def _inputs(self, layer: PreparedLayer) -> list[Tensor]:
        edges, received = {}, []
        for spec in layer.receives:
            tensor = self._values[spec.name].detach()
            if spec.requires_grad:
                tensor = _NonLeafInput.apply(self._anchor, tensor, layer.writes_in_place)  # type: ignore[no-untyped-call]
                edges[spec.name] = get_gradient_edge(tensor)
            else:
                tensor = tensor.clone() if layer.writes_in_place else tensor
            received.append(tensor)
        self._free_consumed(layer)
        self._input_edges[layer.name] = edges
        return received

    def _gradient(self, spec: TensorSpec) -> Tensor | None:
        """Sum of the gradients from the consumers, the last consumer first, which is autograd's order."""
        total: Tensor | None = None
        for consumer in reversed(spec.consumers):
            gradient = self._gradients[consumer].get(spec.name)
            if gradient is not None:
                total = gradient if total is None else total + gradient
        return total
