"""Arguments of a graph that it may write to."""

from __future__ import annotations

import operator

import torch
from torch import fx

from pipeplan_launch.tracing.aliasing import NORMS_WITH_STATE, operator_name


def may_write(argument: fx.Node) -> bool:
    """Whether running the graph may change the memory of this argument, as far as the operators' schemas tell.

    Anything without a schema (a region of `no_grad` or autocast) counts as writing to all its arguments.
    """
    waiting, seen = [argument], {argument}
    while waiting:
        for user in waiting.pop().users:
            if user.op == "output" or user in seen:
                continue
            if _writes(user):
                return True
            if _returns_memory_of_arguments(user):
                seen.add(user)
                waiting.append(user)
    return False


def _writes(node: fx.Node) -> bool:
    """Whether the node may write to any of its arguments."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.target is not operator.getitem
    return node.target._schema.is_mutable or operator_name(node) in NORMS_WITH_STATE


def _returns_memory_of_arguments(node: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        return True
    return any(returned.alias_info is not None for returned in node.target._schema.returns)
