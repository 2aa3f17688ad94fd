"""Conversion of nodes that were exported in training mode to what the model computes in evaluation mode.

Exported graphs carry the mode as arguments of operators (dropout, batch norm, recurrent layers, attention), and as
the updates of `num_batches_tracked`. `GraphModule.eval()` refuses, but changing these arguments is exact.
"""

from __future__ import annotations

import torch
from torch import fx

from pipeplan_launch.tracing.opaque_modules import OpaqueModuleCall
from pipeplan_launch.tracing.regions import inner_graphs, operator_name

EVALUATION_ARGUMENTS = {"train": False, "training": False, "use_input_stats": False, "dropout_p": 0.0}
"""Values of these arguments in evaluation mode."""

BATCH_COUNTER = "num_batches_tracked"


def is_training_only(node: fx.Node) -> bool:
    """Whether a node does not run in evaluation mode, because it counts the batches that a norm has seen."""
    if operator_name(node) not in ("add_", "copy_") or not node.args:
        return False
    target = node.args[0]
    # Inside a region the counter is a placeholder, which export names after the buffer.
    if not isinstance(target, fx.Node) or target.op not in ("get_attr", "placeholder"):
        return False
    return str(target.target).endswith(BATCH_COUNTER)


def set_evaluation_arguments(node: fx.Node) -> None:
    """Set the arguments of a node that depend on the mode to evaluation mode."""
    if isinstance(node.target, OpaqueModuleCall):
        node.target = node.target.evaluated()
    if not isinstance(node.target, torch._ops.OpOverload):
        return
    args, kwargs = list(node.args), dict(node.kwargs)
    for index, argument in enumerate(node.target._schema.arguments):
        if argument.name not in EVALUATION_ARGUMENTS or _normalises_by_minibatch(node, argument.name):
            continue
        if index < len(args):
            args[index] = EVALUATION_ARGUMENTS[argument.name]
        elif argument.name in kwargs:
            kwargs[argument.name] = EVALUATION_ARGUMENTS[argument.name]
    node.args, node.kwargs = tuple(args), kwargs


def _normalises_by_minibatch(node: fx.Node, argument: str) -> bool:
    """Whether the flag belongs to a norm without running statistics, which uses the minibatch's statistics in both
    modes.
    """
    return argument in ("training", "use_input_stats") and "norm" in operator_name(node) and node.args[3] is None


def set_region_evaluation(region: fx.GraphModule) -> None:
    """Convert the graph inside a region (`no_grad`, autocast) to evaluation mode."""
    for graph in inner_graphs(region):
        for node in list(graph.graph.nodes):
            if is_training_only(node):
                node.replace_all_uses_with(node.args[0])
                graph.graph.erase_node(node)
            elif node.op == "call_function":
                set_evaluation_arguments(node)
        graph.recompile()
