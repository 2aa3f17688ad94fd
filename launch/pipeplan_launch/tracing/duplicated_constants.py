"""Values that belong to no layer, because every stage that reads one computes its own copy.

There are three kinds: sizes; constants, which depend on neither data, parameters nor random numbers (positions, causal
masks, the cosines and sines of rotary embeddings); and results of cheap operators on the data alone (padding masks,
shifted labels). They never cross from one stage to another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from pipeplan_launch.job.nested_tensors import tensors_in
from pipeplan_launch.tracing.aliasing import GraphBehaviour
from pipeplan_launch.tracing.opaque_calls import OpaqueCall
from pipeplan_launch.tracing.regions import NORMS_WITH_STATE, attribute_at, operator_name, region_of

SHAPE_OPERATORS = frozenset(
    {"view", "view_as", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "expand", "expand_as", "contiguous"}
    | {"transpose", "permute", "t", "movedim", "swapaxes", "alias"}
    | {"select", "slice", "narrow", "chunk", "split", "split_with_sizes", "unbind", "getitem"}
)
CHEAP_OPERATORS = frozenset(
    {"to", "_to_copy", "clone", "detach", "lift_fresh_copy", "type_as", "cat", "stack", "pad", "constant_pad_nd"}
    | {"repeat", "repeat_interleave", "roll", "flip", "index", "index_select", "gather", "one_hot", "tril", "triu"}
    | {"cumsum", "diff", "sum", "any", "all", "amax", "amin", "max", "min", "arange", "full", "zeros", "ones"}
    | {"new_full", "new_zeros", "new_ones", "full_like", "zeros_like", "ones_like"}
    | {"__and__", "__or__", "__xor__", "isin", "floor_divide"}
)
"""Operators that read and write memory about once, in addition to torch's pointwise operators."""
PRODUCTS = frozenset({"matmul", "bmm", "mm", "outer"})
"""Products of matrices. They are cheap only as outer products, which add up nothing."""


def is_size(node: fx.Node) -> bool:
    """Whether the node's value is a number that follows from the minibatch size."""
    return isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool | int | float | bool)


def is_shape_only(node: fx.Node) -> bool:
    """Whether the node only views a tensor in another shape, or picks a member of a tuple."""
    return operator_name(node) in SHAPE_OPERATORS


def copied_nodes(graph_module: fx.GraphModule, behaviour: GraphBehaviour) -> set[fx.Node]:
    """The nodes that are computed in every stage that reads them."""
    touched = behaviour.written_storages()
    constant: set[fx.Node] = set()
    of_input: set[fx.Node] = set()
    for node in graph_module.graph.nodes:
        if node.op == "get_attr":
            is_parameter = isinstance(attribute_at(graph_module, node.target), nn.Parameter)
            if not is_parameter and not behaviour.storages(node) & touched:
                constant.add(node)
        elif node.op == "placeholder":
            of_input.add(node)
        elif node.op == "call_function":
            if is_size(node):
                constant.add(node)
            elif behaviour.storages(node) & touched or node in behaviour.written or not _is_repeatable(node):
                continue
            elif all(argument in constant for argument in node.all_input_nodes):
                constant.add(node)
            elif all(argument in constant or argument in of_input for argument in node.all_input_nodes) and (
                is_shape_only(node) or _is_cheap(node, behaviour)
            ):
                of_input.add(node)
    return constant | of_input


def _is_repeatable(node: fx.Node) -> bool:
    """Whether the node gives the same result each time and changes nothing, according to its schema or its region."""
    if isinstance(node.target, torch._ops.HigherOrderOperator | OpaqueCall):
        region = region_of(node)
        return region is not None and all(
            _is_repeatable(inner) and not _changes_state(inner)
            for inner in region.graph.nodes
            if inner.op == "call_function"
        )
    if not isinstance(node.target, torch._ops.OpOverload):
        return True
    return torch.Tag.nondeterministic_seeded not in node.target.tags and "dropout" not in operator_name(node)


def _changes_state(node: fx.Node) -> bool:
    """Whether a node of a region writes to its arguments; the writes of other nodes have been observed."""
    is_mutable = isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
    return is_mutable or operator_name(node) in NORMS_WITH_STATE


def _is_cheap(node: fx.Node, behaviour: GraphBehaviour) -> bool:
    """Whether a node computes tensors without gradients, in about the time of reading and writing memory."""
    if any(tensor.requires_grad for tensor in tensors_in(behaviour.values[node])):
        return False
    region = region_of(node)
    if region is None:
        return _is_cheap_operator(node, [behaviour.values.get(argument) for argument in node.all_input_nodes])
    return all(
        is_shape_only(inner)
        or "_assert" in operator_name(inner)
        or _is_cheap_operator(inner, [argument.meta.get("val") for argument in inner.all_input_nodes])
        for inner in region.graph.nodes
        if inner.op == "call_function"
    )


def _is_cheap_operator(node: fx.Node, arguments: Sequence[Any]) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    name = operator_name(node)
    if name in PRODUCTS:
        return name == "outer" or _summed(arguments) == 1
    return torch.Tag.pointwise in node.target.tags or name in CHEAP_OPERATORS


def _summed(arguments: Sequence[Any]) -> float:
    """Number of terms in the sum for each element of a matrix product."""
    first = arguments[0] if arguments else None
    if not isinstance(first, Tensor) or not first.dim():
        return math.inf
    return float(first.shape[-1])
