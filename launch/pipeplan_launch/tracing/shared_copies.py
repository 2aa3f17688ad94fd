"""Copied values that several layers read. The first of these layers computes the value and passes it to the others.

A stage computes each copied value once, however many of its layers read it. A profiler, which runs the layers one by
one, must do the same: otherwise a mask would count once for every layer that reads it.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from torch import Tensor, fx

from pipeplan_launch.tracing.duplicated_constants import is_shape_only, is_size
from pipeplan_launch.tracing.trace import TensorSpec, TracedModel, dimension_of


@dataclass(frozen=True)
class SharedCopies:
    """Copied tensors, and the node that makes each of them."""

    tensors: tuple[TensorSpec, ...]
    """`producer` is the first layer that needs the tensor, `consumers` are the later ones."""
    node_of: dict[str, fx.Node]


def shared_copies(traced: TracedModel) -> SharedCopies:
    """The copied tensors of the model that more than one layer needs, if the layers run in order."""
    nodes_of: dict[str, list[fx.Node]] = defaultdict(list)
    for node in traced.graph_module.graph.nodes:
        if node in traced.layer_of:
            nodes_of[traced.layer_of[node]].append(node)
    maker_of: dict[fx.Node, str] = {}
    readers: dict[fx.Node, list[str]] = {}
    for layer in traced.layers:
        known, fresh = _copies_behind(nodes_of[layer.name], traced, maker_of)
        for node in known:
            readers.setdefault(node, []).append(layer.name)
        maker_of.update(dict.fromkeys(fresh, layer.name))
    specs = {node: _spec(node, maker_of[node], names) for node, names in readers.items()}
    return SharedCopies(tuple(specs.values()), {spec.name: node for node, spec in specs.items()})


def _copies_behind(
    nodes: list[fx.Node], traced: TracedModel, made: dict[fx.Node, str]
) -> tuple[list[fx.Node], list[fx.Node]]:
    """(the tensors in `made` that these nodes of a layer read, the copied tensors that the layer must compute)."""
    known, fresh = [], []
    waiting = [argument for node in nodes for argument in node.all_input_nodes]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if node.op != "call_function" or node in traced.layer_of or is_size(node):
            continue
        if node in made:
            known.append(node)
            continue
        if _is_made(node):
            fresh.append(node)
        members = [user for user in node.users if not isinstance(node.meta.get("val"), Tensor)]
        behind = [other for other in (*node.all_input_nodes, *members) if other not in seen]
        seen.update(behind)
        waiting += behind
    return known, fresh


def _is_made(node: fx.Node) -> bool:
    """Whether the node makes a new tensor, alone or as a member of a tuple, and not only a view."""
    source = node.args[0] if node.args else None
    if is_shape_only(node) and isinstance(source, fx.Node) and isinstance(source.meta.get("val"), Tensor):
        return False
    return isinstance(node.meta.get("val"), Tensor)


def _spec(node: fx.Node, maker: str, readers: list[str]) -> TensorSpec:
    value = node.meta["val"]
    # No tensor of the model has such a name: its parts begin with a letter, a digit or an underscore.
    return TensorSpec(
        f"::{node.name}", maker, tuple(readers), value.dtype, False, tuple(map(dimension_of, value.shape))
    )
