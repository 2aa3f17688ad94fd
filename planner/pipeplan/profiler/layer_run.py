"""Run a traced model layer by layer, each layer a function of its own, forwards and then backwards.

The layers run in place, in one pass over the model: memory and caches are as in training. Between layers the
tensors are detached, so that the backward pass of each layer can be run by itself.

Layers that others stand for (`LayerRun.alike`) are left out: whoever reads what they make gets what the layer in their
place made, and a gradient that would come from them is one of the same type, shape and strides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_unflatten

from pipeplan.profiler.layer_inputs import Kind, RunLayer, Watcher, prepare
from pipeplan_launch.job.autocast import autocast
from pipeplan_launch.job.job import Batch
from pipeplan_launch.tracing.layers import LOSS_LAYER
from pipeplan_launch.tracing.split import output_spec
from pipeplan_launch.tracing.trace import TensorSpec, TracedModel

Measure = Callable[[Callable[[], None]], Callable[[], float]]
Loss = Callable[[Any, Any], Tensor]
Look = Callable[[str, Sequence[Tensor]], None]


class _Arrive(torch.autograd.Function):
    """A tensor that starts a graph of its own, and is not a leaf: a leaf would stay in memory until the backward pass,
    where the model lets go of what no operator saved."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensor: Tensor, writable: bool) -> Tensor:
        return tensor.clone() if writable else tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise AssertionError("the gradient is taken before it gets here")


