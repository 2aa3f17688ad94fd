"""Run a traced model on tensors without data, forward and backward, and count each layer's work and bytes.

`sample_work` sums the FLOPs up for one sample, and reads from the job how many tokens a sample and how many samples an
epoch has.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only, tree_unflatten

from pipeplan.profile_data.layers import SampleFlops, SampleWork
from pipeplan.profiler.estimate.fused_ops import FusedOperators
from pipeplan.profiler.estimate.operators import WITHOUT_DATA, works_of
from pipeplan.profiler.estimate.work import Work, bytes_of, tensors_in
from pipeplan.profiler.memory import SavedBytes
from pipeplan.profiler.passes import training_loss
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.job.job import Batch, Job
from pipeplan_launch.job.loss import checked_loss, constant_loss_message, loss_text
from pipeplan_launch.job.pass_conditions import autocast
from pipeplan_launch.job.user_code import user_code_errors
from pipeplan_launch.tracing.export import quiet
from pipeplan_launch.tracing.layers import LOSS_LAYER
from pipeplan_launch.tracing.opaque_calls import OpaqueCall
from pipeplan_launch.tracing.regions import attribute_at
from pipeplan_launch.tracing.split import output_spec
from pipeplan_launch.tracing.trace import TracedModel

CPU = torch.device("cpu")
OPAQUE = "opaque"
"""Name for the operators of a layer that is not traced inside: only its inputs and outputs are known."""
_LAYER = "pipeplan_layer"


@dataclass
class WorkCounts:
    """Work of a model's layers for one minibatch, and the bytes that they save for backward, by layer."""

    forward: dict[str, list[Work]] = field(default_factory=lambda: defaultdict(list))
    backward: dict[str, list[Work]] = field(default_factory=lambda: defaultdict(list))
    saved_bytes: dict[str, int] = field(default_factory=dict)
    tensor_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes of each of the traced model's tensors, by name."""
    uncounted: dict[str, str] = field(default_factory=dict)
    """The uncounted part of each layer: an operator whose work is not known, or `OPAQUE`."""


def count_work(traced: TracedModel, batch: Batch, loss: Callable[[Any, Any], Tensor]) -> WorkCounts:
    """Count the work of one forward and backward pass over a minibatch."""
    return _Pass(traced, batch, loss).run()


