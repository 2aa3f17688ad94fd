"""Group the nodes of an exported graph into layers.

Each call of a leaf module is one layer, and so is each operator outside leaf modules. Shape operators (`view`,
`flatten`, picking a member of a tuple) belong to the layer whose output they view. Values that every stage computes for
itself (`duplicated_constants.py`: masks, positions, sizes) belong to no layer.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter

from torch import Tensor, fx, nn

from pipeplan_launch.tracing.aliasing import GraphBehaviour
from pipeplan_launch.tracing.duplicated_constants import copied_nodes, is_shape_only
from pipeplan_launch.tracing.opaque_calls import OpaqueCall
from pipeplan_launch.tracing.regions import module_calls, operator_name

CONTAINER_PACKAGE = "torch.nn.modules.container"
"""Torch's module for lists, dictionaries and sequences of modules. User classes derived from them are defined
elsewhere."""
LOSS_LAYER = "loss"
"""The last layer, which consumes the model's outputs."""


@dataclass(frozen=True)
class LayerInfo:
    """One layer: the unit that a plan assigns to stages."""

    name: str
    """Unique name: the module's path, followed by the operator if it is outside leaf modules, and by `#2` … on
    repeated calls."""
    module: str
    """Path of the module that was called."""
    op: str
    """The module's class, or the operator."""
    parameters: tuple[str, ...] = ()
    """Names of the parameters that it reads."""
    buffers: tuple[str, ...] = ()
    """Names of the buffers that it reads or writes."""


@dataclass(frozen=True)
class Grouping:
    """The layers in topological order, and the nodes of each."""

    names: tuple[str, ...]
    modules: dict[str, tuple[str, str]]
    """For each layer: the path of its module, and the module's class or the operator."""
    layer_of: dict[fx.Node, str]
    """The layer of every node that belongs to one; the output node belongs to `loss`."""


def group_layers(
    graph_module: fx.GraphModule, model: nn.Module, behaviour: GraphBehaviour, granularity: str = "layer"
) -> Grouping:
    """Assign every node that does work to a layer, so that the layers form a DAG.

    With granularity `op` every operator is a layer. With `module` a layer is the outermost member of a list, dictionary
    or sequence of modules around an operator, if the member is not such a container itself: for example a block of a
    transformer, with its experts. Elsewhere it is the call of a leaf module, as with `layer`.
    """
    nodes = list(graph_module.graph.nodes)
    copied = copied_nodes(graph_module, behaviour)
    work = [node for node in nodes if node.op == "call_function" and node not in copied]
    key_of: dict[fx.Node, Hashable] = {}
    for node in work:
        key_of[node] = _key(node, key_of, _leaf_call(node, model, granularity))
    order, component_of = _contract(work, key_of, behaviour)
    namer = _Namer()
    name_of: dict[int, str] = {}
    modules: dict[str, tuple[str, str]] = {}
    first = {component: node for node in reversed(work) for component in [component_of[node]]}
    for component in order:
        path, op, label = _describe(first[component], model, granularity)
        name_of[component] = namer.unique(label)
        modules[name_of[component]] = (path, op)
    layer_of = {node: name_of[component_of[node]] for node in work}
    layer_of[nodes[-1]] = LOSS_LAYER
    modules[LOSS_LAYER] = ("", LOSS_LAYER)
    return Grouping((*(name_of[component] for component in order), LOSS_LAYER), modules, layer_of)


class _Namer:
    """Gives each layer a unique name."""

    def __init__(self) -> None:
        self.taken = {LOSS_LAYER}
        self.calls: dict[str, int] = defaultdict(int)

    def unique(self, label: str) -> str:
        """The label itself, or the label with `#2`, `#3` … if it is taken."""
        while True:
            self.calls[label] += 1
            name = label if self.calls[label] == 1 else f"{label}#{self.calls[label]}"
            if name not in self.taken:
                self.taken.add(name)
                return name


def _leaf_call(node: fx.Node, model: nn.Module, granularity: str) -> tuple[str, str] | None:
    """(identity of the call, module path) of the outermost module around the node that counts as one layer."""
    if granularity == "op":
        return _opaque_call(node)
    for call, path in module_calls(node).items():
        if not path or not _has_module(model, path):
            continue
        module = model.get_submodule(path)
        home = type(module).__module__
        if granularity == "module" and not home.startswith(CONTAINER_PACKAGE) and _is_member(model, path):
            return call, path
        composite = home.startswith((CONTAINER_PACKAGE, "torch.nn.modules.transformer", "torch.nn.parallel"))
        if (home.startswith("torch.nn.") and not composite) or not any(True for _ in module.children()):
            return call, path
    return _opaque_call(node)


