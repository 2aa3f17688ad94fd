"""Cut a set of layers out of a traced model as a function that runs by itself."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor, fx
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from pipeplan_launch.tracing import eval_mode
from pipeplan_launch.tracing.duplicated_constants import is_size
from pipeplan_launch.tracing.layers import LOSS_LAYER
from pipeplan_launch.tracing.regions import attribute_at, inner_graphs, may_write
from pipeplan_launch.tracing.trace import TracedModel

# The part of a stage's interface that the engine needs. `split.StageProgram` implements it.


class BoundaryTensor(Protocol):
    """A tensor that crosses from one stage to the next."""

    @property
    def name(self) -> str: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def requires_grad(self) -> bool: ...

    def shape(self, batch: int) -> tuple[int, ...]:
        """Shape for a minibatch of `batch` samples."""


class Program(Protocol):
    """One stage's layers as a function of their parameters."""

    @property
    def receives(self) -> Sequence[BoundaryTensor]: ...

    @property
    def sends(self) -> Sequence[BoundaryTensor]: ...

    @property
    def model_inputs(self) -> Sequence[int]: ...

    def parameters_by_name(self) -> Mapping[str, Tensor]: ...

    def buffers_by_name(self) -> Mapping[str, Tensor]: ...

    @property
    def shared(self) -> Mapping[str, tuple[int, ...]]:
        """For every parameter that other stages have too: all stages that have it, in order."""

    def changing_state(self) -> Mapping[str, Tensor]:
        """Buffers, and tensors that are constants to autograd, that a forward in training mode may write, by name."""

    def call(
        self, parameters: Mapping[str, Tensor], received: Sequence[Tensor], inputs: Sequence[Tensor], batch: int
    ) -> Any:
        """Run the stage. If a tensor of `changing_state` is among `parameters`, it replaces the program's own."""

    def train(self, mode: bool = True) -> Any: ...

    def eval(self) -> Any: ...


NO_COPIES: Mapping[str, fx.Node] = MappingProxyType({})


@dataclass(frozen=True, eq=False)
class Subgraph:
    """Layers as one function: `run(*state, *received, *inputs, batch)` returns the tuple of the tensors that they
    make.
    """

    state: tuple[str, ...]
    """Names of the parameters, buffers and constants among its arguments, in order."""
    inputs: tuple[int, ...]
    """Indices of the model's inputs among its arguments, in order."""
    run: fx.GraphModule

    @property
    def changing(self) -> tuple[str, ...]:
        """Names in `state` of the tensors that `run` may write to."""
        arguments = [node for node in self.run.graph.nodes if node.op == "placeholder"]
        return tuple(name for name, argument in zip(self.state, arguments, strict=False) if may_write(argument))


def cut_subgraph(
    traced: TracedModel,
    layers: Iterable[str],
    received: Sequence[str],
    made: Sequence[str],
    *,
    training: bool = True,
    device: torch.device | None = None,
    copies: Mapping[str, fx.Node] = NO_COPIES,
) -> Subgraph:
    """The function of these layers, which takes the tensors named in `received` and returns those named in `made`.

    With the layer `loss` it returns the model's flat outputs instead. `device` replaces the devices recorded by
    tracing. `copies` names further nodes that the function may take and return (`shared_copies.py`).
    """
    node_of = {**traced.node_of, **copies}
    builder = _Builder(traced, frozenset(layers), training, device)
    placeholders = []
    for index, name in enumerate(received):
        placeholders.append(builder.graph.placeholder(f"received_{index}"))
        builder.copies[node_of[name]] = placeholders[-1]
    builder.work()
    output = traced.graph_module.graph.output_node()
    if LOSS_LAYER in builder.layers:
        leaves = torch.utils._pytree.tree_leaves(output.args[0])
        results = tuple(builder.copy(leaf) if isinstance(leaf, fx.Node) else leaf for leaf in leaves)
    else:
        results = tuple(builder.copy(node_of[name]) for name in made)
    builder.graph.output(results)
    return builder.segment(placeholders)