class _WorkCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds the work of every operator to the layer that runs forward, or whose gradients are computed."""

    def __init__(self, counts: WorkCounts) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts = counts
        self.layer = ""
        self.backwards = False
        self._waiting: list[Work] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        run = WITHOUT_DATA.get(func, func)
        out = run(*args, **(kwargs or {}))
        works, counted = works_of(func, args, kwargs or {}, out)
        if not counted:
            self.counts.uncounted.setdefault(self._charged(), func.name().removeprefix("aten::"))
        self.note(works)
        return out

    def note(self, works: list[Work]) -> None:
        """Add work to the layer that runs it."""
        node: Any = torch._C._current_autograd_node()
        if not self.backwards:
            self.counts.forward[self.layer] += works
        elif node is None:
            # Autograd sums gradients before it runs the function that made the tensor. That function gets the work.
            self._waiting += works
        else:
            self.counts.backward[self._charged()] += self._waiting + works
            self._waiting = []

    def _charged(self) -> str:
        """The layer that runs forward, or whose gradients are computed."""
        node: Any = torch._C._current_autograd_node() if self.backwards else None
        return self.layer if node is None else str(node.metadata.get(_LAYER, self.layer))


class _Pass:
    """One forward and backward pass over a traced model on fake tensors."""

    def __init__(self, traced: TracedModel, batch: Batch, loss: Callable[[Any, Any], Tensor]) -> None:
        self.traced, self.batch, self.loss = traced, batch, loss
        self.graph = traced.graph_module.graph
        self.values: dict[fx.Node, Any] = {}
        self.state: dict[int, Tensor] = {}
        self.counts = WorkCounts()
        self.layer_of = _layer_of_nodes(traced)

    def run(self) -> WorkCounts:
        counter = _WorkCounter(self.counts)
        with FakeTensorMode(allow_non_fake_inputs=True), torch.enable_grad():
            self._set_inputs()
            saved = SavedBytes([value for value in self.values.values() if isinstance(value, Tensor)])
            with counter, FusedOperators(counter.note), autocast(self.traced.autocast, CPU):
                for node in self.graph.nodes:
                    if node.op == "call_function":
                        self._call(node, counter, saved)
                counter.layer = LOSS_LAYER
                with saved.watch(LOSS_LAYER):
                    loss = self._loss()
                _mark(loss, LOSS_LAYER)
            counter.backwards = True
            with counter:
                loss.backward()  # type: ignore[no-untyped-call]
        self.counts.saved_bytes = dict(saved.by_layer)
        for spec in self.traced.tensors:
            self.counts.tensor_bytes[spec.name] = self.values[self.traced.node_of[spec.name]].nbytes
        return self.counts

    def _set_inputs(self) -> None:
        """Set the values of inputs and state to tensors without data."""
        inputs = iter(self.batch.inputs)
        for node in self.graph.nodes:
            if node.op == "placeholder":
                self.values[node] = _without_data(next(inputs))
            elif node.op == "get_attr":
                value = attribute_at(self.traced.graph_module, node.target)
                if isinstance(value, Tensor):
                    # Tied parameters are one object, and must remain one.
                    value = self.state.setdefault(id(value), _without_data(value))
                self.values[node] = _on_cpu(value) if isinstance(value, fx.GraphModule) else value

    def _call(self, node: fx.Node, counter: _WorkCounter, saved: SavedBytes) -> None:
        counter.layer = self.layer_of.get(node, LOSS_LAYER)
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self.values.__getitem__)
        args, kwargs = fx.node.map_aggregate((args, kwargs), _as_cpu)
        assert callable(node.target)
        with saved.watch(counter.layer):
            self.values[node] = node.target(*args, **kwargs)
        _mark(self.values[node], counter.layer)
        if isinstance(node.target, OpaqueCall):
            moved = bytes_of(args, kwargs, self.values[node])
            self.counts.uncounted[counter.layer] = OPAQUE
            self.counts.forward[counter.layer].append(Work("elementwise", "float32", bytes=moved))
            self.counts.backward[counter.layer].append(Work("elementwise", "float32", bytes=2 * moved))

    def _loss(self) -> Tensor:
        leaves = tree_leaves(self.graph.output_node().args[0])
        outputs = [self.values[leaf] if isinstance(leaf, fx.Node) else leaf for leaf in leaves]
        target = tree_map_only(Tensor, _without_data, self.batch.target)
        output, state = tree_unflatten(outputs, output_spec(self.traced)), self.traced.loss_state
        with user_code_errors(loss_text(self.loss)):
            if state is None or target is None:  # without a target, the job's own loss cannot be computed
                value = self.loss(output, target)
            else:
                tensors = {**state.parameters(), **state.buffers()}
                value = state.call({name: _without_data(one) for name, one in tensors.items()}, output, target)
        loss = checked_loss(self.loss, value)
        if not loss.requires_grad:
            raise LaunchError(constant_loss_message(self.loss))
        return loss


def _as_cpu(argument: Any) -> Any:
    return CPU if isinstance(argument, torch.device) else argument


def _on_cpu(region: fx.GraphModule) -> fx.GraphModule:
    """A copy of a nested graph in which the devices that tracing recorded are replaced by the CPU."""
    changed = copy.deepcopy(region)
    for module in changed.modules():
        if isinstance(module, fx.GraphModule):
            for node in module.graph.nodes:
                node.args = fx.node.map_aggregate(node.args, _as_cpu)
                node.kwargs = fx.node.map_aggregate(node.kwargs, _as_cpu)
            module.recompile()
    return changed


def _without_data(tensor: Tensor) -> Tensor:
    """A fake tensor on the CPU with the same properties. Autocast treats it like a real tensor."""
    fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=CPU)
    return fake.requires_grad_(tensor.requires_grad)


def _layer_of_nodes(traced: TracedModel) -> dict[fx.Node, str]:
    """The layer of every node. If all readers compute a node (masks, positions), it counts for the first reader."""
    layers = dict(traced.layer_of)
    for node in reversed(traced.graph_module.graph.nodes):
        if node not in layers:
            users = [layers[user] for user in node.users if user in layers]
            if users:
                layers[node] = users[0]
    return layers


def _mark(value: Any, layer: str) -> None:
    """Label the autograd functions that made a value with the layer, unless an earlier layer made them."""
    waiting: list[Any] = [tensor.grad_fn for tensor in tensors_in(value) if tensor.grad_fn is not None]
    while waiting:
        function = waiting.pop()
        if _LAYER not in function.metadata:
            function.metadata[_LAYER] = layer
            waiting += [behind for behind, _ in function.next_functions if behind is not None]


def sample_work(job: Job, counts: WorkCounts | None, minibatch: int) -> SampleWork:
    """The work per sample, from the counts of a minibatch; without FLOPs if some work is not counted."""
    flops = () if counts is None or counts.uncounted else _flops_by_kind(counts, minibatch)
    return SampleWork(flops, job.tokens_per_sample, _epoch_samples(job))


def counted_work(job: Job, traced: TracedModel, minibatch: int) -> SampleWork:
    """The work per sample of a measured model. Its FLOPs are counted on tensors without data."""
    try:
        batch = job.example_batch(minibatch)
        with quiet():
            counts = count_work(traced, batch, training_loss(job, batch))
    except Exception:  # a model may run on real tensors only; its FLOPs are then unknown
        counts = None
    return sample_work(job, counts, minibatch)


def _flops_by_kind(counts: WorkCounts, minibatch: int) -> tuple[SampleFlops, ...]:
    sums: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for direction, by_layer in enumerate((counts.forward, counts.backward)):
        for works in by_layer.values():
            for work in works:
                if work.flops:
                    sums[work.kind, work.arithmetic][direction] += work.flops
    return tuple(
        SampleFlops(kind, arithmetic, forward / minibatch, backward / minibatch)
        for (kind, arithmetic), (forward, backward) in sorted(sums.items())
    )


def _epoch_samples(job: Job) -> int:
    """Training samples in an epoch; 0 if the job has no data, or if the data has no length."""
    if job.data is None:
        return 0
    try:
        train: Any = job.datasets.train
        return len(train) if job.datasets.order is None else len(job.datasets.order(0))
    except (LaunchError, TypeError):
        return 0
