"""Directed graphs over small sets of nodes: topological order, cycles, strong components, and ideals (down-sets).

An ideal is a set of nodes that contains every predecessor of its members. The cuts of a model are its ideals: the set
of layers that a pipeline has computed before a boundary. Ideals are represented as Python integers; bit i stands for
node i.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import TypeVar

from pipeplan.errors import PipeplanError
from pipeplan.util.deadline import NO_DEADLINE, Deadline

Key = TypeVar("Key", bound=str | int)


class TooManyIdeals(PipeplanError):
    """The graph has more ideals than the caller's limit."""


def strong_components(nodes: Sequence[Key], edges: Iterable[tuple[Key, Key]]) -> list[list[Key]]:
    """Strongly connected components, in a topological order of the condensation.

    The members of a component keep the order of `nodes`. Components without edges between them also keep it, if
    possible. Source: Tarjan, Depth-first search and linear graph algorithms, SIAM Journal on Computing,
    1972, implemented without recursion.
    """
    position = {node: index for index, node in enumerate(nodes)}
    successors: dict[Key, list[Key]] = {node: [] for node in nodes}
    for source, target in edges:
        successors[source].append(target)
    for following in successors.values():
        # The result is reversed at the end, so visiting the last node first keeps the order of `nodes`.
        following.sort(key=position.__getitem__, reverse=True)
    index: dict[Key, int] = {}
    low: dict[Key, int] = {}
    stack: list[Key] = []
    on_stack: set[Key] = set()
    components: list[list[Key]] = []
    for root in reversed(nodes):
        if root in index:
            continue
        work: list[tuple[Key, int]] = [(root, 0)]
        while work:
            node, step = work.pop()
            if step == 0:
                index[node] = low[node] = len(index)
                stack.append(node)
                on_stack.add(node)
            elif (child := successors[node][step - 1]) in on_stack:
                low[node] = min(low[node], low[child])
            if step < len(successors[node]):
                work.append((node, step + 1))
                child = successors[node][step]
                if child not in index:
                    work.append((child, 0))
                continue
            if low[node] == index[node]:
                members = [stack.pop()]
                while members[-1] != node:
                    members.append(stack.pop())
                on_stack.difference_update(members)
                components.append(sorted(members, key=position.__getitem__))
    components.reverse()
    return components


def find_cycle(nodes: Iterable[Key], edges: Iterable[tuple[Key, Key]]) -> list[Key]:
    """The nodes of one cycle, with its first node repeated at the end; an empty list if there is no cycle."""
    sorter = TopologicalSorter[Key](dict.fromkeys(nodes, ()))
    for source, target in edges:
        sorter.add(target, source)
    try:
        sorter.prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def ideals(count: int, edges: Iterable[tuple[int, int]], limit: int, deadline: Deadline = NO_DEADLINE) -> list[int]:
    """All ideals of a DAG on nodes 0 … count-1, as bit sets, from the empty set to the set of all nodes.

    The ideals are ordered by size and then by value, so a proper subset always precedes its superset. Raises
    `TooManyIdeals` if there are more than `limit`, and `OutOfTime` at the deadline.
    """
    grow = IdealGrowth(count, edges)
    level = {0: grow.sources}
    ideals = [0]
    for _ in range(count):
        deadline.check()
        level = grow.larger(level)
        ideals.extend(sorted(level))
        if len(ideals) > limit:
            raise TooManyIdeals(f"the model's graph has more than {limit} cuts")
    return ideals


class IdealGrowth:
    """Grows ideals of a DAG by one node at a time.

    An ideal is kept together with its ready nodes: nodes outside it whose predecessors are all inside. Both are bit
    sets.
    """

    def __init__(self, count: int, edges: Iterable[tuple[int, int]]) -> None:
        self.predecessors = [0] * count
        self.successors: list[set[int]] = [set() for _ in range(count)]
        for source, target in edges:
            self.predecessors[target] |= 1 << source
            self.successors[source].add(target)
        self.sources = sum(1 << node for node in range(count) if not self.predecessors[node])

    def larger(self, level: dict[int, int]) -> dict[int, int]:
        """All ideals with one more node than those in `level`. Argument and result map an ideal to its ready nodes."""
        larger_ideals: dict[int, int] = {}
        for ideal, ready in level.items():
            remaining = ready
            while remaining:
                bit = remaining & -remaining
                remaining ^= bit
                if (grown := ideal | bit) not in larger_ideals:
                    larger_ideals[grown] = ready ^ bit | self._freed(grown, bit.bit_length() - 1)
        return larger_ideals

    def steps(self, ideal: int, ready: int) -> Iterator[tuple[int, int, int]]:
        """(added node, larger ideal, its ready nodes) for all ideals with one more node than `ideal`."""
        rest = ready
        while rest:
            bit = rest & -rest
            rest ^= bit
            node = bit.bit_length() - 1
            yield node, ideal | bit, ready ^ bit | self._freed(ideal | bit, node)

    def _freed(self, ideal: int, node: int) -> int:
        """The successors of `node` that become ready when `node` is added; `ideal` already contains `node`."""
        freed = 0
        for following in self.successors[node]:
            if self.predecessors[following] & ~ideal == 0:
                freed |= 1 << following
        return freed
