"""Finds nested levels of workers by clear gaps in the rates between pairs of workers.

Pairs of workers are joined in the order of their rates, fastest first, if the join connects two groups (a maximum
spanning tree, or single linkage). In a cluster of several levels the rates of these joins fall in steps, and a step by
a factor of `GAP` or more ends a level. The slowest such step splits all workers into components. Each component is
split again separately, so that a fast and a slow server do not become two levels.

The server of each worker is also known. Plans are launched by server, so the server is always a level, even if there is
no gap in the rates. Levels whose components cross the edges of servers are left out. Levels whose components have
unequal numbers of parts are left out as well, because a cluster file cannot describe them.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from pipeplan.errors import InputError
from pipeplan.util.text import number_ranges

GAP = 1.7
"""Smallest ratio of the slowest rate of a level to the fastest rate of the next level."""

Component = tuple[int, ...]
Partition = tuple[Component, ...]
"""Components in the order of their lowest ranks."""
Join = tuple[float, int, int]
"""A join of two workers: (bytes/s, one worker, the other worker)."""


@dataclass(frozen=True)
class Nesting:
    """Nested levels, innermost first."""

    partitions: tuple[Partition, ...]
    """The components of each level. The last level has one component of all workers."""
    names: tuple[str, ...]
    server: int
    """Index of the level of servers."""
    notes: tuple[str, ...] = ()
    """Messages on groups of workers that do not form a level."""

    def below(self, level: int) -> Partition:
        """The components that a level joins: those of the level below, or single workers."""
        workers = [rank for component in self.partitions[level] for rank in component]
        return self.partitions[level - 1] if level else tuple((rank,) for rank in sorted(workers))


def find_levels(rates: Mapping[tuple[int, int], float], places: Sequence[Hashable], *, islands: bool = True) -> Nesting:
    """Find the levels of workers 0 … D-1 from the rates of pairs, in bytes/s, and the server of each worker.

    The pairs must connect all workers. `islands` allows levels inside a server; processes that may run on any core have
    none. Raises `InputError` if the ranks of a component are not consecutive.
    """
    ranks_at: dict[Hashable, list[int]] = {}
    for rank, place in enumerate(places):
        ranks_at.setdefault(place, []).append(rank)
    servers = tuple(sorted(tuple(ranks) for ranks in ranks_at.values()))
    _check_order(servers, "of one server", places)
    everyone = (tuple(range(len(places))),)
    notes: list[str] = []
    partitions = [servers, everyone]
    partition: Partition = everyone
    while True:
        finer = _split_all(partition, rates)
        if finer == partition:
            break
        partition = finer
        if _refines(servers, partition) or (islands and _refines(partition, servers)):
            partitions.append(partition)
        elif not _refines(partition, servers):
            notes.append(f"{_shown(partition)} are near each other, across the edges of servers")
    chain = sorted(set(partitions), key=len, reverse=True)
    at = chain.index(servers)
    inside, outside = _regular_inside(chain[:at], servers, notes), _regular_outside(chain[at:], notes)
    for partition in (*inside, *outside):
        _check_order(partition, "that are near each other", places)
    names = [f"island {number}" if len(inside) > 1 else "island" for number in range(1, len(inside) + 1)]
    above = [f"group {number}" if len(outside) > 3 else "group" for number in range(1, len(outside) - 1)]
    names += ["server", *above, *(["cluster"] if len(outside) > 1 else [])]
    return Nesting((*inside, *outside), tuple(names), len(inside), tuple(notes))


def _split_all(partition: Partition, rates: Mapping[tuple[int, int], float]) -> Partition:
    """Split every component at its slowest clear gap.

    A component without a clear gap is split at a smaller gap, if it has one at the median rate of the others' gaps.
    """
    joins = [_joins(component, rates) for component in partition]
    # The number of joins before the slowest gap; 0 if there is none.
    ends = [
        max((number for number, (a, b) in enumerate(itertools.pairwise(edges), 1) if a[0] >= GAP * b[0]), default=0)
        for edges in joins
    ]
    gap_rates = [math.sqrt(edges[end - 1][0] * edges[end][0]) for edges, end in zip(joins, ends, strict=True) if end]
    if not gap_rates:
        return partition
    parts: list[Component] = []
    for component, edges, end in zip(partition, joins, ends, strict=True):
        if not end:
            fast = sum(join[0] > statistics.median(gap_rates) for join in edges)
            end = (
                fast if 0 < fast < len(edges) and edges[fast - 1][0] >= math.sqrt(GAP) * edges[fast][0] else len(edges)
            )
        parts += _joined(component, edges[:end])
    return tuple(sorted(parts))


def _joins(component: Component, rates: Mapping[tuple[int, int], float]) -> list[Join]:
    """The edges of a component's maximum spanning tree, fastest first."""
    members, home = set(component), {rank: rank for rank in component}
    edges = [(rate, *pair) for pair, rate in rates.items() if members.issuperset(pair)]
    joins = []
    for rate, first, second in sorted(edges, reverse=True):
        if home[first] != home[second]:
            joins.append((rate, first, second))
            old, new = home[second], home[first]
            home = {rank: new if at == old else at for rank, at in home.items()}
    assert len(joins) == len(component) - 1, "some workers are in no measured pair"
    return joins


