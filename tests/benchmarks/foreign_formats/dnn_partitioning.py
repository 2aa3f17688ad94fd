"""The JSON of dnn-partitioning (Tarnawski et al., "Efficient Algorithms for Device Placement of DNN Graph Operators",
NeurIPS 2020; github.com/msr-fiddle/dnn-partitioning, README.md "Input format", throughput-dp/dp.cpp `from_json`).

`nodes` have `id`, `fpgaLatency` (the time on an accelerator; "FPGA" stands for any), `cpuLatency`, `size` (bytes on an
accelerator), `isBackwardNode` and, where some must be on one device, `colorClass`. `edges` have `sourceId`, `destId`,
`cost` (the time to move the source's output to host memory) and, in all published files, `size` (its bytes).

What the README leaves open is taken as the published files have it. Their layer graphs are PipeDream's profiles: a
node's `size` is that of its output plus its weights, times are milliseconds, and the edge between two backward nodes
runs beside the forward one and has the output of the layer that it ends at. (`cost` there is in seconds, at 2 GiB/s; it
is read only where an edge has no `size`.) Their operator graphs have weights as nodes
of their own, which take no time and read nothing.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from foreign_formats.assumptions import Assumptions
from foreign_formats.graph_parts import ordered, unique_names, whole_bytes, without_idle
from pipeplan.errors import InputError
from pipeplan.importers.recognise import imported_provenance
from pipeplan.profile_data.layers import Layer, Tensor
from pipeplan.profile_data.profile import Profile
from pipeplan.util import graph
from pipeplan.util.files import Node, read_json

KIND = "dnn-partitioning file"
TOOL = "the input format of dnn-partitioning (NeurIPS 2020)"
WEIGHT_NODES = 0.1
"""Share of forward nodes without time and inputs from which on these are weights and not just a few inputs."""


@dataclass(frozen=True)
class _Operator:
    name: str
    colour: int | None
    backward: bool
    latency_s: float
    size: int


@dataclass
class _Graph:
    operators: dict[int, _Operator]
    edges: list[tuple[int, int, int]]
    """Source, destination and bytes."""
    group: dict[int, int] = field(default_factory=dict)
    """The group of each operator: its colour class, or a group of its own."""
    notes: list[str] = field(default_factory=list)

    def forward(self, number: int) -> bool:
        return not self.operators[number].backward


def read_dnn_partitioning(path: Path, assumptions: Assumptions) -> Profile:
    """Read a workload. Forward and backward nodes of one colour class become one layer.

    Raises `InputError` where the file is malformed, or lacks sizes while no bandwidth is given.
    """
    root = read_json(path, KIND)
    found = _Graph(_operators(root, assumptions.units_per_second), [])
    found.edges = _edges(root, found.operators, assumptions)
    _check_sources(path, found)
    _group(found)
    layers, tensors = _joined(found)
    layers, tensors, gone = without_idle(layers, tensors)
    notes = [
        assumptions.note,
        *found.notes,
    ]
    if gone:
        notes.append(f"{len(gone)} nodes without work, weights or readers were left out")
    return Profile(
        layers=ordered(layers, tensors),
        tensors=tuple(tensors),
        minibatch=assumptions.minibatch,
        model_name=path.stem,
        provenance=imported_provenance(path, TOOL, "", notes),
    )


def _operators(root: Node, units: float) -> dict[int, _Operator]:
    found: dict[int, _Operator] = {}
    for node in root["nodes"].items():
        number, name, colour, size = node["id"].integer(), node.get("name"), node.get("colorClass"), node.get("size")
        if number in found:
            node["id"].fail(f"there are two nodes {number}")
        if not _flag(node["supportedOnFpga"]):
            node["supportedOnFpga"].fail(
                f"node {number} cannot run on the accelerator; a plan has only one kind of device"
            )
        found[number] = _Operator(
            name=name.text() if name else f"node{number}",
            colour=colour.integer(minimum=-(2**63)) if colour else None,
            backward=_flag(node["isBackwardNode"]),
            latency_s=node["fpgaLatency"].number() / units,
            size=whole_bytes(size.number(), size.where) if size else 0,
        )
    if not any(not one.backward for one in found.values()):
        root["nodes"].fail("there are no forward nodes")
    return found


def _flag(node: Node) -> bool:
    """A boolean, or 0 or 1."""
    return node.boolean() if isinstance(node.value, bool) else bool(node.integer())


def _edges(root: Node, operators: dict[int, _Operator], assumptions: Assumptions) -> list[tuple[int, int, int]]:
    found = []
    for node in root["edges"].items():
        source, target = node["sourceId"].integer(), node["destId"].integer()
        for end in (source, target):
            if end not in operators:
                node.fail(f"a dangling edge: there is no node {end}")
        size, cost = node.get("size"), node["cost"].number()
        if size is None and cost and assumptions.bandwidth is None:
            node.fail(
                "the edge has the time of its transfer and no size: give --bandwidth, that of the link between "
                "accelerator and host, as in --bandwidth '12 GB/s'"
            )
        carried = size.number() if size else cost / assumptions.units_per_second * (assumptions.bandwidth or 0.0)
        found.append((source, target, whole_bytes(carried, node.where)))
    return found


def _check_sources(path: Path, found: _Graph) -> None:
    for source, target, _ in found.edges:
        if not found.forward(source) and found.forward(target):
            raise InputError(f"{path}: the edge {source} -- {target} leads from a backward to a forward node")


def _group(found: _Graph) -> None:
    """Number the groups; those that depend on each other both ways become one (as dp.cpp fuses them)."""
    keys: dict[tuple[str, int], int] = {}
    for number, one in found.operators.items():
        key = ("node", number) if one.colour is None else ("colour", one.colour)
        found.group[number] = keys.setdefault(key, len(keys))
    arrows = [(first, second) for first, second, _, _ in _arrows(found)]
    together = graph.strong_components(list(range(len(keys))), arrows)
    number_of = {group: index for index, groups in enumerate(together) for group in groups}
    found.group = {number: number_of[group] for number, group in found.group.items()}
    if len(together) < len(keys):
        found.notes.append("colour classes that depend on each other both ways were joined")


def _arrows(found: _Graph) -> list[tuple[int, int, int, int]]:
    """Tensors between groups: both groups, the producing operator, and its bytes (negative for a gradient).

    A class with only backward nodes passes gradients on. It is placed where its forward nodes would be, by the mirror
    image of its backward edges, and receives nothing in the forward pass.
    """
    with_forward = {found.group[number] for number in found.operators if found.forward(number)}
    arrows = []
    for source, target, size in found.edges:
        first, second = found.group[source], found.group[target]
        if first == second:
            continue
        if found.forward(source) and found.forward(target):
            arrows.append((first, second, source, size))
        elif not found.forward(source) and not {first, second} <= with_forward:
            arrows.append((second, first, source, -size))
    return arrows


def _joined(found: _Graph) -> tuple[list[Layer], list[Tensor]]:
    members: dict[int, list[int]] = defaultdict(list)
    for number, group in found.group.items():
        members[group].append(number)
    main = {
        group: min(numbers, key=lambda number: (not found.forward(number), -found.operators[number].latency_s, number))
        for group, numbers in members.items()
    }
    names = unique_names([(number, found.operators[number].name) for number in main.values()])
    name_of = {group: names[number] for group, number in main.items()}
    weights, kept = _memory(found)
    layers = [
        Layer(
            name=name_of[group],
            op="" if sum(map(found.forward, numbers)) < 2 else f"{sum(map(found.forward, numbers))} nodes",
            forward_s=sum(found.operators[number].latency_s for number in numbers if found.forward(number)),
            backward_s=sum(found.operators[number].latency_s for number in numbers if not found.forward(number)),
            parameter_bytes=sum(weights[number] for number in numbers),
            saved_bytes=sum(kept[number] for number in numbers),
        )
        for group, numbers in sorted(members.items())
    ]
    return layers, _tensors(found, name_of)


def _tensors(found: _Graph, name_of: dict[int, str]) -> list[Tensor]:
    """One tensor for every operator whose output leaves its layer, for any number of readers."""
    training = any(one.backward for one in found.operators.values())
    consumers: dict[tuple[int, bool], dict[int, None]] = defaultdict(dict)
    sizes: dict[tuple[int, bool], int] = defaultdict(int)
    producers: dict[tuple[int, bool], int] = {}
    for first, second, source, size in _arrows(found):
        # A gradient from `source` to `first` is a tensor from `first` to the source's group without forward bytes.
        key = (source, size < 0 or not found.forward(source))
        producers[key] = first
        consumers[key][second] = None
        sizes[key] = max(sizes[key], abs(size))
    names = unique_names([(number, found.operators[number].name) for number, _ in consumers])
    return [
        Tensor(
            name=names[key[0]],
            producer=name_of[producers[key]],
            consumers=tuple(name_of[group] for group in groups),
            bytes=0 if key[1] else sizes[key],
            gradient_bytes=sizes[key] if training else 0,
        )
        for key, groups in consumers.items()
    ]


def _memory(found: _Graph) -> tuple[dict[int, int], dict[int, int]]:
    """Bytes of the weights, and bytes kept for the backward pass, for every operator."""
    read = {target for _, target, _ in found.edges}
    forward = [number for number in found.operators if found.forward(number)]
    held = {n for n in forward if n not in read and not found.operators[n].latency_s and found.operators[n].size}
    weights, kept = dict.fromkeys(found.operators, 0), dict.fromkeys(found.operators, 0)
    if len(held) >= WEIGHT_NODES * len(forward):
        found.notes.append(
            "nodes that take no time and read nothing are weights; the size of others is kept for backward"
        )
        for number in forward:
            (weights if number in held else kept)[number] = found.operators[number].size
        return weights, kept
    outputs = _outputs(found)
    unknown = []
    for number in forward:
        size = found.operators[number].size
        kept[number] = min(size, outputs.get(number, size))
        weights[number] = size - kept[number]
        if number not in outputs and size and found.operators[number].latency_s:
            unknown.append(found.operators[number].name)
    found.notes.append("the size of a node is its output, which is kept for backward, and beyond that weights")
    if unknown:
        found.notes.append(
            f"of {', '.join(unknown[:3])} the output is not known: all its size is taken for kept, not weights"
        )
    return weights, kept


def _outputs(found: _Graph) -> dict[int, int]:
    """Output bytes of forward nodes: by their edges or, for nodes without, by the edge in the backward graph."""
    outputs: dict[int, int] = {}
    forward_of = {found.group[number]: number for number in reversed(found.operators) if found.forward(number)}
    for source, target, size in found.edges:
        if found.forward(source) and found.forward(target):
            outputs[source] = max(outputs.get(source, 0), size)
    beside: dict[int, set[int]] = defaultdict(set)
    for source, target, size in found.edges:
        if not found.forward(source) and not found.forward(target) and found.group[target] in forward_of:
            beside[forward_of[found.group[target]]].add(size)
    agree = all(sizes == {outputs[number]} for number, sizes in beside.items() if number in outputs)
    for number, sizes in beside.items():
        if agree and number not in outputs and len(sizes) == 1:
            outputs[number] = sizes.pop()
    return outputs
