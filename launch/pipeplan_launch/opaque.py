"""Calls that stay calls in an exported graph: what torch.export cannot look into, or would lose the gradient of.

While a model is exported, such a call is one operator, `pipeplan::opaque`, of which export only asks the shapes. In the
finished graph an object takes the operator's place. It makes the call as Python does, on the tensors that it is given:
parameters and buffers come first, so that the graph has them as it has those of any layer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten


@dataclass(frozen=True)
class Structure:
    """A value of which the tensors and the sizes can be replaced: arguments of a call, or what it returns."""

    spec: TreeSpec
    leaves: tuple[Any, ...]
    """All else, in its place."""
    places: tuple[int, ...]
    """Of the tensors, then of the sizes that follow from the minibatch size."""

    @staticmethod
    def of(value: Any) -> tuple[Structure, list[Tensor], list[Any]]:
        """(the structure, the tensors in it, the sizes in it)."""
        leaves, spec = tree_flatten(value)
        tensors = [index for index, one in enumerate(leaves) if isinstance(one, Tensor)]
        sizes = [index for index, one in enumerate(leaves) if isinstance(one, torch.SymInt)]
        places = (*tensors, *sizes)
        kept = tuple(None if index in places else one for index, one in enumerate(leaves))
        found = [leaves[index] for index in tensors], [leaves[index] for index in sizes]
        return Structure(spec, kept, places), *found

    def filled(self, given: Sequence[Any]) -> Any:
        """The value with these tensors and sizes."""
        leaves = list(self.leaves)
        for index, one in zip(self.places, given, strict=True):
            leaves[index] = one
        return tree_unflatten(leaves, self.spec)


class Opaque:
    """What stands in a graph for a call. It takes and returns tensors and sizes, one after the other."""

    path: str | None = None
    """Of the module whose forward() the call is; None where it is a function's."""

    def __init__(self, kind: str, name: str) -> None:
        # The code of a graph calls it by this name; so does the hash, which must be the same in every process.
        self.__name__ = self.__qualname__ = re.sub(r"\W", "_", f"{kind}_{name}")

    def __call__(self, *given: Any) -> list[Tensor]:
        """Make the call, on real tensors or on fake ones."""
        raise NotImplementedError


class FunctionCall(Opaque):
    """The call of a user's own `torch.autograd.Function`: export would trace its forward and lose its backward."""

    def __init__(self, apply: Any, function: type, arguments: Structure) -> None:
        super().__init__("function", function.__name__)
        self._apply, self._arguments = apply, arguments
        self.returns: Structure | None = None
        """What it returns, once it has run on fake tensors."""

    def __call__(self, *given: Any) -> list[Tensor]:
        args, kwargs = self._arguments.filled(given)
        self.returns, tensors, _ = Structure.of(self._apply(*args, **kwargs))
        return tensors


_LIBRARY = torch.library.Library("pipeplan", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define("opaque(Tensor[] tensors, SymInt[] sizes, int call) -> Tensor[]")  # type: ignore[no-untyped-call]
_calls: list[Opaque] = []
"""The calls of the export that is under way: the operator says which one it is by its place here."""


@torch.library.register_fake("pipeplan::opaque", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _fake(tensors: list[Tensor], sizes: list[Any], call: int) -> list[Tensor]:
    return _calls[call](*tensors, *sizes)


def record(call: Opaque, tensors: Sequence[Tensor], sizes: Sequence[Any]) -> list[Tensor]:
    """Put a call into the graph that is being exported; the tensors that it makes."""
    _calls.append(call)
    made: list[Tensor] = torch.ops.pipeplan.opaque(list(tensors), list(sizes), len(_calls) - 1)
    return made


def forget() -> None:
    """After an export: let go of its calls, and of the modules in them."""
    _calls.clear()


def put_in_place(graph_module: fx.GraphModule) -> None:
    """Replace the operator by the calls that it stands for, in a graph and in the regions inside."""
    for module in graph_module.modules():
        if not isinstance(module, fx.GraphModule):
            continue
        for node in module.graph.nodes:
            if _is_placeholder_of_call(node):
                tensors, sizes, call = node.args
                node.target, node.args = _calls[call], (*tensors, *sizes)
        module.recompile()


def is_impure(node: fx.Node) -> bool:
    """Whether a node must stay though nobody reads what it makes: Python may do anything."""
    return isinstance(node.target, Opaque) or _is_placeholder_of_call(node) or node.is_impure()


def _is_placeholder_of_call(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is torch.ops.pipeplan.opaque.default
