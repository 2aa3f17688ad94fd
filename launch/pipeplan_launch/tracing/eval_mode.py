"""Conversion of a graph that was exported in training mode to evaluation mode.

Exported graphs carry the mode as arguments of operators (dropout, batch norm, recurrent layers, attention), and as
the updates of `num_batches_tracked`. `GraphModule.eval()` raises an error for such a graph, but changing these
arguments gives exact results.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from pipeplan_launch.job.kept_values import replaced_attribute
from pipeplan_launch.tracing.opaque_modules import OpaqueModuleCall
from pipeplan_launch.tracing.regions import (
    graphs_of,
    inner_graphs,
    module_calls,
    operator_key,
    operator_name,
    state_name,
)

EVALUATION_ARGUMENTS = {"train": False, "training": False, "use_input_stats": False, "dropout_p": 0.0}
"""Values of these arguments in evaluation mode."""

BATCH_COUNTER = "num_batches_tracked"


def evaluation_refusal(problem: str) -> str:
    """The message for a model whose stages cannot be put in evaluation mode, with what to do instead."""
    return (
        f"the model cannot be evaluated stage by stage: {problem}; leave out the data's `test`, or leave the mode to "
        "torch's own modules, such as torch.nn.Dropout"
    )


def is_training_only(node: fx.Node) -> bool:
    """Whether a node runs only in training mode, because it counts the batches that a norm has seen."""
    if operator_name(node) not in ("add_", "copy_") or not node.args:
        return False
    target = node.args[0]
    return isinstance(target, fx.Node) and state_name(target).endswith(BATCH_COUNTER)


def set_evaluation_arguments(node: fx.Node) -> None:
    """Set the arguments of a node that depend on the mode to evaluation mode."""
    if isinstance(node.target, OpaqueModuleCall):
        node.target = node.target.evaluated()
    node.args, node.kwargs = _evaluation_arguments(node)


def _evaluation_arguments(node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A node's arguments in evaluation mode."""
    args, kwargs = list(node.args), dict(node.kwargs)
    declared = node.target._schema.arguments if isinstance(node.target, torch._ops.OpOverload) else ()
    for index, argument in enumerate(declared):
        if argument.name not in EVALUATION_ARGUMENTS or _normalises_by_minibatch(node, argument.name):
            continue
        if index < len(args):
            args[index] = EVALUATION_ARGUMENTS[argument.name]
        elif argument.name in kwargs:
            kwargs[argument.name] = EVALUATION_ARGUMENTS[argument.name]
    return tuple(args), kwargs


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


@contextmanager
def questions_noted(askers: set[type]) -> Iterator[None]:
    """Context that adds to `askers` the class of each module whose mode (`self.training`) is read by code outside of
    torch, or by torch's parametrizations. Operators of torch's other modules carry their mode.
    """

    def training(module: nn.Module) -> bool:
        asking = sys._getframe(1).f_code.co_filename
        if asking.startswith(_REWRITTEN) or not asking.startswith(_KNOWN):
            askers.add(type(module))
        return bool(vars(module)["training"])

    with replaced_attribute(nn.Module, "training", property(training, _set_mode)):
        yield


_KNOWN = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1] / "tracing"))
_REWRITTEN = str(Path(nn.utils.__file__).parent)
"""Torch's own code that branches on the mode: parametrizations such as spectral_norm."""


def _set_mode(module: nn.Module, mode: bool) -> None:
    vars(module)["training"] = mode


def differing_modules(trained: fx.GraphModule, evaluated: fx.GraphModule) -> tuple[str, ...]:
    """Paths of the modules that do other work in evaluation mode, even after `set_evaluation_arguments`."""
    in_training, in_evaluation = _work_by_module(trained), _work_by_module(evaluated)
    paths = dict.fromkeys((*in_training, *in_evaluation))
    return tuple(path for path in paths if in_training[path] != in_evaluation[path])


def _work_by_module(graph_module: fx.GraphModule) -> dict[str, list[Any]]:
    """The operators that each module itself runs in evaluation mode, with their constant arguments."""
    work: dict[str, list[Any]] = defaultdict(list)
    for node in graph_module.graph.nodes:
        # The memory layout of attention's result depends on dropout, and so does whether `contiguous` is called on it.
        if node.op != "call_function" or is_training_only(node) or operator_name(node) == "contiguous":
            continue
        stack = [*module_calls(node).values()]
        if node.meta.get("nn_module_stack") and not stack:
            continue  # a node that torch.export has inserted
        inside = [_work_by_module(graph) for graph in graphs_of(node)]
        work[stack[-1] if stack else ""].append((operator_key(node), _constants(node), inside))
    return work


def _constants(node: fx.Node) -> list[str]:
    """The arguments of a node that are not results of other nodes; parameters and buffers by name."""
    args, kwargs = _evaluation_arguments(node)
    given: list[tuple[str, Any]] = [*kwargs.items()]
    if isinstance(node.target, torch._ops.OpOverload):
        # Arguments that have their defaults are left out of the graph.
        declared = node.target._schema.arguments
        given += [(argument.name, value) for argument, value in zip(declared, args, strict=False)]
        defaults = {argument.name: argument.default_value for argument in declared if argument.has_default_value()}
        given = [(name, value) for name, value in given if name not in defaults or not _is(value, defaults[name])]
    else:
        given += [(str(index), value) for index, value in enumerate(args)]
    named = [(name, leaf) for name, value in sorted(given, key=itemgetter(0)) for leaf in tree_leaves(value)]
    return [f"{name} {_tensor_name(leaf) if isinstance(leaf, fx.Node) else leaf!r}" for name, leaf in named]


def _is(value: Any, default: Any) -> bool:
    return not isinstance(value, fx.Node) and bool(value == default)


def _tensor_name(node: fx.Node) -> str:
    return state_name(node) if isinstance(node.meta.get("val"), Tensor) else ""
