"""Places the layers of a DAG for a drawing: in ranks from top to bottom, with few crossings, and room for long edges.

The method is that of Sugiyama, Tagawa and Toda (Methods for visual understanding of hierarchical system structures,
1981). A layer lies one rank below the lowest of its inputs. An edge over several ranks has a point in each of them.
Each rank is ordered by the mean position of its neighbours above, then below, several times.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

_SWEEPS = 8
"""Number of times that the ranks are ordered, downwards and upwards in turn."""
PointKey = tuple[str, str, int]
"""Key of a layer (its name twice, and -1) or of a point of an edge (the edge's ends, and the point's rank)."""


@dataclass(frozen=True)
class DagLayout:
    """Positions of layers and edges, as ranks and places within a rank, both counted from 0."""

    place: dict[str, tuple[float, int]]
    """Place and rank of every layer. The places of a narrow rank are centred."""
    paths: dict[tuple[str, str], list[tuple[float, int]]]
    """Points of every edge, from its producer to its consumer."""
    width: int
    """Largest number of layers and edge points in one rank."""
    ranks: int
    """Number of ranks."""


def layout_dag(names: Sequence[str], arrows: Sequence[tuple[str, str]]) -> DagLayout:
    """Place the nodes and edges (producer, consumer) of a DAG."""
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
    return DagLayout(
        place={name: position[name, name, -1] for name in names},
        paths={arrow: [position[key] for key in route] for arrow, route in routes.items()},
        width=width,
        ranks=len(rows),
    )


def _ranks(names: Sequence[str], arrows: Sequence[tuple[str, str]]) -> dict[str, int]:
    """The rank of each node: the length of the longest path to it.

    The search repeats until nothing changes, in case the nodes are not in a topological order.
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
