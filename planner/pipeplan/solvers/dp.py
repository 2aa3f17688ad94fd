"""Exact dynamic programming over cuts: the fastest pipeline on consecutive workers, idle ones allowed.

For a threshold T the program asks whether some pipeline has every resource under T and every worker within its memory.
It works from the output end, because the minibatches that a stage holds in flight depend on the stages behind it:

    K[J, p, λ] = the least that the first stage of a pipeline for everything after cut J demands of the stage before it
                 (`cost.in_flight_behind`) without any worker before p, where λ is the level of the component that holds
                 workers p … last of that stage

and a stage I→J on workers s … s+r-1, s + r ≤ p, leads from K[J, p, λ] to K[I, s, its span]. Less is never worse:
upstream depths, and so memory, only shrink with it.

Without a limit on memory depths do not matter, and T is one of finitely many values, the times of stages and
boundaries: a binary search over these ends at the exact optimum. If its plan fits in memory it is the best of all. If
not, T is searched upwards from there, with memory, to within `PRECISION`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeplan import cost
from pipeplan.cuts import Cuts, Floats
from pipeplan.problem import Problem
from pipeplan.solvers import depths
from pipeplan.solvers.pipeline import Segment, Space, spaces
from pipeplan.solvers.result import Result, Status
from pipeplan.solvers.tables import Ints, Tables

Flags = NDArray[np.bool_]

PRECISION = 1e-10
"""Relative. Far below the tolerance to which two solvers are compared."""

# The values that bound the search are few once the interval is narrow; until then halving is cheaper than sorting all.
_HALVINGS = 12


@dataclass(frozen=True)
class _Step:
    """The stages that may be put in front of a cut, onto the states of one λ."""

    level: int
    """λ of the state that a stage leads from."""
    depth: Floats
    """Depth of the stage, by cut I and placement; infinite where the stage is not allowed."""
    demand: Floats
    """K of the state that the stage leads to, likewise."""


class Pipelines:
    """The searches on one cluster; built once, asked for many thresholds."""

    def __init__(self, problem: Problem, cuts: Cuts) -> None:
        self.problem = problem
        self.tables = Tables.of(problem, cuts)
        self.last = len(cuts.ideals) - 1
        self.workers = problem.cluster.workers
        self.levels = len(problem.cluster.levels) + 1
        self.with_memory = problem.options.memory

    def feasible(self) -> bool:
        """Whether any pipeline satisfies the constraints."""
        return self._reached(self._most())

    def best(self) -> tuple[float, list[Segment]] | None:
        """The smallest threshold that some pipeline meets, and a pipeline of the fewest stages that meets it."""
        self.with_memory = False
        low = self._without_memory()
        if low is None:
            return None
        self.with_memory = self.problem.options.memory
        best = low if self._reached(low) else self._upwards(low)
        return None if best is None else (best, self._pipeline(best))

    def _without_memory(self) -> float | None:
        """The exact optimum where memory does not limit."""
        low, high = 0.0, self._most()
        if not self._reached(high):
            return None
        for _ in range(_HALVINGS):
            middle = (low * high) ** 0.5 if low > 0 else high / 4
            low, high = (low, middle) if self._reached(middle) else (middle, high)
        values = self._values(low, high)
        first, last = 0, len(values) - 1
        while first < last:
            index = (first + last) // 2
            first, last = (first, index) if self._reached(values[index]) else (index + 1, last)
        return float(values[first])

    def _upwards(self, low: float) -> float | None:
        """The optimum where it is above `low`, to within `PRECISION`."""
        high = self._most()
        if not self._reached(high):
            return None
        while high > low * (1 + PRECISION):
            # Doubling first: the optimum is seldom far above what memory leaves out.
            middle = min((low * high) ** 0.5, 2 * low)
            low, high = (low, middle) if self._reached(middle) else (middle, high)
        return high

    def _most(self) -> float:
        """A threshold that excludes no time, and at which transfers and waits together take one minibatch at most."""
        stage = max(float(times.max()) for times in self.tables.stage_s[1:])
        allreduce = max(float(times.max()) for times in self.tables.allreduce_s[1:])
        return stage + 2 * (allreduce + float(self.tables.transfer_s.max())) + 1e-9

    def _values(self, low: float, high: float) -> Floats:
        """All times in (low, high] of stages and boundaries, and `high`."""
        tables = self.tables
        found = [_between(times, low, high) for times in (*tables.stage_s[1:], tables.boundary_s)]
        return np.unique(np.concatenate([*found, [high]]))

    def _reached(self, threshold: float) -> bool:
        stages = self.problem.options.stages
        if stages is not None:
            return any(bool(np.isfinite(table[0]).any()) for table in self._by_stages(threshold, stages, exactly=True))
        return bool(np.isfinite(self._table(threshold)[0]).any())

    def _empty(self) -> Floats:
        return np.full((self.last + 1, self.workers + 1, self.levels), np.inf)

    def _start(self) -> Floats:
        """K where nothing is left to place: nothing is in flight, and idle workers at the end are free."""
        table = self._empty()
        table[self.last, :, 0] = 0
        return table

    def _table(self, threshold: float) -> Floats:
        """K for any number of stages."""
        table = self._start()
        for cut in range(self.last, 0, -1):
            self._extend(cut, threshold, table, table)
        return table

    def _by_stages(self, threshold: float, most: int, *, exactly: bool = False) -> Iterator[Floats]:
        """K for exactly 1, 2, … `most` stages (the last alone if `exactly`)."""
        source = self._start()
        for count in range(1, most + 1):
            target = self._empty()
            for cut in range(self.last, 0, -1):
                self._extend(cut, threshold, source, target)
            if count == most or not exactly:
                yield target
            source = target

    def _extend(self, cut: int, threshold: float, source: Floats, target: Floats) -> None:
        """Put every possible stage in front of `cut`, from the states in `source` into `target`."""
        self._spread_idle(cut, source)
        runs = self.tables.placements
        where = (self.tables.smaller[cut][:, None], runs.start[runs.group], runs.span[runs.group])
        for step in self._steps(cut, threshold, source):
            least = np.minimum.reduceat(step.demand, runs.group, axis=1)
            target[where] = np.minimum(target[where], least)

    def _steps(self, cut: int, threshold: float, source: Floats) -> Iterator[_Step]:
        """For every λ: the stages that end at `cut`, are quick enough, and fit in memory."""
        tables, runs = self.tables, self.tables.placements
        allowed = (tables.stage_s[cut] <= threshold)[:, runs.kind]
        for level in range(self.levels):
            behind = source[cut, runs.end, level]
            possible = allowed & np.isfinite(behind)
            # The component that holds both stages, from this one's first worker to the next one's last.
            both = np.maximum(tables.reach[runs.start, np.minimum(runs.end, self.workers - 1)], level)
            if cut != self.last:
                possible &= (tables.boundary_s[cut] <= threshold)[both]
            if not possible.any():
                continue
            if not (self.with_memory and self.problem.training):
                possible = possible & self._fits(cut, np.ones(possible.shape))
                ones = np.where(possible, 1.0, np.inf)
                yield _Step(level, ones, np.where(possible, 0.0, np.inf))
                continue
            wait = cost.group_wait(tables.allreduce_s[cut], threshold, runs.kinds[:, 0], self.problem.copies)
            wait = np.broadcast_to(wait, tables.allreduce_s[cut].shape)[:, runs.kind]
            depth = np.ones(possible.shape)
            if cut != self.last:
                known = np.where(np.isfinite(behind), behind, 0.0)
                transfer = tables.transfer_s[cut][both]
                depth = cost.in_flight_depth(known, wait, transfer, threshold, runs.replicas)
            depth = np.where(possible & self._fits(cut, depth), depth, np.inf)
            yield _Step(level, depth, cost.in_flight_behind(depth, runs.replicas, wait))

    def _fits(self, cut: int, depth: Floats) -> Flags:
        """Which stages (cut I, placement) fit in memory at a depth."""
        if not self.with_memory:
            return np.ones(depth.shape, dtype=bool)
        constant = self.tables.fixed[cut][:, None] + self.tables.replicated[cut][:, self.tables.placements.kind]
        fits: Flags = constant + self.tables.growing[cut][:, None] * depth <= self.problem.capacity
        return fits

    def _spread_idle(self, cut: int, table: Floats) -> None:
        """A state that uses no worker before p uses none before p-1 either: worker p-1 stays idle."""
        if cut == self.last:
            return
        for first in range(self.workers - 1, 0, -1):
            joined = self.tables.reach[first - 1, first]
            for level in range(self.levels):
                wider = max(level, int(joined))
                table[cut, first - 1, wider] = min(table[cut, first - 1, wider], table[cut, first, level])

    def _pipeline(self, threshold: float) -> list[Segment]:
        """Walk a pipeline of the fewest stages (or the number asked for) that meets the threshold, input to output."""
        exactly = self.problem.options.stages
        sources = [self._start()]
        for table in self._by_stages(threshold, exactly or min(self.workers, self.last)):
            sources.append(table)
            if exactly is None and np.isfinite(table[0]).any():
                break
        state = (0, *(int(axis[0]) for axis in np.nonzero(np.isfinite(sources[-1][0]))))
        segments = []
        for source, target in zip(reversed(sources[:-1]), reversed(sources[1:]), strict=True):
            segment, state = self._behind(state, target[state], source, threshold)
            segments.append(segment)
        return segments

    def _behind(
        self, state: tuple[int, ...], value: float, source: Floats, threshold: float
    ) -> tuple[Segment, tuple[int, ...]]:
        """The stage that gave a state its value, and the state behind it."""
        cut, first, span = state
        runs = self.tables.placements
        here = np.flatnonzero((runs.start == first) & (runs.span == span))
        for end in range(cut + 1, self.last + 1):
            row = np.flatnonzero(self.tables.smaller[end] == cut)
            if not len(row):
                continue
            for step in self._steps(end, threshold, source):
                for run in here[step.demand[row[0], here] == value]:
                    segment = Segment(
                        self._names(cut, end), first, int(runs.replicas[run]), int(step.depth[row[0], run])
                    )
                    return segment, self._owner(end, int(runs.end[run]), step.level, source)
        raise AssertionError("a reachable state has no stage that leads to it")

    def _names(self, start: int, end: int) -> tuple[str, ...]:
        units = self.tables.cuts.members(start, end)
        return tuple(name for unit in units for name in self.problem.units[unit].layers)

    def _owner(self, cut: int, position: int, level: int, source: Floats) -> tuple[int, int, int]:
        """The state that a state was spread from over idle workers: where its first stage really starts."""
        if cut == self.last:
            return cut, position, 0
        value = source[cut, position, level]
        starts: Ints = np.flatnonzero(np.isfinite(source[cut]).any(axis=1))
        for first in reversed(starts[starts >= position]):
            for span in range(self.levels):
                wider = max(span, int(self.tables.reach[position, first]))
                # Only a state that a stage starts in can be walked on: it does not come from its right neighbour.
                if wider == level and source[cut, first, span] == value:
                    return cut, int(first), span
        raise AssertionError("a spread state has no owner")


def _between(values: Floats, low: float, high: float) -> Floats:
    flat = values.reshape(-1)
    return flat[(flat > low) & (flat <= high)]


def feasible(problem: Problem, cuts: Cuts) -> bool:
    """Whether any plan satisfies the constraints, however slow."""
    return any(Pipelines(space.inner(problem), cuts).feasible() for space in spaces(problem))


def solve(problem: Problem, cuts: Cuts) -> Result:
    """The best plan over both plan spaces (see `pipeline`), with proof by exhaustion of the threshold's values."""
    began = time.perf_counter()
    best: tuple[float, Space, list[Segment]] | None = None
    for space in spaces(problem):
        if best is not None and space.synchronisation(problem) >= best[0]:
            continue
        found = Pipelines(space.inner(problem), cuts).best()
        if found is not None and (best is None or space.pace(problem, found[0]) < best[0] * (1 - 1e-9)):
            best = (space.pace(problem, found[0]), space, found[1])
    seconds = time.perf_counter() - began
    if best is None:
        return Result("DP", Status.INFEASIBLE, None, float("inf"), float("inf"), seconds)
    pace, space, segments = best
    plan = depths.assign(space.plan(problem, segments), problem, pace)
    if cuts.complete:
        return Result("DP", Status.OPTIMAL, plan, pace, pace, seconds)
    floor = problem.work_s / (problem.cluster.workers * problem.cluster.device.speed)
    note = f"searched the {len(cuts.ideals)} cuts of one order of the layers, not all cuts of the graph"
    return Result("DP", Status.FEASIBLE, plan, pace, floor, seconds, note)
