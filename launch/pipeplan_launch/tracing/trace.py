"""Trace an unmodified model into a DAG of layers."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import itemgetter
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx, nn

from pipeplan_launch.errors import LaunchError
from pipeplan_launch.job.hooks import refuse_accumulation_hooks, refuse_module_hooks
from pipeplan_launch.job.job import PADDING_REMEDY, Job
from pipeplan_launch.job.loss import LossState, loss_state
from pipeplan_launch.job.pass_conditions import autocast, module_mode
from pipeplan_launch.tracing import aliasing, layers
from pipeplan_launch.tracing.attribute_reads import protect_saved_values
from pipeplan_launch.tracing.duplicated_constants import is_size
from pipeplan_launch.tracing.export_fallback import export_with_fallback
from pipeplan_launch.tracing.layers import LayerInfo
from pipeplan_launch.tracing.opaque_modules import shape_text
from pipeplan_launch.tracing.regions import attribute_at, inner_keys, operator_key, write_unnoticed

Dimension: TypeAlias = Any
"""A size of a tensor: an int, or a sympy expression in the minibatch size."""


@dataclass(frozen=True)
class TensorSpec:
    """A tensor that layers read from another layer."""

    name: str
    """The producer's name, with `:1`, `:2` … for further tensors of the same producer."""
    producer: str
    consumers: tuple[str, ...]
    dtype: torch.dtype
    requires_grad: bool
    """Whether the backward pass sends a gradient for it."""
    dimensions: tuple[Dimension, ...] = field(repr=False)

    def shape(self, batch: int) -> tuple[int, ...]:
        """The shape for a minibatch of `batch` samples."""
        return tuple(dimension_at(dimension, batch) for dimension in self.dimensions)

    def bytes(self, batch: int) -> int:
        """The size in bytes for a minibatch of `batch` samples."""
        return math.prod(self.shape(batch)) * self.dtype.itemsize


def dimension_at(dimension: Dimension, batch: int) -> int:
    """The value of a dimension at a minibatch size. Every symbol is the minibatch size: nothing else is dynamic."""
    if isinstance(dimension, int):
        return dimension
    return int(dimension.subs(dict.fromkeys(dimension.free_symbols, batch)))


@dataclass(frozen=True)
class TiedParameters:
    """Trained parameters that several layers read."""

    names: tuple[str, ...]
    """Their first names in the model."""
    layers: tuple[str, ...]
    """The layers, in topological order."""