class LayerRun:
    """A traced model on a device with one minibatch, ready to be run layer by layer, again and again."""

    def __init__(self, traced: TracedModel, batch: Batch, loss: Loss, minibatch: int, device: torch.device) -> None:
        self.traced, self.batch, self.loss, self.minibatch = traced, batch, loss, minibatch
        self.device = device
        self._output_spec = output_spec(traced)
        self.layers = tuple(prepare(traced, info.name, device) for info in traced.layers)
        self._anchor = torch.zeros((), device=device, requires_grad=True)
        # By tensor, until its last reader has run; then only where its gradient goes in is kept.
        self._values: dict[str, Tensor] = {}
        self._made: dict[str, GradientEdge] = {}
        # By layer and tensor: where the gradient comes out, and the gradient.
        self._arrived: dict[str, dict[str, GradientEdge]] = {}
        self._gradients: dict[str, dict[str, Tensor | None]] = {}
        self._of_parameters: list[Tensor | None] = []
        self._loss: Tensor | None = None
        self.watcher: Watcher | None = None
        """Told of every layer that runs, if there is one."""
        self._came: dict[tuple[str, str], Kind | None] = {}
        self._alike: dict[str, str] = {}
        self._last_of: dict[str, str] = {}
        self._lent: dict[str, list[Tensor]] = {}

    @property
    def alike(self) -> dict[str, str]:
        """For each layer that is not run the earlier one that stands for it. Set after one full pass."""
        return self._alike

    @alike.setter
    def alike(self, alike: dict[str, str]) -> None:
        self._alike = alike
        self._last_of = {source: name for name, source in alike.items()}

    @property
    def weights(self) -> dict[str, int]:
        """How many layers a layer stands for, where others are left out for it."""
        found: dict[str, int] = {}
        for source in self._alike.values():
            found[source] = found.get(source, 1) + 1
        return found

    def forward(
        self,
        measure: Measure,
        around: Callable[[str], AbstractContextManager[Any]] = nullcontext,
        look: Look = lambda layer, made: None,
    ) -> dict[str, Callable[[], float]]:
        """Run the layers forwards, but for those that others stand for; the times by layer.

        `around` gives a context to run each layer in, by its name; `look` is shown what each one made: tensors, and
        in the end the loss.
        """
        times = {}
        for layer in self.layers:
            if layer.name in self._alike:
                self._borrow(layer)
                continue
            results: list[Any] = []
            times[layer.name] = self._forward_one(layer, results, measure, around)
            look(layer.name, results)
            if layer.name == LOSS_LAYER:
                self._loss = results[0]
                continue
            for spec, made in zip(layer.makes, results, strict=True):
                self._values[spec.name] = made
                if spec.requires_grad:
                    self._made[spec.name] = get_gradient_edge(made)
            if layer.name in self._last_of:
                self._lent[layer.name] = [made.detach() for made in results]
        return times

    def _borrow(self, layer: RunLayer) -> None:
        """What the layer would make is what the one in its place made."""
        source = self._alike[layer.name]
        for spec, made in zip(layer.makes, self._lent[source], strict=True):
            self._values[spec.name] = made
        self._let_go(layer)
        if self._last_of[source] == layer.name:
            del self._lent[source]

    def _let_go(self, layer: RunLayer) -> None:
        """Forget the tensors that nobody reads after this layer."""
        for spec in layer.receives:
            if spec.consumers[-1] == layer.name:
                del self._values[spec.name]

    def _forward_one(
        self,
        layer: RunLayer,
        results: list[Any],
        measure: Measure,
        around: Callable[[str], AbstractContextManager[Any]],
    ) -> Callable[[], float]:
        received = self._receive(layer)
        data = [self.batch.inputs[index] for index in layer.segment.inputs]

        def call() -> None:
            made = layer.segment.run(*layer.state, *received, *data, self.minibatch)
            if layer.name == LOSS_LAYER:
                results.append(self.loss(tree_unflatten(list(made), self._output_spec), self.batch.target))
            else:
                results.extend(made)

        with around(layer.name), self.precision():
            taken = measure(call)
        if self.watcher is not None:
            self.watcher.forward(layer, received, data, results)
        return taken

    def precision(self) -> AbstractContextManager[object]:
        """The autocast that the model runs forwards under."""
        return autocast(self.traced.autocast, self.device)

    def backward(self, measure: Measure) -> dict[str, Callable[[], float]]:
        """Run the layers backwards, after `forward`; the times by layer. What forward kept is let go on the way."""
        times = {}
        for layer in reversed(self.layers):
            if layer.name in self._alike:
                continue
            self._bring(layer)
            times[layer.name] = self._backward_one(layer, measure)
            self._forget(layer)
        self._loss = None
        self._gradients.clear()
        self._of_parameters.clear()
        return times

    def _forget(self, layer: RunLayer) -> None:
        """What nobody needs once the layer has run backwards."""
        del self._arrived[layer.name]
        for spec in layer.makes:
            self._made.pop(spec.name, None)
            for consumer in spec.consumers:
                self._gradients[consumer].pop(spec.name, None)

    def alone_forward(self, layer: RunLayer, given: Sequence[Tensor], measure: Measure) -> Callable[[], float]:
        """Run a layer that is not the model's, the way that its layers are run."""
        results: list[Any] = []
        self._values |= {spec.name: one for spec, one in zip(layer.receives, given, strict=True)}
        taken = self._forward_one(layer, results, measure, nullcontext)
        self._made |= {spec.name: get_gradient_edge(one) for spec, one in zip(layer.makes, results, strict=True)}
        return taken

    def alone_backward(self, layer: RunLayer, gradients: Sequence[Tensor], measure: Measure) -> Callable[[], float]:
        """Run it backwards, after `alone_forward`."""
        for spec, gradient in zip(layer.makes, gradients, strict=True):
            self._gradients.setdefault(spec.consumers[0], {})[spec.name] = gradient
        taken = self._backward_one(layer, measure)
        self._forget(layer)
        return taken

    def _bring(self, layer: RunLayer) -> None:
        """The gradients that consumers which are left out would send: made now, as theirs would be."""
        for spec in layer.makes:
            for consumer in spec.consumers:
                if consumer in self._alike:
                    kind = self._came[consumer, spec.name]
                    self._gradients.setdefault(consumer, {})[spec.name] = None if kind is None else kind.make()
        if self.watcher is not None:
            came = [[self._gradients[one].get(spec.name) for one in spec.consumers] for spec in layer.makes]
            self.watcher.backward(layer, came)
            for spec, gradients in zip(layer.makes, came, strict=True):
                for consumer, gradient in zip(spec.consumers, gradients, strict=True):
                    self._came[consumer, spec.name] = None if gradient is None else Kind.of(gradient)

    def _backward_one(self, layer: RunLayer, measure: Measure) -> Callable[[], float]:
        edges = self._arrived[layer.name]
        targets: list[Any] = [*edges.values(), *layer.trained]

        def call() -> None:
            gradients = self._differentiate(layer, targets)
            self._gradients[layer.name] = dict(zip(edges, gradients, strict=False))
            # Held to the end of the pass, as in training: freeing them here would give later layers warm memory.
            self._of_parameters += gradients[len(edges) :]

        return measure(call)

    def _differentiate(self, layer: RunLayer, targets: list[Any]) -> Sequence[Tensor | None]:
        if not targets:
            return ()
        if layer.name == LOSS_LAYER:
            assert self._loss is not None
            return torch.autograd.grad(self._loss, targets, allow_unused=True)
        pairs = [(self._made[spec.name], self._gradient(spec)) for spec in layer.makes if spec.requires_grad]
        given = [(edge, gradient) for edge, gradient in pairs if gradient is not None]
        if not given:
            return ()
        # Not `backward`: it would copy a gradient that the layer passes on unchanged, as `add` does.
        return torch.autograd.grad([one for one, _ in given], targets, [one for _, one in given], allow_unused=True)

    def _receive(self, layer: RunLayer) -> list[Tensor]:
        edges, received = {}, []
        for spec in layer.receives:
            tensor = self._values[spec.name].detach()
            if spec.requires_grad:
                tensor = _Arrive.apply(self._anchor, tensor, layer.writes_in_place)  # type: ignore[no-untyped-call]
                edges[spec.name] = get_gradient_edge(tensor)
            else:
                tensor = tensor.clone() if layer.writes_in_place else tensor
            received.append(tensor)
        self._let_go(layer)
        self._arrived[layer.name] = edges
        return received

    def _gradient(self, spec: TensorSpec) -> Tensor | None:
        """The sum of what the consumers sent back, the last one first, as autograd adds them up."""
        total: Tensor | None = None
        for consumer in reversed(spec.consumers):
            gradient = self._gradients[consumer].get(spec.name)
            if gradient is not None:
                total = gradient if total is None else total + gradient
        return total
