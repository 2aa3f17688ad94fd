"""Calls that remain in an exported graph as calls, because torch.export cannot trace them or would lose their gradient.

During the export such a call is one operator, `pipeplan::opaque`, from which export gets only the output shapes. In the
finished graph a callable object replaces the operator. It makes the call in Python on its tensor arguments. Parameters
and buffers are its first arguments, so that the graph reads them as it does for any layer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from pipeplan_launch.tracing.regions import NORMS_WITH_STATE, graphs_of, inner_graphs, operator_name


@dataclass(frozen=True)
class ValueStructure:
    """The arguments or the output of a call, with tensors and symbolic sizes that can be replaced."""

    spec: TreeSpec
    leaves: tuple[Any, ...]
    """The other leaves, in their positions."""
    places: tuple[int, ...]
    """Positions of the tensors, then positions of the sizes that depend on the minibatch size."""

    @staticmethod
    def of(value: Any) -> tuple[ValueStructure, list[Tensor], list[Any]]:
        """(the structure, the tensors in the value, the symbolic sizes in it)."""
        leaves, spec = tree_flatten(value)
        tensors = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        sizes = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.SymInt)]
        places = (*tensors, *sizes)
        kept = tuple(None if index in places else leaf for index, leaf in enumerate(leaves))
        contents = [leaves[index] for index in tensors], [leaves[index] for index in sizes]
        return ValueStructure(spec, kept, places), *contents

    def filled(self, replacements: Sequence[Any]) -> Any:
        """The value with these tensors and sizes."""
        leaves = list(self.leaves)
        for index, replacement in zip(self.places, replacements, strict=True):
            leaves[index] = replacement
        return tree_unflatten(leaves, self.spec)


class OpaqueCall:
    """A callable that makes one call in a graph. It takes and returns tensors and sizes as flat lists."""

    path: str | None = None
    """Path of the module whose forward() is called; None for a function."""

    def __init__(self, kind: str, name: str) -> None:
        # The graph's code and the graph's hash use this name, so it must be the same in every process.
        self.__name__ = self.__qualname__ = re.sub(r"\W", "_", f"{kind}_{name}")

    def __call__(self, *operands: Any) -> list[Tensor]:
        """Make the call on real or fake tensors."""
        raise NotImplementedError


class AutogradFunctionCall(OpaqueCall):
    """A call of a user's `torch.autograd.Function`: export would trace its forward and lose its backward."""

    def __init__(self, apply: Any, function: type, arguments: ValueStructure) -> None:
        super().__init__("function", function.__name__)
        self._apply, self._arguments = apply, arguments
        self.returns: ValueStructure | None = None
        """Structure of its output, once it has run on fake tensors."""

    def __call__(self, *operands: Any) -> list[Tensor]:
        args, kwargs = self._arguments.filled(operands)
        self.returns, tensors, _ = ValueStructure.of(self._apply(*args, **kwargs))
        return tensors


_LIBRARY = torch.library.Library("pipeplan", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define("opaque(Tensor[] tensors, SymInt[] sizes, int call) -> Tensor[]")  # type: ignore[no-untyped-call]
_calls: list[OpaqueCall] = []
"""The calls of the export under way. An operator refers to its call by the index in this list."""


@torch.library.register_fake("pipeplan::opaque", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _fake(tensors: list[Tensor], sizes: list[Any], call: int) -> list[Tensor]:
    return _calls[call](*tensors, *sizes)


def record_call(call: OpaqueCall, tensors: Sequence[Tensor], sizes: Sequence[Any]) -> list[Tensor]:
    """Record a call in the graph that is being exported. Returns the tensors that it makes."""
    _calls.append(call)
    outputs: list[Tensor] = torch.ops.pipeplan.opaque(list(tensors), list(sizes), len(_calls) - 1)
    return outputs


def forget_calls() -> None:
    """Drop the calls of a finished export, and their modules."""
    _calls.clear()


def replace_recorded_calls(graph_module: fx.GraphModule) -> None:
    """Replace each operator by its recorded call, in a graph and in the regions inside it."""
    for module in graph_module.modules():
        if not isinstance(module, fx.GraphModule):
            continue
        for node in module.graph.nodes:
            if _is_opaque_operator(node):
                tensors, sizes, call = node.args
                node.target, node.args = _calls[call], (*tensors, *sizes)
        module.recompile()


def remove_dead_code(graph_module: fx.GraphModule) -> None:
    """Erase nodes that nothing reads and that change nothing, here and in the regions inside.

    Graph.eliminate_dead_code() would not ask `is_impure` about nodes of regions.
    """
    for module in reversed(inner_graphs(graph_module)):
        for node in reversed(module.graph.nodes):
            if not node.users and not is_impure(node):
                module.graph.erase_node(node)
        module.recompile()


def is_impure(node: fx.Node) -> bool:
    """Whether a node, or a graph that it runs, may have side effects, so that it must stay even if nothing reads it."""
    if isinstance(node.target, OpaqueCall) or _is_opaque_operator(node) or node.is_impure():
        return True
    if operator_name(node) in NORMS_WITH_STATE:
        return True
    return any(
        is_impure(inner) for graph in graphs_of(node) for inner in graph.graph.nodes if inner.op == "call_function"
    )


def _is_opaque_operator(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is torch.ops.pipeplan.opaque.default
