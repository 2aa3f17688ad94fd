"""The figures of stages on every place, by the index of the place, that no bound on the pace changes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable

import numpy as np

from pipeplan.cost import formulas
from pipeplan.solvers.ilp.enumeration.closed_sets import Floats, Ints
from pipeplan.solvers.ilp.facts.placement_facts import LoadFactors, Place, PlacementFacts

CardRow = tuple[float, float, bool, bool]
"""Load of one card: charged seconds per byte of parameters and of messages, and whether the stage reaches the card's
component's end and its beginning."""


class PlaceTable:
    """Speed, memory, links and cards of all places, in ascending order of their first worker."""

    def __init__(self, facts: PlacementFacts, factors: LoadFactors | None) -> None:
        """With `factors` the loads of network cards count."""
        self.places: list[Place] = list(facts.placements.places)
        problem, workers = facts.problem, facts.workers
        self.start: Ints = np.array([start for start, _ in self.places], dtype=np.intp)
        self.replicas: Ints = np.array([count for _, count in self.places], dtype=np.intp)
        self.stop: Ints = self.start + self.replicas
        self.bounds: Ints = np.searchsorted(self.start, np.arange(workers + 1))
        """By worker, the first place from it or from a later one."""
        self.speed = self._figures(facts.speed)
        self.capacity = self._figures(lambda place: problem.capacity_of(range(place[0], sum(place))))
        self.ring_latency_s = self._figures(lambda place: facts.allreduce(place, 0.0))
        whole = self._figures(lambda place: facts.allreduce(place, facts.total))
        self.ring_s_per_byte: Floats = (whole - self.ring_latency_s) / facts.total
        self.before_rate = self._figures(lambda place: _way(facts, place[0] - 1, sum(place) - 1)[0])
        behind = [_way(facts, place[0], sum(place)) for place in self.places]
        self.behind_rate: Floats = np.array([bandwidth for bandwidth, _ in behind])
        self.behind_latency_s: Floats = np.array([latency for _, latency in behind])
        self.cards = [] if factors is None else _columns(_Cards(facts, factors).rows(place) for place in self.places)
        """For each further card of a place, four arrays by place (`CardRow`)."""

    def by_worker(self, place: Ints) -> list[slice]:
        """By worker, the entries of ascending places that start there."""
        bounds = np.searchsorted(place, self.bounds).tolist()
        return [slice(first, stop) for first, stop in itertools.pairwise(bounds)]

    def _figures(self, figure: Callable[[Place], float]) -> Floats:
        return np.array([figure(place) for place in self.places], dtype=np.float64)


def _way(facts: PlacementFacts, first: int, last: int) -> tuple[float, float]:
    """The best bandwidth and latency of a boundary between stages that hold these two workers."""
    if first < 0 or last >= facts.workers or not facts.problem.cluster.uniform:
        return math.inf, 0.0
    return facts.way(range(first, last + 1), facts.problem.cluster.level_between(first, last))


class _Cards:
    """The load that stages on a place put on the cards around their workers."""

    def __init__(self, facts: PlacementFacts, factors: LoadFactors) -> None:
        self._facts, self._factors, cluster = facts, factors, facts.problem.cluster
        self._edges = [[int(one) for one in cluster.starts(level)] for level in range(len(cluster.levels))]
        by_level = enumerate(self._edges)
        self._rates = [[facts.links.card(level, first) for first in edges[:-1]] for level, edges in by_level]

    def rows(self, place: Place) -> set[CardRow]:
        """The loads of all cards that a stage on this place uses; equal ones are alike."""
        facts, (start, stop) = self._facts, (place[0], sum(place))
        cluster, found = facts.problem.cluster, set()
        for level, edges in enumerate(self._edges):
            for number in range(cluster.component(level, start), cluster.component(level, stop - 1) + 1):
                first, behind = edges[number], edges[number + 1]
                share = (min(stop, behind) - max(start, first)) / place[1]
                row = self._row(place[1], share, self._rates[level][number])
                if row[0] or row[1]:
                    found.add((*row, stop >= behind, start <= first))
        return found

    def _row(self, replicas: int, share: float, rates: tuple[float, float]) -> tuple[float, float]:
        """The seconds per byte of parameters and of messages for a share of the replicas behind a card."""
        factors, problem = self._factors, self._facts.problem
        ring = factors.ring(replicas) * _ring_bytes(replicas) if share < 1 else 0.0
        ring += share * factors.copies * _ring_bytes(problem.copies)
        return problem.training * ring / rates[1], share * factors.messages / rates[0]


def _ring_bytes(members: int) -> float:
    """Bytes that every member of a ring sends for an all-reduce of one byte."""
    return float(formulas.ring_allreduce_time(members, 1.0, 1.0, 0.0))


def _columns(rows: Iterable[set[CardRow]]) -> list[tuple[Floats, ...]]:
    """The n-th rows of all places as arrays; places with fewer rows have rows of zeros."""
    by_place = [sorted(one) for one in rows]
    nothing: CardRow = (0.0, 0.0, False, False)
    columns = []
    for number in range(max(map(len, by_place), default=0)):
        mine = [one[number] if number < len(one) else nothing for one in by_place]
        columns.append(tuple(np.array(part, dtype=np.float64) for part in zip(*mine, strict=True)))
    return columns