@dataclass(frozen=True, eq=False)
class TracedModel:
    """A model as a DAG of layers, which `split` cuts into stages."""

    layers: tuple[LayerInfo, ...]
    """Layers in topological order; the last is `loss`, which consumes the model's outputs."""
    tensors: tuple[TensorSpec, ...]
    """Every tensor that crosses between layers, once, in the order of production."""
    together: tuple[tuple[str, ...], ...]
    """Groups of layers that must share a stage because of shared state, parameters that are views of one memory, or
    memory that is written in place."""
    tied: tuple[TiedParameters, ...]
    """Trained parameters that several layers read. If their layers are in different stages, each stage has a copy, and
    the stages sum its gradients."""
    written_parameters: tuple[str, ...]
    """Trained parameters that the forward pass itself writes, for example to clip weights."""
    graph_hash: str
    """Hash of layers, operators, edges and shapes: the same in every process with the same version of torch."""
    dynamic_batch: bool
    """Whether the stages run at any minibatch size, or only at `minibatch`."""
    minibatch: int
    """Samples in the minibatch that the model was traced with."""
    evaluation_problem: str | None
    """Reason why stages cannot be put in evaluation mode, or None."""
    autocast: torch.dtype | None
    """The autocast type under which the model was traced and runs, or None."""
    how: str
    """Text that says how the model was traced: by torch.export alone, or with opaque modules or omitted outputs."""
    input_names: tuple[str, ...]
    """The keywords of the model's inputs; empty if the model takes them by position."""
    model: nn.Module = field(repr=False)
    graph_module: fx.GraphModule = field(repr=False)
    layer_of: dict[fx.Node, str] = field(repr=False)
    node_of: dict[str, fx.Node] = field(repr=False)
    """The node that makes each tensor of `tensors`."""
    state_names: dict[str, str] = field(repr=False)
    """For every name of a parameter or buffer: the first name of the same object."""
    input_nodes: tuple[fx.Node, ...] = field(repr=False)
    loss_state: LossState | None = None
    """Parameters and buffers of the job's loss, which belong to the layer `loss`; None if it has none."""

    def parameters_by_name(self) -> dict[str, nn.Parameter]:
        """The parameters of the model and of the loss, each under its first name."""
        of_loss = {} if self.loss_state is None else self.loss_state.parameters()
        return {**dict(self.model.named_parameters()), **of_loss}

    def buffers_by_name(self) -> dict[str, Tensor]:
        """The buffers of the model and of the loss, each under its first name."""
        of_loss = {} if self.loss_state is None else self.loss_state.buffers()
        return {**dict(self.model.named_buffers()), **of_loss}

    @cached_property
    def _places(self) -> dict[str, list[tuple[int, fx.Node]]]:
        """The nodes of every layer, with their positions in the graph."""
        places: dict[str, list[tuple[int, fx.Node]]] = {layer.name: [] for layer in self.layers}
        for place, node in enumerate(self.graph_module.graph.nodes):
            if node.op == "call_function" and node in self.layer_of:
                places[self.layer_of[node]].append((place, node))
        return places

    def nodes_of(self, names: Iterable[str]) -> list[fx.Node]:
        """The nodes of these layers, in the order of the graph."""
        return [
            node for _, node in sorted((place for name in names for place in self._places[name]), key=itemgetter(0))
        ]

    def input_dimensions(self, index: int) -> tuple[Dimension, ...]:
        """The dimensions of one of the model's inputs."""
        return tuple(dimension_of(size) for size in self.input_nodes[index].meta["val"].shape)


def check_input_shape(index: int, shape: Sequence[int], dimensions: Sequence[Dimension], samples: int) -> None:
    """Raise `LaunchError` if a model input does not have the traced shape at this number of samples."""
    expected = tuple(dimension_at(dimension, samples) for dimension in dimensions)
    if tuple(shape) != expected:
        raise LaunchError(
            f"input {index} of the model is {shape_text(shape)} for {samples} samples, and was {shape_text(expected)} "
            f"where the model was traced: only the number of samples may differ between minibatches; {PADDING_REMEDY}"
        )


def trace_job(job: Job, minibatch: int, granularity: str = "layer", whole: Sequence[str] = ()) -> TracedModel:
    """Trace the job's model in training mode at this minibatch size, into layers of this granularity.

    `whole`: paths of further submodules that become opaque, in addition to those that torch.export cannot trace.

    Raises `LaunchError` with the offending line if the model cannot be traced.
    """
    # Example inputs are often random; the caller's random generators stay as they were.
    with torch.random.fork_rng(devices=[]):
        return _trace(job, minibatch, granularity, whole)


def _trace(job: Job, minibatch: int, granularity: str, whole: Sequence[str]) -> TracedModel:
    of_loss = loss_state(job.loss, job.model)
    refuse_module_hooks(job.model)
    refuse_accumulation_hooks(dict(job.model.named_parameters()))
    exported, how = export_with_fallback(job, minibatch, whole)
    graph_module, behaviour, batch = exported.graph_module, exported.behaviour, exported.batch
    with module_mode(job.model, train=True), autocast(job.autocast, torch.device("cpu")):
        is_changed = aliasing.functionalise_graph(graph_module, behaviour)
        if protect_saved_values(graph_module, behaviour) or is_changed:
            behaviour = aliasing.observe_behaviour(graph_module, batch.inputs)
    grouping = layers.group_layers(graph_module, job.model, behaviour, granularity)
    state_names = _state_names(job.model)
    infos = _with_loss(_layer_infos(graph_module, grouping, job.model, state_names), of_loss)
    node_of, tensors = _tensors(graph_module, grouping, behaviour)
    shapes_at = 2 if exported.dynamic_batch else exported.minibatch
    graph_hash = _hash(infos, tensors, graph_module, grouping, shapes_at, job.autocast)
    write_unnoticed(graph_module)
    return TracedModel(
        layers=infos,
        tensors=tensors,
        together=_together(graph_module, grouping, behaviour, infos, job.model),
        tied=_tied(infos, job.model, of_loss),
        written_parameters=_written_parameters(graph_module, behaviour),
        graph_hash=graph_hash,
        dynamic_batch=exported.dynamic_batch,
        minibatch=minibatch,
        evaluation_problem=exported.evaluation_problem,
        autocast=job.autocast,
        how=how,
        input_names=batch.names,
        model=job.model,
        graph_module=graph_module,
        layer_of=grouping.layer_of,
        node_of=node_of,
        state_names=state_names,
        input_nodes=tuple(node for node in graph_module.graph.nodes if node.op == "placeholder"),
        loss_state=of_loss,
    )