class _Builder:
    """Copies nodes of the traced graph into a new graph, on demand."""

    def __init__(
        self, traced: TracedModel, layers: frozenset[str], training: bool, device: torch.device | None
    ) -> None:
        self.traced, self.layers, self.training, self.device = traced, layers, training, device
        self.graph = fx.Graph()
        self.copies: dict[fx.Node, fx.Node] = {}
        self.state: dict[str, fx.Node] = {}
        self.inputs: dict[int, fx.Node] = {}
        self.submodules: dict[str, Any] = {}
        self.batch = self.graph.placeholder("batch")

    def work(self) -> None:
        """Copy the nodes of the layers, in the order of the model."""
        for node in self.traced.nodes_of(self.layers):
            if not self.training and eval_mode.is_training_only(node):
                self.copies[node] = self.copy(node.args[0])
            else:
                self.copy(node)

    def copy(self, node: Any) -> fx.Node:
        """The copy of a node in the new graph, made on first use."""
        if node not in self.copies:
            self.copies[node] = self._make(node)
        return self.copies[node]

    def _make(self, node: fx.Node) -> fx.Node:
        """Copy a node, with everything it needs."""
        if node.op == "placeholder":
            index = self.traced.input_nodes.index(node)
            self.inputs[index] = self.graph.placeholder(f"input_{index}")
            return self.inputs[index]
        if node.op == "get_attr":
            return self._state_or_submodule(node)
        if is_size(node) and any(not is_size(argument) for argument in node.all_input_nodes):
            return self._size(node.meta["val"])
        owner = self.traced.layer_of.get(node)
        assert owner is None or owner in self.layers, f"{node} of {owner} is needed but was not received"
        new_node = self.graph.node_copy(node, self.copy)
        self._place(new_node)
        if not self.training:
            eval_mode.set_evaluation_arguments(new_node)
        return new_node

    def _state_or_submodule(self, node: fx.Node) -> fx.Node:
        """The new graph's node for a parameter, buffer, constant or region."""
        name = str(node.target)
        value = attribute_at(self.traced.graph_module, name)
        if not isinstance(value, Tensor):
            key = f"region_{len(self.submodules)}"
            self.submodules[key] = self._region(value)
            return self.graph.get_attr(key)
        name = self.traced.state_names.get(name, name)
        if name not in self.state:
            self.state[name] = self.graph.placeholder(f"state_{len(self.state)}")
        return self.state[name]

    def _region(self, region: Any) -> Any:
        """The graph inside a region, converted to the mode and device of this function."""
        if not isinstance(region, fx.GraphModule) or (self.training and self.device is None):
            return region
        changed = copy.deepcopy(region)
        if not self.training:
            eval_mode.set_region_evaluation(changed)
        for graph in inner_graphs(changed):
            for node in graph.graph.nodes:
                self._place(node)
            graph.recompile()
        return changed

    def _place(self, node: fx.Node) -> None:
        """Replace the devices recorded by tracing."""
        if self.device is not None:
            node.args = fx.node.map_aggregate(node.args, self._on_device)
            node.kwargs = fx.node.map_aggregate(node.kwargs, self._on_device)

    def _size(self, value: Any) -> fx.Node:
        """The node that computes a size from the minibatch size."""
        if not isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            return self.graph.call_function(type(value), (value,))
        expression = value.node.expr
        known = dict.fromkeys(expression.free_symbols, fx.Proxy(self.batch))
        result = sympy_interp(PythonReferenceAnalysis, known, expression)
        return result.node if isinstance(result, fx.Proxy) else self.graph.call_function(int, (int(result),))

    def _on_device(self, argument: Any) -> Any:
        return self.device if isinstance(argument, torch.device) else argument

    def segment(self, received: Sequence[fx.Node]) -> Subgraph:
        """The finished function, with its arguments in order: state, received, inputs, batch."""
        indices = tuple(sorted(self.inputs))
        arguments = [*self.state.values(), *received, *(self.inputs[index] for index in indices), self.batch]
        ordered = fx.Graph()
        copies = {argument: ordered.placeholder(str(argument.target)) for argument in arguments}
        for node in self.graph.nodes:
            if node.op != "placeholder":
                copies[node] = ordered.node_copy(node, copies.__getitem__)
        ordered.lint()
        return Subgraph(tuple(self.state), indices, fx.GraphModule(self.submodules, ordered))
