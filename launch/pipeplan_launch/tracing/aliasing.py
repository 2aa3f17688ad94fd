"""Finds nodes of a graph that share memory, and replaces in-place operators where that changes no result.

A cut between tensors that share memory would lose writes. Most in-place operators (`relu_`, `+=` on a fresh tensor)
have no second reader of their memory. They are replaced by out-of-place operators with exactly the same results. The
other in-place operators must stay in one stage, together with all nodes that read the memory before its last write.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from pipeplan_launch.errors import LaunchError
from pipeplan_launch.job.nested_tensors import gradient_functions, tensors_in
from pipeplan_launch.job.user_code import is_user_code
from pipeplan_launch.tracing.opaque_calls import remove_dead_code
from pipeplan_launch.tracing.regions import attribute_at, operator_name, statistics_written

INEXACT_IN_PLACE = ("elu_", "celu_", "selu_", "rrelu_", "rrelu_with_noise_")
"""In-place operators whose backward pass computes from the result instead of the argument, and so rounds differently
from the out-of-place operator."""


class DependsOnData(LaunchError):
    """A number or a shape in the graph depends on the data."""

    def __init__(self, node: fx.Node) -> None:
        super().__init__(
            f"the model cannot be split: the shape or a number in it depends on the data, at {source_line(node)}; "
            "compute it with fixed shapes, or move it into a submodule of its own, which is then one layer"
        )
        self.node = node


@dataclass(frozen=True)
class GraphBehaviour:
    """Results of running the graph on fake tensors, by node."""

    values: dict[fx.Node, Any]
    """The node's output, made of fake tensors."""
    written: dict[fx.Node, tuple[fx.Node, ...]]
    """For nodes that write to memory, the arguments that they write to."""
    gradient_functions: frozenset[Any]
    """The autograd functions that the backward pass from the model's outputs reaches."""

    def storages(self, node: fx.Node) -> set[int]:
        """Identities of the storages behind the node's output."""
        return {tensor.untyped_storage()._cdata for tensor in tensors_in(self.values.get(node))}

    def written_storages(self) -> set[int]:
        """Identities of the storages that some node writes to."""
        return {storage for arguments in self.written.values() for one in arguments for storage in self.storages(one)}

    def gets_gradient(self, node: fx.Node) -> bool:
        """Whether the backward pass reaches the node's tensor. A tensor may require a gradient and get none."""
        return any(tensor.grad_fn in self.gradient_functions for tensor in tensors_in(self.values.get(node)))


def observe_behaviour(graph_module: fx.GraphModule, inputs: tuple[Tensor, ...]) -> GraphBehaviour:
    """Run the graph on fake tensors with gradients on, and record aliases, writes and gradients."""
    values: dict[fx.Node, Any] = {}
    written: dict[fx.Node, tuple[fx.Node, ...]] = {}
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    remaining_inputs = iter(inputs)
    with mode, torch.enable_grad():
        for node in graph_module.graph.nodes:
            if node.op == "placeholder":
                values[node] = mode.from_tensor(next(remaining_inputs))
            elif node.op == "get_attr":
                value = attribute_at(graph_module, node.target)
                values[node] = mode.from_tensor(value) if isinstance(value, Tensor) else value
            elif node.op == "call_function":
                values[node], writes = _call(node, values)
                if writes:
                    written[node] = writes
    outputs = [values[node] for node in graph_module.graph.output_node().all_input_nodes]
    return GraphBehaviour(values, written, frozenset(gradient_functions(outputs)))


def _call(node: fx.Node, values: dict[fx.Node, Any]) -> tuple[Any, tuple[fx.Node, ...]]:
    """(output of a node, the arguments that it writes to), by running it on fake tensors."""
    arguments = [argument for argument in node.all_input_nodes if tensors_in(values[argument])]
    before = {argument: [tensor._version for tensor in tensors_in(values[argument])] for argument in arguments}
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
    assert callable(node.target)
    try:
        result = node.target(*args, **kwargs)
    except Exception as error:
        if "data" not in type(error).__name__.lower() and "Dynamic" not in type(error).__name__:
            raise
        raise DependsOnData(node) from error
    writes = [
        argument
        for argument in arguments
        if before[argument] != [tensor._version for tensor in tensors_in(values[argument])]
    ]
    writes += [argument for argument in statistics_written(node) if argument not in writes]
    return result, tuple(writes)


def source_line(node: fx.Node) -> str:
    """`file:line: code` of the user's line that made this node."""

    lines = (node.meta.get("stack_trace") or "").splitlines()
    places = []
    for heading, code in pairwise(lines):
        if heading.strip().startswith("File "):
            name, _, rest = heading.strip()[len('File "') :].partition('", line ')
            if is_user_code(name):
                places.append(f"{name}:{rest.partition(',')[0]}: {code.strip()}")
    return places[-1] if places else str(node.target)


