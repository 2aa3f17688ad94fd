"""Regions: operators that run a graph of their own, such as the code under `torch.no_grad()` or with autocast off."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx, nn

NORMS_WITH_STATE = ("batch_norm", "instance_norm")
"""Operators that write their running statistics, although their schema does not say so."""
REGIONS = frozenset({"wrap_with_set_grad_enabled", "wrap_with_autocast"})
"""Operators that run a graph of their own, and only change the mode in which it runs."""


def operator_name(node: fx.Node) -> str:
    """The operator's name without namespace and overload: `add` for `aten.add.Tensor`."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.partition("::")[2]
    return str(getattr(target, "__name__", target))


def operator_key(node: fx.Node) -> str:
    """A name of the node's operator that is the same in every process: the overload's own name if it is an overload."""
    # str() of a plain function contains its address.
    return str(node.target) if isinstance(node.target, torch._ops.OpOverload) else operator_name(node)


def module_calls(node: fx.Node) -> dict[str, str]:
    """The path of each module around a node, outermost first, by the identity of the module's call.

    Export gives the nodes that it inserts itself a placeholder instead of a path.
    """
    stack = node.meta.get("nn_module_stack") or {}
    return {call: path for call, (path, _) in stack.items() if not path.startswith(_NO_MODULE)}


_NO_MODULE = "_empty_nn_module_stack"


def attribute_at(module: nn.Module, path: str) -> Any:
    """The parameter, buffer, constant or submodule at a dotted path."""
    return operator.attrgetter(path)(module)


def graphs_of(node: fx.Node) -> list[fx.GraphModule]:
    """The graphs that a higher-order operator runs: one, or both branches of `torch.cond`; empty for any other
    operator.
    """
    owner = node.graph.owning_module
    if owner is None or not isinstance(node.target, torch._ops.HigherOrderOperator):
        return []
    values = [attribute_at(owner, str(one.target)) for one in node.all_input_nodes if one.op == "get_attr"]
    return [value for value in values if isinstance(value, fx.GraphModule)]


def inner_graphs(region: fx.GraphModule) -> list[fx.GraphModule]:
    """The graph of a region, and the graphs of the regions inside it."""
    return [module for module in region.modules() if isinstance(module, fx.GraphModule)]


def region_of(node: fx.Node) -> fx.GraphModule | None:
    """The graph that a node runs in another mode (without gradients, without autocast), or None."""
    graphs = graphs_of(node) if operator_name(node) in REGIONS else []
    return graphs[0] if graphs else None


def region_arguments(node: fx.Node) -> list[tuple[Any, fx.Node]]:
    """(argument, placeholder inside) for each argument of a region; empty for any other node."""
    region = region_of(node)
    if region is None:
        return []
    placeholders = region.graph.find_nodes(op="placeholder")
    return list(zip(node.args[len(node.args) - len(placeholders) :], placeholders, strict=True))


def name_state_inside(graph_module: fx.GraphModule) -> None:
    """Note the parameter or buffer of each placeholder in the regions of a graph, and in the regions inside these."""
    for node in graph_module.graph.nodes:
        for outer, inner in region_arguments(node):
            if isinstance(outer, fx.Node):
                inner.meta[STATE_NAME] = state_name(outer)
        for graph in graphs_of(node):
            name_state_inside(graph)


STATE_NAME = "pipeplan_state"


def state_name(node: fx.Node) -> str:
    """The name of the parameter or buffer that a node reads; empty for any other node."""
    return str(node.target) if node.op == "get_attr" else str(node.meta.get(STATE_NAME, ""))


def inner_keys(node: fx.Node) -> list[str]:
    """The operators in the graphs that a node runs, and in the graphs inside these, in order."""
    keys = []
    for graph in graphs_of(node):
        for inner in graph.graph.nodes:
            if inner.op == "call_function":
                keys += [operator_key(inner), *inner_keys(inner)]
    return keys


def may_write(argument: fx.Node) -> bool:
    """Whether running the graph may change the memory of this argument, according to the operators' schemas.

    An operator without a schema counts as writing to all its arguments, unless it is a region, whose graph is examined.
    """
    waiting, seen = [argument], {argument}
    while waiting:
        read = waiting.pop()
        for user in read.users:
            if user.op == "output" or user in seen:
                continue
            if _writes(user, read):
                return True
            if _returns_memory_of_arguments(user):
                seen.add(user)
                waiting.append(user)
    return False


def _writes(node: fx.Node, argument: fx.Node) -> bool:
    """Whether the node may write to this argument."""
    inside = region_arguments(node)
    if inside:
        return any(outer is argument and may_write(inner) for outer, inner in inside)
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.target is not operator.getitem
    return argument in (_statistics(node) if operator_name(node) in NORMS_WITH_STATE else _mutated(node))


def _mutated(node: fx.Node) -> list[Any]:
    """The arguments that an operator writes to, by its schema."""
    assert isinstance(node.target, torch._ops.OpOverload)
    declared = node.target._schema.arguments
    given = [*node.args, *(node.kwargs.get(one.name) for one in declared[len(node.args) :])]
    pairs = zip(declared, given, strict=True)
    written = [value for one, value in pairs if one.alias_info is not None and one.alias_info.is_write]
    return [value for member in written for value in (member if isinstance(member, list | tuple) else [member])]


def _statistics(node: fx.Node) -> list[Any]:
    """The running statistics among the arguments of a norm."""
    return list(node.args[3:5])


def statistics_written(node: fx.Node) -> list[fx.Node]:
    """The running statistics that a norm writes, or that the norms inside a region write."""
    if operator_name(node) in NORMS_WITH_STATE:
        return [argument for argument in _statistics(node) if isinstance(argument, fx.Node)]
    return [outer for outer, inner in region_arguments(node) if isinstance(outer, fx.Node) and may_write(inner)]


def tensor_data(tensor: Tensor) -> Tensor:
    """The tensor's `.data`: the same memory, but autograd does not notice changes."""
    return tensor.data


def write_unnoticed(graph_module: fx.GraphModule) -> None:
    """Replace `detach` by `.data` where a detached parameter or buffer is written to, in the graph and its regions.

    A model that writes `.data` accepts in its backward pass values that were changed since the forward pass.
    """
    for graph in inner_graphs(graph_module):
        for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.detach.default):
            source = node.args[0]
            is_state = source.op == "get_attr" or (graph is not graph_module and source.op == "placeholder")
            if is_state and may_write(node):
                node.target = tensor_data
        graph.recompile()


def _returns_memory_of_arguments(node: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        return True
    return any(returned.alias_info is not None for returned in node.target._schema.returns)