def _opaque_call(node: fx.Node) -> tuple[str, str] | None:
    """(identity of the call, module path) of an opaque module, or None for any other node."""
    if not isinstance(node.target, OpaqueCall) or node.target.path is None:
        return None
    return f"{node.target.path} as {node.name}", node.target.path


def _is_member(model: nn.Module, path: str) -> bool:
    """Whether a module is a member of a list, dictionary or sequence of modules."""
    container = model.get_submodule(path.rpartition(".")[0])
    return type(container).__module__.startswith(CONTAINER_PACKAGE)


def _has_module(model: nn.Module, path: str) -> bool:
    try:
        model.get_submodule(path)
    except AttributeError:
        return False
    return True


def _key(node: fx.Node, key_of: dict[fx.Node, Hashable], leaf: tuple[str, str] | None) -> Hashable:
    """The identity of a node's layer: for a shape operator, the layer of the viewed tensor; for any other node, its
    leaf call, or the node itself.
    """
    producers = [argument for argument in node.all_input_nodes if argument in key_of]
    if is_shape_only(node) and len(producers) == 1:
        return key_of[producers[0]]
    return leaf[0] if leaf is not None else node


def _describe(node: fx.Node, model: nn.Module, granularity: str) -> tuple[str, str, str]:
    """(module path, class or operator, label) of the layer that starts with this node."""
    leaf = _leaf_call(node, model, granularity)
    if leaf is not None:
        path = leaf[1]
        return path, type(model.get_submodule(path)).__name__, path
    stack = [*module_calls(node).values()]
    path = stack[-1] if stack and _has_module(model, stack[-1]) else ""
    op = operator_name(node)
    return path, op, f"{path}.{op}" if path else op


def _contract(
    work: list[fx.Node], key_of: dict[fx.Node, Hashable], behaviour: GraphBehaviour
) -> tuple[list[int], dict[fx.Node, int]]:
    """Merge keys that lie on a cycle. Returns the merged components in topological order, earliest node first, and
    the component of each node.
    """
    number: dict[Hashable, int] = {}
    for node in work:
        number.setdefault(key_of[node], len(number))
    arrows: set[tuple[int, int]] = set()
    for node in work:
        target = number[key_of[node]]
        for argument in node.all_input_nodes:
            if argument in key_of and number[key_of[argument]] != target:
                arrows.add((number[key_of[argument]], target))
                if not isinstance(behaviour.values[argument], Tensor):
                    # A list or a number cannot be sent to another stage, so the reader joins the producer's layer.
                    arrows.add((target, number[key_of[argument]]))
    component = strong_components(len(number), arrows)
    component_of = {node: component[number[key_of[node]]] for node in work}
    between = {(component[a], component[b]) for a, b in arrows if component[a] != component[b]}
    return topological_order(set(component), between), component_of


def strong_components(count: int, arrows: Iterable[tuple[int, int]]) -> list[int]:
    """Kosaraju's algorithm: for each of the nodes 0 … count-1, the smallest node on a common cycle, or itself."""
    successors: dict[int, list[int]] = defaultdict(list)
    predecessors: dict[int, list[int]] = defaultdict(list)
    for source, target in arrows:
        successors[source].append(target)
        predecessors[target].append(source)
    finished = [node for tree in _depth_first_trees(range(count), successors) for node in tree]
    component = [0] * count
    for members in _depth_first_trees(reversed(finished), predecessors):
        for member in members:
            component[member] = min(members)
    return component


def _depth_first_trees(roots: Iterable[int], following: Mapping[int, Sequence[int]]) -> list[list[int]]:
    """The trees of a depth-first search from these roots in turn. Each tree lists its nodes in postorder."""
    trees: list[list[int]] = []
    seen: set[int] = set()
    for root in roots:
        tree, stack = [], [(root, False)]
        while stack:
            node, is_finished = stack.pop()
            if is_finished:
                tree.append(node)
            elif node not in seen:
                seen.add(node)
                stack += [(node, True), *((other, False) for other in following.get(node, ()))]
        trees += [tree] if tree else []
    return trees


def topological_order(nodes: Iterable[int], arrows: Iterable[tuple[int, int]]) -> list[int]:
    """A topological order that takes the smallest node whenever there is a choice."""
    sorter = TopologicalSorter[int](dict.fromkeys(nodes, ()))
    for source, target in arrows:
        sorter.add(target, source)
    sorter.prepare()
    ready: list[int] = []
    order = []
    while sorter.is_active():
        for node in sorter.get_ready():
            heapq.heappush(ready, node)
        order.append(heapq.heappop(ready))
        sorter.done(order[-1])
    return order