def functionalise_graph(graph_module: fx.GraphModule, behaviour: GraphBehaviour) -> bool:
    """Replace in-place operators by out-of-place operators if no other node reads the memory. Returns whether any was
    replaced.
    """
    graph = graph_module.graph
    position = {node: index for index, node in enumerate(graph.nodes)}
    members = _by_storage(behaviour)
    changed = False
    for node in list(behaviour.written):
        if not _is_private(node, behaviour, members, position):
            continue
        fresh = _replace(graph, node, behaviour, position)
        if fresh is not None:
            changed = True
            # For later writes the new node still counts as sharing the old memory, which is safe.
            position[fresh] = position[node]
            for storage in behaviour.storages(node):
                members[storage] = [fresh if member is node else member for member in members[storage]]
            behaviour.values[fresh] = behaviour.values.pop(node)
            del behaviour.written[node]
            for writer, arguments in behaviour.written.items():
                behaviour.written[writer] = tuple(fresh if argument is node else argument for argument in arguments)
    if changed:
        remove_dead_code(graph_module)
    return changed


def _by_storage(behaviour: GraphBehaviour) -> dict[int, list[fx.Node]]:
    """For each storage the nodes whose output lies in it."""
    members: dict[int, list[fx.Node]] = defaultdict(list)
    for node in behaviour.values:
        for storage in behaviour.storages(node):
            members[storage].append(node)
    return members


def _is_private(
    node: fx.Node, behaviour: GraphBehaviour, members: dict[int, list[fx.Node]], position: dict[fx.Node, int]
) -> bool:
    """Whether, after this write, the memory is read only through the node's result and its first argument."""
    if len(behaviour.written[node]) != 1 or behaviour.written[node][0] is not node.args[0]:
        return False
    base = node.args[0]
    for storage in behaviour.storages(base):
        for member in members[storage]:
            if member.op == "get_attr":
                return False
            if member is base or position[member] >= position[node]:
                continue
            if any(position[user] > position[node] for user in member.users):
                return False
    return True


def _replace(graph: fx.Graph, node: fx.Node, behaviour: GraphBehaviour, position: dict[fx.Node, int]) -> fx.Node | None:
    """The out-of-place node that replaces an in-place one, or None if no operator computes exactly the same."""
    counterpart = _out_of_place(node)
    if counterpart is None:
        return None
    before: Tensor = behaviour.values[node.args[0]]  # type: ignore[index]
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), behaviour.values.__getitem__)
    with torch.no_grad():
        result = counterpart(*args, **kwargs)
    if not isinstance(result, Tensor) or (result.shape, result.dtype) != (before.shape, before.dtype):
        # The in-place operator casts back to the dtype of its memory. An explicit cast would give the same output,
        # but its backward pass would round differently.
        return None
    with graph.inserting_before(node):
        fresh = graph.call_function(counterpart, node.args, node.kwargs)
    fresh.meta = dict(node.meta)
    base = node.args[0]
    assert isinstance(base, fx.Node)
    base.replace_all_uses_with(fresh, delete_user_cb=lambda user: position.get(user, -1) > position[node])
    node.replace_all_uses_with(fresh)
    graph.erase_node(node)
    return fresh


def _out_of_place(node: fx.Node) -> Any:
    """The operator that computes the same into fresh memory, or None."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return None
    name = operator_name(node)
    if not name.endswith("_") or name.endswith("__") or name in INEXACT_IN_PLACE:
        return None
    if "generator" in {argument.name for argument in target._schema.arguments}:
        return None
    packet = getattr(torch.ops.aten, name[:-1], None)
    counterpart = getattr(packet, target._overloadname, None) if packet is not None else None
    if counterpart is None or counterpart._schema.is_mutable:
        return None
    signature = [(argument.name, str(argument.type)) for argument in target._schema.arguments]
    return (
        counterpart
        if signature == [(argument.name, str(argument.type)) for argument in counterpart._schema.arguments]
        else None
    )


def inseparable_nodes(graph: fx.Graph, behaviour: GraphBehaviour) -> list[set[fx.Node]]:
    """Groups of nodes that must stay in one stage, because some of them write to memory that others read."""
    position = {node: index for index, node in enumerate(graph.nodes)}
    members = _by_storage(behaviour)
    last_write: dict[int, int] = {}
    writers: dict[int, set[fx.Node]] = defaultdict(set)
    for node, arguments in behaviour.written.items():
        for storage in {storage for member in arguments for storage in behaviour.storages(member)}:
            last_write[storage] = max(last_write.get(storage, 0), position[node])
            writers[storage].add(node)
    groups = []
    for storage, last in last_write.items():
        group = set(members[storage]) | writers[storage]
        group |= {user for member in members[storage] for user in member.users if position[user] < last}
        if any(member.op in ("get_attr", "placeholder") for member in members[storage]):
            # State, or an input that every stage reads for itself: later readers must see the writes too.
            group |= {user for member in members[storage] for user in member.users}
        groups.append({node for node in group if node.op == "call_function"})
    return groups