def _state_names(model: nn.Module) -> dict[str, str]:
    first: dict[int, str] = {}
    names = {}
    for owned in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)):
        for name, tensor in owned:
            names[name] = first.setdefault(id(tensor), name)
    return names


def _layer_infos(
    graph_module: fx.GraphModule, grouping: layers.Grouping, model: nn.Module, state_names: dict[str, str]
) -> tuple[LayerInfo, ...]:
    """The layers with their parameters and buffers."""
    parameters = dict(model.named_parameters())
    used: dict[str, dict[str, None]] = {name: {} for name in grouping.names}
    for node in graph_module.graph.nodes:
        if node.op == "get_attr" and node.target in state_names:
            for user in reading_layers(node, grouping.layer_of):
                used[user][state_names[node.target]] = None
    return tuple(
        LayerInfo(
            name,
            *grouping.modules[name],
            parameters=tuple(tensor_name for tensor_name in used[name] if tensor_name in parameters),
            buffers=tuple(tensor_name for tensor_name in used[name] if tensor_name not in parameters),
        )
        for name in grouping.names
    )


def _with_loss(infos: tuple[LayerInfo, ...], state: LossState | None) -> tuple[LayerInfo, ...]:
    """The layers, with the parameters and buffers of the job's loss added to the layer `loss`."""
    if state is None:
        return infos
    *others, last = infos
    parameters, buffers = (*last.parameters, *state.parameters()), (*last.buffers, *state.buffers())
    return (*others, replace(last, parameters=parameters, buffers=buffers))


def reading_layers(node: fx.Node, layer_of: dict[fx.Node, str]) -> list[str]:
    """The layers that read a node, directly or through copied nodes. Reading only the node's size does not count."""
    names: dict[str, None] = {}
    queue = list(node.users)
    while queue:
        user = queue.pop(0)
        if user in layer_of:
            names[layer_of[user]] = None
        elif not is_size(user):
            queue += list(user.users)
    return list(names)


def _tensors(
    graph_module: fx.GraphModule, grouping: layers.Grouping, behaviour: aliasing.GraphBehaviour
) -> tuple[dict[str, fx.Node], tuple[TensorSpec, ...]]:
    """(the node of each tensor that crosses between layers, these tensors in the order of their producers)."""
    rank = {name: index for index, name in enumerate(grouping.names)}
    counts: dict[str, int] = {}
    node_of, specs = {}, []
    for node in graph_module.graph.nodes:
        producer = grouping.layer_of.get(node)
        if producer is None or node.op == "output":
            continue
        value = behaviour.values[node]
        consumers = sorted({*reading_layers(node, grouping.layer_of)} - {producer}, key=rank.__getitem__)
        consumers = consumers if isinstance(value, Tensor) else []
        if not consumers:
            continue
        count = counts[producer] = counts.get(producer, -1) + 1
        name = f"{producer}:{count}" if count else producer
        node_of[name] = node
        dimensions = tuple(dimension_of(size) for size in node.meta["val"].shape)
        gradient = behaviour.gets_gradient(node)
        specs.append(TensorSpec(name, producer, tuple(consumers), value.dtype, gradient, dimensions))
    specs.sort(key=lambda spec: rank[spec.producer])
    return node_of, tuple(specs)