def _joined(component: Component, joins: Sequence[Join]) -> list[Component]:
    home = {rank: [rank] for rank in component}
    for _, first, second in joins:
        together = home[first] + home[second]
        for rank in together:
            home[rank] = together
    return sorted({tuple(sorted(part)) for part in home.values()})


def _refines(finer: Partition, coarser: Partition) -> bool:
    home = {rank: number for number, component in enumerate(coarser) for rank in component}
    return all(len({home[rank] for rank in component}) == 1 for component in finer)


def _regular_inside(chain: Sequence[Partition], servers: Partition, notes: list[str]) -> list[Partition]:
    """The levels inside servers whose components all have equal sizes, if all servers have equal sizes."""
    kept: list[Partition] = []
    for partition in chain:
        sizes = {len(component) for component in partition}
        per_server = {len(server) for server in servers}
        if len(sizes) == 1 and len(per_server) == 1 and sizes != {1}:
            kept.append(partition)
        elif sizes != {1}:
            notes.append(
                f"{_shown(partition)} are near each other, which a cluster file cannot state for servers that differ"
            )
    return kept


def _regular_outside(chain: Sequence[Partition], notes: list[str]) -> list[Partition]:
    """The level of servers, and the levels above it whose components all join the same number of components."""
    kept = [chain[0]]
    for partition in chain[1:]:
        joined = {sum(set(inner) <= set(component) for inner in kept[-1]) for component in partition}
        if len(joined) == 1:
            kept.append(partition)
        else:
            why = "faster cards, or a level of unequal numbers of servers, which a cluster file cannot state"
            notes.append(f"{_shown(partition)} are near each other: {why}")
    return kept


def _check_order(partition: Partition, which: str, places: Sequence[Hashable]) -> None:
    """Raise `InputError` unless every component has consecutive ranks, because plans rely on this."""
    if all(component[-1] - component[0] == len(component) - 1 for component in partition):
        return
    order = ",".join(str(rank) for component in partition for rank in component)
    if len(set(places)) == 1:
        how = f"set CUDA_VISIBLE_DEVICES={order}, here and where plans run"
    else:
        how = (
            f"start them in the order {order} (torchrun numbers each server's one after the other; srun: "
            "--distribution=block)"
        )
    raise InputError(f"workers {which} must have consecutive ranks, and have {_shown(partition)}: {how}")


def _shown(partition: Partition) -> str:
    """A partition as text, `0-3 | 4-7`, with at most four components."""
    return " | ".join(map(number_ranges, partition[:4])) + (" | …" if len(partition) > 4 else "")
