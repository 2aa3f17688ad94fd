"""The cuts of a model's main units, for bounds on models with too many cuts.

Units that may run beside many others are left out, such as the projections of a U-Net's time embedding. Every cut of the model has a cut of its main units that agrees with it on these. Work, parameters and traffic of the
others are missing in its totals, so that a bound from these totals holds for the whole model.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pipeplan.problem.cuts import Cuts, Ints, enumerate_cuts
from pipeplan.problem.problem import Problem
from pipeplan.util import graph
from pipeplan.util.deadline import Deadline

LOOSEST = (0.5, 0.35, 0.25, 0.15, 0.1, 0.05, 0.02)
"""Units are left out that may run beside more than this share of all units, tried in this order."""
MOST_LEFT_OUT = 0.15
"""The largest share of the whole work that may be left out."""
MOST_CUTS = 12_000


def cuts_for_bounds(problem: Problem, limit: int, deadline: Deadline) -> Cuts:
    """All cuts of a problem, or those of its main units where there are more than `limit`.

    They are incomplete where even the main units have too many cuts.
    """
    cuts = enumerate_cuts(problem, limit, deadline)
    if cuts.complete:
        return cuts
    work = np.array([unit.forward_s + unit.backward_s for unit in problem.units])
    beside = _units_beside(problem)
    for share in LOOSEST:
        main = np.flatnonzero(beside <= share * len(work)).tolist()
        if work[main].sum() < (1 - MOST_LEFT_OUT) * work.sum():
            break
        try:
            ideals = graph.ideals(len(main), _edges_among(problem, main), MOST_CUTS, deadline)
        except graph.TooManyIdeals:
            continue
        return _totals(problem, cuts, main, ideals)
    return cuts


def _units_beside(problem: Problem) -> Ints:
    """For every unit, the number of those that neither come before it nor after it."""
    count = len(problem.units)
    before = [0] * count
    for producer, consumer in sorted(problem.edges, key=lambda edge: edge[1]):
        before[consumer] |= before[producer] | 1 << producer
    after = [0] * count
    for producer, consumer in sorted(problem.edges, reverse=True):
        after[producer] |= after[consumer] | 1 << consumer
    return np.array([count - 1 - (one | two).bit_count() for one, two in zip(before, after, strict=True)], dtype=np.intp)


def _edges_among(problem: Problem, main: list[int]) -> list[tuple[int, int]]:
    """The order of the main units: an edge wherever a path leads through other units alone."""
    number = {unit: index for index, unit in enumerate(main)}
    sources: list[set[int]] = [set() for _ in problem.units]
    edges: set[tuple[int, int]] = set()
    before: list[list[int]] = [[] for _ in problem.units]
    for producer, consumer in problem.edges:
        before[consumer].append(producer)
    for unit, producers in enumerate(before):  # units are in topological order
        for producer in producers:
            sources[unit] |= {number[producer]} if producer in number else sources[producer]
        if unit in number:
            edges |= {(source, number[unit]) for source in sources[unit]}
    return sorted(edges)


def _totals(problem: Problem, cuts: Cuts, main: list[int], ideals: list[int]) -> Cuts:
    """The cuts of the main units, with the totals of these alone."""
    inside = np.array([[ideal >> index & 1 for index in range(len(main))] for ideal in ideals], dtype=float)
    number, units = {unit: index for index, unit in enumerate(main)}, [problem.units[unit] for unit in main]
    sent, returned = np.zeros((2, len(ideals)))
    for flow in problem.flows:
        readers = [number[unit] for unit in flow.consumers if unit in number]
        if flow.producer in number and readers:
            crossed = (inside[:, number[flow.producer]] > 0) & ~(inside[:, readers] > 0).all(axis=1)
            sent[crossed] += flow.bytes
            returned[crossed] += flow.gradient_bytes

    def total(name: str) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
        return np.asarray(inside @ np.array([getattr(unit, name) for unit in units], dtype=float))

    return replace(
        cuts,
        ideals=tuple(ideals),
        complete=True,
        work_s=total("forward_s") + total("backward_s"),
        forward_s=total("forward_s"),
        update_s=total("update_s"),
        parameters=total("parameter_bytes"),
        buffers=total("buffer_bytes"),
        saved=total("saved_bytes"),
        sent=sent,
        returned=returned,
        readers=(),
        workspace_bytes=(),
    )
