"""The drawing of a model as a DAG. The drawing runs from left to right, and wraps like lines of text.

Layers are drawn in groups: as chains in a large model, as equal blocks in a very large model. The layers of a group are
consecutive in a topological order and in one stage, so no arrow can point backwards.

The layout is by Sugiyama, Tagawa and Toda (Methods for visual understanding of hierarchical system structures,
1981). A node lies one rank after its last input. A long edge has a point in each rank that it crosses. Each rank is
ordered several times by the mean position of its neighbours, alternately those before and those after.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeplan.drawing.fold_chains import Chain, fold_chains, most_expensive_layers, repeated_blocks
from pipeplan.profile_data.layers import Layer, edges
from pipeplan.profile_data.profile import Profile
from pipeplan.util.text import one_line

MAX_SINGLE_LAYERS, MAX_NODES = 120, 400
"""Largest number of layers that are drawn separately, and largest number of nodes of a drawing."""
NODE_SIZE = (150.0, 34.0)
"""Width and height of a node."""
NODE_DISTANCE = (182.0, 50.0)
"""Distance between two ranks, and between two nodes of a rank."""
LINE_GAP = 44.0
"""Distance between two lines of ranks."""
_SWEEPS = 8
"""Number of times that the ranks are ordered, forwards and backwards in turn."""
PointKey = tuple[str, str, int]
"""Key of a layer (its name twice, and -1) or of a point of an edge (the edge's ends, and the point's rank)."""
Place = tuple[float, int]
"""Place within a rank, and the rank, both counted from 0."""
RANKS_IN_LINE = 6
"""Number of ranks side by side that fill the width of the page."""
_NAMES = ("name", "op", "layers", "stage", "x", "y", "forward_s", "backward_s", "parameter_bytes", "output_bytes")


@dataclass(frozen=True)
class ModelGraph:
    """The layers, or groups of layers, with their positions in the drawing."""

    width: float
    height: float
    w: float
    h: float
    """Width (`w`) and height (`h`) of every node."""
    nodes: dict[str, list[Any]]
    """Columns: name, op, layers (their number), stage, x, y, forward_s, backward_s, parameter_bytes, output_bytes."""
    edges: list[tuple[int, int]]
    bends: list[list[float]]
    """For edges with bends: [edge, x1, y1, x2, y2, …], from producer to consumer."""
    note: str


@dataclass(frozen=True)
class LayerGroup:
    """Layers of one stage that are drawn as one node."""

    layers: tuple[Layer, ...]
    stage: int


def layer_groups(profile: Profile, stage_of: Mapping[str, int]) -> tuple[list[LayerGroup], str]:
    """(nodes of the drawing in a topological order, sentence on their grouping; empty without grouping)."""
    if len(profile.layers) <= MAX_SINGLE_LAYERS:
        return [LayerGroup((layer,), stage_of[layer.name]) for layer in profile.layers], ""
    nodes = _by_stage(fold_chains(profile, most_expensive_layers(profile)), stage_of)
    note = "Consecutive layers of one stage are drawn as one node, except for the most expensive layers."
    if len(nodes) > MAX_NODES:
        nodes = _by_stage(_folded(fold_chains(profile)), stage_of)
        note = "Consecutive layers of one stage, and equal blocks, are drawn as one node."
    if len(nodes) > MAX_NODES:
        nodes = list(_packed(nodes, -(-len(nodes) // MAX_NODES)))
    return nodes, note if len(nodes) < len(profile.layers) else ""


def _by_stage(runs: Iterable[Chain | Sequence[Layer]], stage_of: Mapping[str, int]) -> list[LayerGroup]:
    """The runs of layers as groups, split between layers of different stages."""
    made = []
    for run in runs:
        layers = run.layers if isinstance(run, Chain) else run
        for stage, members in itertools.groupby(layers, key=lambda layer: stage_of[layer.name]):
            made.append(LayerGroup(tuple(members), stage))
    return made


def _folded(plain: Sequence[Chain]) -> Iterator[Sequence[Layer]]:
    """The layers of each chain, except that all repetitions of a block form a single run of layers."""
    at = 0
    for repeat in repeated_blocks(plain):
        first = repeat.start + repeat.period
        yield from (chain.layers for chain in plain[at:first])
        yield [layer for chain in plain[first : repeat.end] for layer in chain.layers]
        at = repeat.end
    yield from (chain.layers for chain in plain[at:])


def _packed(nodes: Sequence[LayerGroup], most: int) -> Iterator[LayerGroup]:
    """Merge up to `most` consecutive groups of one stage."""
    for stage, same_stage in itertools.groupby(nodes, key=lambda group: group.stage):
        members = list(same_stage)
        for at in range(0, len(members), most):
            yield LayerGroup(tuple(layer for group in members[at : at + most] for layer in group.layers), stage)


def layout_dag(
    names: Sequence[str], arrows: Sequence[tuple[str, str]]
) -> tuple[dict[str, Place], dict[tuple[str, str], list[Place]], int]:
    """(place of every node, points of every edge from its producer to its consumer, number of ranks) of a DAG.

    `arrows` are the edges, as (producer, consumer). The nodes and points of a narrow rank are centred.
    """
    rank = _ranks(names, arrows)
    rows: list[list[PointKey]] = [[] for _ in range(max(rank.values()) + 1)]
    for name in names:
        rows[rank[name]].append((name, name, -1))
    above: dict[PointKey, list[PointKey]] = defaultdict(list)
    below: dict[PointKey, list[PointKey]] = defaultdict(list)
    routes = {}
    for source, target in arrows:
        points: list[PointKey] = [(source, target, position) for position in range(rank[source] + 1, rank[target])]
        for point in points:
            rows[point[2]].append(point)
        route = [(source, source, -1), *points, (target, target, -1)]
        routes[source, target] = route
        for upper, lower in itertools.pairwise(route):
            below[upper].append(lower)
            above[lower].append(upper)
    _untangle(rows, above, below)
    width = max(map(len, rows))
    position = {
        key: (place + (width - len(row)) / 2, number)
        for number, row in enumerate(rows)
        for place, key in enumerate(row)
    }
    paths = {arrow: [position[key] for key in route] for arrow, route in routes.items()}
    return {name: position[name, name, -1] for name in names}, paths, len(rows)


def _ranks(names: Sequence[str], arrows: Sequence[tuple[str, str]]) -> dict[str, int]:
    """The rank of each node: the length of the longest path to it.

    The computation repeats until nothing changes, in case the nodes are not in a topological order.
    """
    rank = dict.fromkeys(names, 0)
    changed = True
    while changed:
        changed = False
        for source, target in arrows:
            if rank[target] <= rank[source]:
                rank[target], changed = rank[source] + 1, True
    read = {target for _, target in arrows}
    first: dict[str, int] = {}
    for source, target in arrows:
        first[source] = min(first.get(source, rank[target]), rank[target])
    # A layer without inputs is placed one rank above its first consumer, not at the top.
    return {name: first[name] - 1 if name in first and name not in read else at for name, at in rank.items()}


def _untangle(
    rows: list[list[PointKey]], above: dict[PointKey, list[PointKey]], below: dict[PointKey, list[PointKey]]
) -> None:
    """Order each rank by the mean position of its neighbours, in place."""
    where: dict[PointKey, float] = {}
    for row in rows:
        where.update({key: place - (len(row) - 1) / 2 for place, key in enumerate(row)})
    for sweep in range(_SWEEPS):
        joined = above if sweep % 2 == 0 else below
        for row in rows if sweep % 2 == 0 else reversed(rows):
            mean = {key: sum(where[other] for other in joined[key]) / len(joined[key]) for key in row if joined[key]}
            row.sort(key=lambda key: mean.get(key, where[key]))
            where.update({key: place - (len(row) - 1) / 2 for place, key in enumerate(row)})


class _Lines:
    """Coordinates of ranks and places in a drawing that wraps after a number of ranks.

    The height of a line of ranks depends on its nodes and edges.
    """

    def __init__(self, places: Iterable[Place], ranks: int) -> None:
        self.ranks = ranks
        used: dict[int, list[float]] = defaultdict(list)
        for place, rank in places:
            used[rank // ranks].append(place)
        self._first = [min(used[line]) for line in range(len(used))]
        heights = [(max(used[line]) - min(used[line])) * NODE_DISTANCE[1] + NODE_SIZE[1] for line in range(len(used))]
        self._tops = list(itertools.accumulate((height + LINE_GAP for height in heights), initial=0.0))

    @property
    def height(self) -> float:
        """Height of all lines together."""
        return self._tops[-1] - LINE_GAP

    def corner(self, place: float, rank: int) -> tuple[float, float]:
        """Left and top edge of a node."""
        line, at = divmod(rank, self.ranks)
        return at * NODE_DISTANCE[0], self._tops[line] + (place - self._first[line]) * NODE_DISTANCE[1]

    def middle(self, place: float, rank: int) -> tuple[float, float]:
        """The middle of a node, or a point of an edge."""
        x, y = self.corner(place, rank)
        return x + NODE_SIZE[0] / 2, y + NODE_SIZE[1] / 2

    def around(self, upper: Place, lower: Place) -> list[tuple[float, float]]:
        """Points of an edge from the end of a line back to the start of the next line; none within a line."""
        line = lower[1] // self.ranks
        if upper[1] // self.ranks == line:
            return []
        between = self._tops[line] - LINE_GAP / 2
        return [
            (self.ranks * NODE_DISTANCE[0] - (NODE_DISTANCE[0] - NODE_SIZE[0]) / 2, between),
            (-(NODE_DISTANCE[0] - NODE_SIZE[0]) / 2, between),
        ]


def model_graph(profile: Profile, nodes: Sequence[LayerGroup], note: str = "") -> ModelGraph:
    """The drawing of these groups of a profile's layers."""
    node_of = {layer.name: str(number) for number, group in enumerate(nodes) for layer in group.layers}
    arrows = dict.fromkeys((node_of[source], node_of[target]) for source, target in edges(profile.tensors))
    names = [str(number) for number in range(len(nodes))]
    place, paths, ranks = layout_dag(names, [arrow for arrow in arrows if arrow[0] != arrow[1]])
    lines = _Lines([*place.values(), *itertools.chain.from_iterable(paths.values())], RANKS_IN_LINE)
    bends = []
    for edge, points in enumerate(paths.values()):
        passed: list[tuple[float, float]] = []
        for upper, lower in itertools.pairwise(points):
            passed += lines.around(upper, lower)
            passed += [lines.middle(*lower)] if lower is not points[-1] else []
        if passed:
            bends.append([float(edge), *(value for point in passed for value in point)])
    corners = [lines.corner(*place[name]) for name in names]
    return ModelGraph(
        width=min(ranks, lines.ranks) * NODE_DISTANCE[0] - (NODE_DISTANCE[0] - NODE_SIZE[0]),
        height=lines.height,
        w=NODE_SIZE[0],
        h=NODE_SIZE[1],
        nodes=dict(zip(_NAMES, map(list, zip(*_rows(profile, nodes, corners), strict=True)), strict=True)),
        edges=[(int(producer), int(consumer)) for producer, consumer in paths],
        bends=bends,
        note=note,
    )


def _rows(
    profile: Profile, nodes: Sequence[LayerGroup], corners: Sequence[tuple[float, float]]
) -> list[Sequence[object]]:
    made = profile.made_bytes()
    rows: list[Sequence[object]] = []
    for group, (x, y) in zip(nodes, corners, strict=True):
        first, last = one_line(group.layers[0].name), one_line(group.layers[-1].name)
        inside = {layer.name for layer in group.layers}
        rows.append(
            (
                first if len(group.layers) == 1 else f"{first} … {last}",
                one_line(group.layers[0].op) if len(group.layers) == 1 else f"{len(group.layers)} layers",
                len(group.layers),
                group.stage,
                x,
                y,
                sum(layer.forward_s for layer in group.layers),
                sum(layer.backward_s for layer in group.layers),
                sum(layer.weight_bytes for layer in group.layers),
                made[group.layers[0].name] if len(inside) == 1 else _outgoing_bytes(profile, inside),
            )
        )
    return rows


def _outgoing_bytes(profile: Profile, inside: set[str]) -> int:
    """Bytes of the tensors of these layers that other layers read."""
    return sum(
        tensor.bytes
        for tensor in profile.tensors
        if tensor.producer in inside and any(reader not in inside for reader in tensor.consumers)
    )
