"""The two published variants of PipeDream's partitioning, solved level by level as published (docs/table1.md).

They serve to compare figures one to one. Both fill a table A^k[i, j, m], the time of the layers between cuts i ⊂ j on m
components of level k-1, innermost level first, and fix the inside of a component before they plan across components.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pipeplan.cluster_data.cluster import Level
from pipeplan.cost import depths
from pipeplan.errors import InputError
from pipeplan.plan.plan import Plan, Stage
from pipeplan.problem.cuts import Cuts, Floats, Ints
from pipeplan.problem.problem import Problem
from pipeplan.solvers.result import Result, Status

NAMES = ("pipedream-paper", "pipedream-code")
MOST_COMPONENTS = 4096
"""Limit on the components of a level: the published programs try every pair of counts."""


@dataclass(frozen=True)
class _Formulas:
    """The formulas of one variant at one level. Arrays broadcast over pairs of cuts."""

    name: str
    level: Level
    below: int
    """Components inside one component of the level below: n_{k-1}, 1 at the innermost level."""

    def single(self, compute: Floats, weights: Floats, m: int) -> Floats:
        """Time of one stage on m components."""
        if self.name == "pipedream-paper":
            return self._paper(compute, weights, m)
        return (compute + 4 * (m - 1) * weights / (m * self.level.bandwidth * self.below)) / m

    def last(self, compute: Floats, weights: Floats, before: Floats, behind: Floats, m: int) -> Floats:
        """Time of the last stage of a split, on m components; `before` and `behind` are the bytes across its cuts."""
        if self.name == "pipedream-paper":
            return np.maximum(self._paper(compute, weights, m), 2 * before / self.level.bandwidth)
        own = (compute + 4 * (m - 1) * weights / (m * self.level.bandwidth)) / m
        return np.maximum(own, np.maximum(2 * before, 2 * behind) / (self.level.bandwidth * m))

    def _paper(self, compute: Floats, weights: Floats, m: int) -> Floats:
        return np.maximum(compute, 2 * (m - 1) * weights / self.level.bandwidth) / m


@dataclass(frozen=True)
class _Table:
    """A^k, with the cut and the count of the last stage at [m, i, j], or -1 for a single stage."""

    time: Floats
    cut: Ints
    count: Ints


@dataclass(frozen=True)
class _Part:
    """A stage at some level: the layers between two cuts on `count` components."""

    start: int
    end: int
    count: int


def solve_published(problem: Problem, cuts: Cuts, name: str) -> Result:
    """The plan that a published variant chooses, and its pace by that variant's own formula.

    Raises `InputError` for inference, for a heterogeneous cluster and for too large a level.
    """
    began = time.perf_counter()
    if not problem.training:
        raise InputError(f"the cost model {name} is for training only")
    if not problem.cluster.uniform:
        raise InputError(f"the cost model {name} knows only clusters whose servers are all the same")
    levels = [level for level in problem.cluster.levels if level.count > 1]
    if any(level.count > MOST_COMPONENTS for level in levels):
        raise InputError(f"the cost model {name} is for levels of at most {MOST_COMPONENTS} components")
    if not levels:
        levels = list(problem.cluster.levels[:1])
    sizes = [level.count for level in levels]
    compute = (cuts.work_s[None, :] - cuts.work_s[:, None]) / problem.cluster.device.speed
    nested = _nested(cuts)
    compute = np.where(nested, compute, np.inf)
    tables = []
    for level, below in zip(levels, [1, *sizes[:-1]], strict=True):
        table = _fill(_Formulas(name, level, below), cuts, compute, nested)
        tables.append(table)
        compute = table.time[level.count]
    pace = float(compute[0, -1])
    stages = [
        Stage(_names(problem, cuts, start, end), tuple(workers), 1, 1)
        for start, end, workers in _walk(tables, sizes, len(levels) - 1, 0, len(cuts.ideals) - 1, [0])
    ]
    plan = depths.assign_depths(Plan(tuple(stages)), problem, pace)
    seconds = time.perf_counter() - began
    return Result(f"DP ({name})", Status.OPTIMAL, plan, pace, pace, seconds, f"by the formula of {name}")


def data_parallel_time(problem: Problem, name: str) -> float:
    """The variant's own figure for data parallelism on the whole cluster."""
    everything = np.array(problem.work_s / problem.cluster.device.speed)
    weights = np.array(float(sum(unit.parameter_bytes for unit in problem.units)))
    below = 1
    for level in problem.cluster.levels:
        if level.count > 1:
            everything = _Formulas(name, level, below).single(everything, weights, level.count)
            below = level.count
    return float(everything)


def _nested(cuts: Cuts) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    count = len(cuts.ideals)
    nested = np.zeros((count, count), dtype=bool)
    for end in range(count):
        nested[cuts.smaller(end), end] = True
    return nested


def _fill(
    formulas: _Formulas, cuts: Cuts, compute: Floats, nested: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]
) -> _Table:
    """Compute A^k[m, i, j] for m up to the level's count."""
    most, count = formulas.level.count, len(cuts.ideals)
    weights = cuts.parameters[None, :] - cuts.parameters[:, None]
    times = np.full((most + 1, count, count), np.inf)
    cut = np.full((most + 1, count, count), -1, dtype=np.intp)
    number = np.zeros((most + 1, count, count), dtype=np.intp)
    for m in range(1, most + 1):
        times[m] = np.where(nested, formulas.single(compute, weights, m), np.inf)
        number[m] = m
    for end in range(count):
        for middle in np.flatnonzero(nested[:, end]):
            for last in range(1, most):
                crossing = cuts.sent[middle], cuts.sent[end]
                own = formulas.last(compute[middle, end], weights[middle, end], *crossing, last)
                split = np.maximum(times[1 : most + 1 - last, :, middle], own)
                better = split < times[last + 1 :, :, end]
                times[last + 1 :, :, end][better] = split[better]
                cut[last + 1 :, :, end][better] = middle
                number[last + 1 :, :, end][better] = last
    return _Table(times, cut, number)


def _parts(table: _Table, start: int, end: int, count: int) -> list[_Part]:
    middle = int(table.cut[count, start, end])
    if middle < 0:
        return [_Part(start, end, count)]
    last = int(table.count[count, start, end])
    return [*_parts(table, start, middle, count - last), _Part(middle, end, last)]


def _walk(
    tables: list[_Table], sizes: list[int], level: int, start: int, end: int, origins: list[int]
) -> Iterator[tuple[int, int, list[int]]]:
    """Yield the stages (cut, cut, workers) between two cuts, in components of `level` that begin at `origins`."""
    inside = int(np.prod(sizes[:level]))
    offset = 0
    for part in _parts(tables[level], start, end, sizes[level]):
        parts = [origin + (offset + index) * inside for index in range(part.count) for origin in origins]
        offset += part.count
        if level == 0:
            yield part.start, part.end, parts
        else:
            yield from _walk(tables, sizes, level - 1, part.start, part.end, parts)


def _names(problem: Problem, cuts: Cuts, start: int, end: int) -> tuple[str, ...]:
    return tuple(name for unit in cuts.members(start, end) for name in problem.units[unit].layers)