def dimension_of(size: Any) -> Dimension:
    """A size of a traced tensor as an int or an expression in the minibatch size."""
    if not isinstance(size, torch.SymInt) or size.node.maybe_as_int() is not None:
        return int(size)
    return size.node.expr


def _together(
    graph_module: fx.GraphModule,
    grouping: layers.Grouping,
    behaviour: aliasing.GraphBehaviour,
    infos: tuple[LayerInfo, ...],
    model: nn.Module,
) -> tuple[tuple[str, ...], ...]:
    """Groups of layers that must share a stage: their parameters are views of one memory, or they write to memory that
    others read.
    """
    groups: list[set[str]] = []
    storage_of = {name: one.untyped_storage()._cdata for name, one in model.named_parameters()}
    several = [storage for storage, count in Counter(storage_of.values()).items() if count > 1]
    for storage in several:
        groups.append({info.name for info in infos if any(storage_of.get(name) == storage for name in info.parameters)})
    for nodes in aliasing.inseparable_nodes(graph_module.graph, behaviour):
        groups.append({grouping.layer_of[node] for node in nodes if node in grouping.layer_of})
    rank = {name: index for index, name in enumerate(grouping.names)}
    merged = [sorted(group, key=rank.__getitem__) for group in _union(groups)]
    return tuple(sorted((tuple(group) for group in merged if len(group) > 1), key=lambda group: rank[group[0]]))


def _tied(infos: tuple[LayerInfo, ...], model: nn.Module, of_loss: LossState | None) -> tuple[TiedParameters, ...]:
    """The trained parameters that several layers read, grouped by these layers."""
    parameters = {**dict(model.named_parameters()), **({} if of_loss is None else of_loss.parameters())}
    readers: dict[str, list[str]] = defaultdict(list)
    for info in infos:
        for name in info.parameters:
            if parameters[name].requires_grad:
                readers[name].append(info.name)
    names_of: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for name, layers_ in readers.items():
        if len(layers_) > 1:
            names_of[tuple(layers_)].append(name)
    return tuple(TiedParameters(tuple(names), found) for found, names in names_of.items())


def _written_parameters(graph_module: fx.GraphModule, behaviour: aliasing.GraphBehaviour) -> tuple[str, ...]:
    written = behaviour.written_storages()
    return tuple(
        str(node.target)
        for node in graph_module.graph.find_nodes(op="get_attr")
        if behaviour.storages(node) & written
        and isinstance(parameter := attribute_at(graph_module, str(node.target)), nn.Parameter)
        and parameter.requires_grad
    )


def _union(groups: list[set[str]]) -> list[set[str]]:
    """Merge groups that overlap."""
    merged: list[set[str]] = []
    for group in groups:
        disjoint = [other for other in merged if not other & group]
        merged = [*disjoint, group.union(*(other for other in merged if other & group))]
    return merged


def _hash(
    infos: tuple[LayerInfo, ...],
    tensors: tuple[TensorSpec, ...],
    graph_module: fx.GraphModule,
    grouping: layers.Grouping,
    batch: int,
    dtype: torch.dtype | None,
) -> str:
    """Hash of the traced graph, from names, operators, edges and shapes only."""
    operators: dict[str, list[str]] = {info.name: [] for info in infos}
    for node in graph_module.graph.nodes:
        if node in grouping.layer_of:
            operators[grouping.layer_of[node]] += [operator_key(node), *inner_keys(node)]
    document: dict[str, Any] = {
        "layers": [[info.name, info.parameters, info.buffers, operators[info.name]] for info in infos],
        "tensors": [
            [tensor.name, tensor.consumers, str(tensor.dtype), tensor.requires_grad, tensor.shape(batch)]
            for tensor in tensors
        ],
    }
    if dtype is not None:
        document["autocast"] = str(dtype)
    return "sha256:" + hashlib.sha256(json.dumps(document).encode()).hexdigest()
