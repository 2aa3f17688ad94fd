"""Turn nodes that were exported in training mode into what the model does in evaluation mode.

Exported graphs carry their mode as arguments of operators (dropout, batch norm, recurrent layers, attention), and as
the updates of `num_batches_tracked`. `GraphModule.eval()` refuses; changing those arguments is exact.
"""

from __future__ import annotations

import torch
from torch import fx

from pipeplan_launch.aliasing import operator_name
from pipeplan_launch.whole import ModuleCall

FLAGS = {"train": False, "training": False, "use_input_stats": False, "dropout_p": 0.0}
"""What arguments of these names are in evaluation mode."""

RANDOM_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
COUNTER = "num_batches_tracked"


def is_training_only(node: fx.Node) -> bool:
    """Whether a node does not run in evaluation mode: the count of batches that a norm has seen."""
    if operator_name(node) not in ("add_", "copy_") or not node.args:
        return False
    target = node.args[0]
    # Inside a region the counter is an argument, which export names after the buffer.
    if not isinstance(target, fx.Node) or target.op not in ("get_attr", "placeholder"):
        return False
    return str(target.target).endswith(COUNTER)


def set_evaluation(node: fx.Node) -> None:
    """Change the arguments of a node that say that the model trains."""
    if isinstance(node.target, ModuleCall):
        node.target = node.target.evaluated()
    if not isinstance(node.target, torch._ops.OpOverload):
        return
    args, kwargs = list(node.args), dict(node.kwargs)
    for index, argument in enumerate(node.target._schema.arguments):
        if argument.name not in FLAGS or _keeps_its_statistics(node, argument.name):
            continue
        if index < len(args):
            args[index] = FLAGS[argument.name]
        elif argument.name in kwargs:
            kwargs[argument.name] = FLAGS[argument.name]
    node.args, node.kwargs = tuple(args), kwargs


def _keeps_its_statistics(node: fx.Node, argument: str) -> bool:
    """A norm without running statistics normalises by the minibatch in both modes."""
    return argument in ("training", "use_input_stats") and "norm" in operator_name(node) and node.args[3] is None


def set_evaluation_inside(region: fx.GraphModule) -> None:
    """Put the graph inside a region (`no_grad`, autocast) of an exported graph into evaluation mode."""
    for node in list(region.graph.nodes):
        if is_training_only(node):
            node.replace_all_uses_with(node.args[0])
            region.graph.erase_node(node)
        elif node.op == "call_function":
            set_evaluation(node)
