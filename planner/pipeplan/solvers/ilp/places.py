"""The places that a stage may have: runs of consecutive workers, and the workers that may be idle between two stages.

In a uniform cluster, idle workers are not needed everywhere. Suppose that a stage starts in a server behind idle
workers of the same server. If the stage moves towards them within the server, neither the stage nor its boundaries span
more components of any level. So only the last workers of a server need to be idle. With at most two levels, idle
servers can move to the end of the cluster. If workers of a server share network cards or cores, moving a stage changes
loads, unless the stage is inside one server before and after. Idle workers may then also lie before a stage that spans
servers. If servers differ, idle workers may lie before any stage.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, cached_property

import numpy as np
from numpy.typing import NDArray

from pipeplan.cluster_data.links import Links
from pipeplan.cost import contention, formulas
from pipeplan.plan.plan import Plan, Stage
from pipeplan.plan.schedules import ACCUMULATING
from pipeplan.problem.grid_shapes import GridShape
from pipeplan.problem.problem import Problem, joins_copies
from pipeplan.solvers.plan_space import PlanSpace

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]
Flags = NDArray[np.bool_]


class Places:
    """The places of one copy of the pipeline in ascending order of their first worker, with their figures as arrays."""

    def __init__(self, problem: Problem, shape: GridShape | None) -> None:
        """Find the places. With a `shape`, they are the places of the stages of this uniform grid."""
        self.problem, self.shape, self.cluster = problem, shape, problem.cluster
        self.workers = shape.workers if shape else problem.cluster.workers
        self.parallel = problem.options.boundary == "parallel"
        self.links = Links.of(problem.cluster)
        self.runs = self._runs()
        """The workers of every place."""
        self.start: Ints = np.array([run.start for run in self.runs], dtype=np.intp)
        self.stop: Ints = np.array([run.stop for run in self.runs], dtype=np.intp)
        self.replicas: Ints = self.stop - self.start
        self.speed: Floats = np.array([self.cluster.speed_of(run) for run in self.runs])
        self.capacity: Floats = np.array([problem.capacity_of(run) for run in self.runs])
        self.ring_rate, self.ring_latency_s = np.array([self._ring(run) for run in self.runs]).reshape(-1, 2).T
        """(bandwidth, latency) of the all-reduces among a stage's replicas; under a flush, among the replicas in all
        copies."""
        fastest = np.array([self._fastest(run) for run in self.runs]).reshape(-1, 3).T
        self.fastest_rate, self.fastest_latency_s, self.most_links = fastest
        """(bandwidth of a link, latency of a link, number of links) of the fastest boundary that a stage may have
        behind it."""

    def __len__(self) -> int:
        return len(self.runs)

    def _runs(self) -> list[range]:
        if self.shape is not None:
            count = self.shape.replicas
            return [range(start, start + count) for start in range(0, self.workers, count)]
        most = self.problem.most_replicas
        runs = (
            range(start, stop)
            for start in range(self.workers)
            for stop in range(start + 1, min(start + most, self.workers) + 1)
        )
        return [run for run in runs if self.problem.unused.isdisjoint(run)]

    def _ring(self, run: range) -> tuple[float, float]:
        if joins_copies(self.problem):
            return self.problem.copy_ways.among(run)
        return self.links.allreduce_among(run)

    def _fastest(self, run: range) -> tuple[float, float, int]:
        count = max(1, min(len(run), self.workers - run.stop)) if self.parallel else 1
        if run.stop == self.workers or not self.cluster.uniform:
            return math.inf, 0.0, count
        return *self.links.sendrecv_among(range(run.start, run.stop + 1)), count

    def boundary(self, before: int, behind: int) -> tuple[float, float, int]:
        """(bandwidth of a link, latency of a link, number of links) of the boundary between stages on two places."""
        links = min(self.replicas[before], self.replicas[behind]) if self.parallel else 1
        return *self.links.sendrecv_among([*self.runs[before], *self.runs[behind]]), int(links)

    @cached_property
    def before(self) -> Ints:
        """For each place, the first place with the same end whose stages have the same boundaries behind them."""
        return self._alike(lambda run: run.stop)

    @cached_property
    def behind(self) -> Ints:
        """For each place, the first place with the same start whose stages have the same boundaries before them."""
        return self._alike(lambda run: run.start)

    def _alike(self, edge: Callable[[range], int]) -> Ints:
        """For each place, the first equal place.

        Equal places have the same edge, span the same level, and with parallel links have equally many replicas."""
        if not self.cluster.uniform or self.problem.options.contention:
            return np.arange(len(self))
        first: dict[tuple[int, ...], int] = {}
        level_of = self.cluster.level_between
        keys = [(edge(run), level_of(run[0], run[-1]), len(run) * self.parallel) for run in self.runs]
        return np.array([first.setdefault(key, place) for place, key in enumerate(keys)], dtype=np.intp)

    @cached_property
    def own_cards(self) -> list[tuple[Floats, ...]]:
        """The cards that a stage alone loads, around every place. Each entry has four arrays over the places.

        The arrays are: seconds per byte of parameters, seconds per byte of messages, whether the next stage is outside
        the card's component, and whether the previous stage is outside.
        """
        rows = [sorted(self._cards_of(run)) for run in self.runs]
        most = max(map(len, rows), default=0)
        padded = [row + [(0.0, 0.0, False, False)] * (most - len(row)) for row in rows]
        columns = zip(*padded, strict=True)
        return [tuple(np.array(part, dtype=np.float64) for part in zip(*column, strict=True)) for column in columns]

    def _cards_of(self, run: range) -> set[tuple[float, float, bool, bool]]:
        found, options = set(), self.problem.options
        everyone = len(run) * self.problem.copies
        interval = (options.accumulate or 1) if options.schedule in ACCUMULATING else everyone
        ring_bytes = float(formulas.ring_allreduce_time(len(run), 1.0, 1.0, 0.0)) / interval
        if options.flushes or not self.problem.training:
            ring_bytes = 0.0
        for level in range(len(self.cluster.levels)):
            edges = self.cluster.starts(level)
            for number in range(self.cluster.component(level, run[0]), self.cluster.component(level, run[-1]) + 1):
                first, behind = edges[number], edges[number + 1]
                inside = min(run.stop, behind) - max(run.start, first)
                send, reduce = self.links.card(level, first)
                ring = ring_bytes / reduce if inside < len(run) else 0.0
                if ring or math.isfinite(send):
                    found.add((ring, inside / everyone / send, run.stop >= behind, run.start <= first))
        return found

    # -- idle workers --

    @cached_property
    def _idle_anywhere(self) -> bool:
        several = len(self.cluster.starts(1)) > 2
        return not self.cluster.uniform or (self.problem.options.contention and several)

    @cached_property
    def _interchangeable(self) -> bool:
        return self.cluster.uniform and len(self.cluster.levels) <= 2

    @cached_property
    def movable(self) -> Flags:
        """For each place, whether a stage there can move to idle workers before it without a change of the cost.

        Such a place is inside one server, and not at its beginning. So a stage there directly follows another stage."""
        if not self._idle_anywhere or self.shape is not None:
            return np.zeros(len(self), dtype=bool)
        edges = np.array(self.cluster.starts(1))
        server = np.searchsorted(edges, self.start, side="right")
        return np.asarray((self.start > edges[server - 1]) & (self.stop <= edges[server]))

    @cached_property
    def firsts(self) -> Sequence[int]:
        """The workers at which the first stage may start."""
        if self.shape is not None:
            return [0]
        if self._idle_anywhere:
            return range(self.cluster.span(1) if self._interchangeable else self.workers)
        return self._edges_from(0)

    def starts_behind(self, stop: int) -> Sequence[int]:
        """The workers at which the next stage may start, behind a stage that ends at worker `stop`."""
        if self.shape is not None:
            return [stop]
        edges = self._edges_from(stop)
        if not self._idle_anywhere:
            return sorted({stop, *edges} - {self.workers})
        # No whole server is idle: at most the rest of this server, and all workers but the last of the next one.
        last = edges[0] + self.cluster.span(1) if edges and self._interchangeable else self.workers
        return range(stop, min(last, self.workers))

    def _edges_from(self, worker: int) -> Sequence[int]:
        edges = [edge for edge in self.cluster.starts(1)[:-1] if edge >= worker]
        return edges[:1] if self._interchangeable else edges

    @cached_property
    def stops_before(self) -> list[list[int]]:
        """For each worker at which a stage starts, the ends that the previous stage may have."""
        found: list[list[int]] = [[] for _ in range(self.workers + 1)]
        for stop in range(1, self.workers):
            for start in self.starts_behind(stop):
                found[start].append(stop)
        return found

    def by_start(self, place: Ints) -> list[slice]:
        """For each worker, the entries of the ascending `place` that start there."""
        bounds = np.searchsorted(self.start[place], np.arange(self.workers + 1)).tolist()
        return [slice(first, stop) for first, stop in itertools.pairwise(bounds)]


Card = tuple[int, int, int]
"""A card in one direction: (level of the component, index of the component, direction)."""


class CardShares:
    """Seconds for which one byte keeps cards busy, per minibatch of all copies, by `pipeplan.cost.contention`."""

    def __init__(self, problem: Problem, space: PlanSpace, places: Places) -> None:
        """Prepare the shares. `problem` is the whole problem."""
        self._problem, self._space, self._places, self._cluster = problem, space, places, problem.cluster
        links, cluster = Links.of(problem.cluster), problem.cluster
        firsts = [cluster.starts(level)[:-1] for level in range(len(cluster.levels))]
        self._rates = [np.array([links.card(level, first) for first in mine]).T for level, mine in enumerate(firsts)]
        self.rings, self.messages = cache(self._rings), cache(self._messages)

    def _rings(self, place: int) -> dict[Card, float]:
        """Seconds for one byte of the parameters of a stage, by card."""
        return self._loads(self._plan(place), (1.0, 0.0), 1)

    def _messages(self, before: int, behind: int) -> dict[Card, float]:
        """Seconds for one byte that a stage sends to the next stage, by card.

        For a byte sent back, the directions are swapped.
        """
        return self._loads(self._plan(before, behind), (0.0, 1.0), 0)

    def _plan(self, *places: int) -> Plan:
        options = self._problem.options
        plan = self._space.plan(self._problem, [Stage((), tuple(self._places.runs[one]), 1, 1) for one in places])
        return replace(plan, schedule=options.schedule, accumulate=options.accumulate)

    def _loads(self, plan: Plan, bytes_of: tuple[float, float], kind: int) -> dict[Card, float]:
        parameters, forward = (np.full(len(plan.stages), size) for size in bytes_of)
        found: dict[Card, float] = {}
        for level, rates in enumerate(self._rates):
            sizes = parameters, forward, np.zeros(len(forward))
            moved = contention.bytes_across_cards(plan, self._cluster, level, sizes, self._problem.training)[kind]
            busy = moved / rates[kind]
            for way, component in zip(*(axis.tolist() for axis in np.nonzero(busy)), strict=True):
                found[level, component, way] = float(busy[way, component])
        return found
