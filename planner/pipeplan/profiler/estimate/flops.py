"""Run a traced model on tensors without data, forwards and backwards, and count what every layer does and keeps."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only, tree_unflatten

from pipeplan.profiler.estimate.fused_ops import AsOnGPU
from pipeplan.profiler.estimate.operators import works_of
from pipeplan.profiler.estimate.work import Work, size_of
from pipeplan.profiler.memory import SavedBytes
from pipeplan_launch.job.autocast import autocast
from pipeplan_launch.job.job import Batch
from pipeplan_launch.tracing.aliasing import attribute_at
from pipeplan_launch.tracing.layers import LOSS_LAYER
from pipeplan_launch.tracing.opaque_calls import OpaqueCall
from pipeplan_launch.tracing.split import output_spec
from pipeplan_launch.tracing.trace import TracedModel

CPU = torch.device("cpu")
_LAYER = "pipeplan_layer"


@dataclass
class Counts:
    """What the layers of a model do for one minibatch, by layer."""

    forward: dict[str, list[Work]] = field(default_factory=lambda: defaultdict(list))
    backward: dict[str, list[Work]] = field(default_factory=lambda: defaultdict(list))
    saved_bytes: dict[str, int] = field(default_factory=dict)
    tensor_bytes: dict[str, int] = field(default_factory=dict)
    """Of each of the traced model's tensors."""
    unseen: list[str] = field(default_factory=list)
    """Layers that the trace does not look into: of these only the bytes around them are known."""


def count(traced: TracedModel, batch: Batch, loss: Callable[[Any, Any], Tensor]) -> Counts:
    """Count one pass over a minibatch."""
    return _Pass(traced, batch, loss).run()


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the work of every operator: of the layer that runs forwards, or whose gradients are computed."""

    def __init__(self, counts: Counts) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts = counts
        self.layer = ""
        self.backwards = False
        self._waiting: list[Work] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.note(works_of(func, args, kwargs or {}, out))
        return out

    def note(self, works: list[Work]) -> None:
        """Charge some work to whoever does it."""
        node: Any = torch._C._current_autograd_node()
        if not self.backwards:
            self.counts.forward[self.layer] += works
        elif node is None:
            # Gradients are added up between two functions: for the one that comes next, which made the tensor.
            self._waiting += works
        else:
            self.counts.backward[node.metadata.get(_LAYER, self.layer)] += self._waiting + works
            self._waiting = []


class _Pass:
    def __init__(self, traced: TracedModel, batch: Batch, loss: Callable[[Any, Any], Tensor]) -> None:
        self.traced, self.batch, self.loss = traced, batch, loss
        self.graph = traced.graph_module.graph
        self.values: dict[fx.Node, Any] = {}
        self.state: dict[int, Tensor] = {}
        self.counts = Counts()
        self.reader = _readers(traced)

    def run(self) -> Counts:
        watch = _Watch(self.counts)
        with FakeTensorMode(allow_non_fake_inputs=True), torch.enable_grad():
            self._place()
            saved = SavedBytes([one for one in self.values.values() if isinstance(one, Tensor)])
            with watch, AsOnGPU(watch.note), autocast(self.traced.autocast, CPU):
                for node in self.graph.nodes:
                    if node.op == "call_function":
                        self._call(node, watch, saved)
                watch.layer = LOSS_LAYER
                with saved.watch(LOSS_LAYER):
                    loss = self._loss()
                _mark(loss, LOSS_LAYER)
            watch.backwards = True
            with watch:
                loss.backward()  # type: ignore[no-untyped-call]
        self.counts.saved_bytes = dict(saved.by_layer)
        for spec in self.traced.tensors:
            self.counts.tensor_bytes[spec.name] = self.values[self.traced.node_of[spec.name]].nbytes
        return self.counts

    def _place(self) -> None:
        """Inputs and state, without their data."""
        given = iter(self.batch.inputs)
        for node in self.graph.nodes:
            if node.op == "placeholder":
                self.values[node] = _without_data(next(given))
            elif node.op == "get_attr":
                found = attribute_at(self.traced.graph_module, node.target)
                if isinstance(found, Tensor):
                    # Tied parameters are one object, and stay so.
                    found = self.state.setdefault(id(found), _without_data(found))
                self.values[node] = _on_cpu(found) if isinstance(found, fx.GraphModule) else found

    def _call(self, node: fx.Node, watch: _Watch, saved: SavedBytes) -> None:
        watch.layer = self.reader.get(node, LOSS_LAYER)
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self.values.__getitem__)
        args, kwargs = fx.node.map_aggregate((args, kwargs), _as_cpu)
        assert callable(node.target)
        with saved.watch(watch.layer):
            self.values[node] = node.target(*args, **kwargs)
        _mark(self.values[node], watch.layer)
        if isinstance(node.target, OpaqueCall):
            moved = size_of(args, kwargs, self.values[node])
            self.counts.unseen.append(watch.layer)
            self.counts.forward[watch.layer].append(Work("elementwise", "float32", bytes=moved))
            self.counts.backward[watch.layer].append(Work("elementwise", "float32", bytes=2 * moved))

    def _loss(self) -> Tensor:
        leaves = torch.utils._pytree.tree_leaves(self.graph.output_node().args[0])
        made = [self.values[leaf] if isinstance(leaf, fx.Node) else leaf for leaf in leaves]
        target = tree_map_only(Tensor, _without_data, self.batch.target)
        return self.loss(tree_unflatten(made, output_spec(self.traced)), target)


def _as_cpu(argument: Any) -> Any:
    return CPU if isinstance(argument, torch.device) else argument


def _on_cpu(region: fx.GraphModule) -> fx.GraphModule:
    """A graph inside the graph, without the devices that tracing burnt in."""
    changed = copy.deepcopy(region)
    for module in changed.modules():
        if isinstance(module, fx.GraphModule):
            for node in module.graph.nodes:
                node.args = fx.node.map_aggregate(node.args, _as_cpu)
                node.kwargs = fx.node.map_aggregate(node.kwargs, _as_cpu)
            module.recompile()
    return changed


def _without_data(tensor: Tensor) -> Tensor:
    """A fake tensor of the CPU in its place, for which autocast works as it does for real ones."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=CPU)
    return made.requires_grad_(tensor.requires_grad)


def _readers(traced: TracedModel) -> dict[fx.Node, str]:
    """The layer of every node; what each reader computes anew (masks, positions) is the first reader's."""
    found = dict(traced.layer_of)
    for node in reversed(traced.graph_module.graph.nodes):
        if node not in found:
            users = [found[user] for user in node.users if user in found]
            if users:
                found[node] = users[0]
    return found


def _mark(value: Any, layer: str) -> None:
    """Charge the autograd functions behind a value that no earlier layer made."""
    waiting: list[Any] = [one.grad_fn for one in _tensors(value) if one.grad_fn is not None]
    while waiting:
        function = waiting.pop()
        if _LAYER not in function.metadata:
            function.metadata[_LAYER] = layer
            waiting += [one for one, _ in function.next_functions if one is not None]


def _tensors(value: Any) -> Iterable[Tensor]:
    return [one for one in torch.utils._pytree.tree_leaves(value) if isinstance(one, Tensor)]
