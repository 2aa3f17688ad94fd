"""Reduces the cuts for a lower bound: keeps cuts of a model's main units, and groups cuts with nearly equal totals.

Units that may run in parallel with many others are left out, such as the projections of a U-Net's time embedding. Every
cut of the model corresponds to a cut of its main units. The totals of that cut lack the work, parameters and traffic of
the other units. So a lower bound from these totals holds for the whole model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from pipeplan.problem.cuts import Cuts, Floats, Ints
from pipeplan.problem.problem import Problem
from pipeplan.util import graph
from pipeplan.util.deadline import Deadline

LOOSEST = (1.0, 0.5, 0.35, 0.25, 0.15, 0.1, 0.05, 0.02)
"""Shares of all units, tried in this order. A unit that may run in parallel with a larger share of the units is left
out."""
MOST_LEFT_OUT = 0.15
"""The largest share of the whole work that may be left out."""
MOST_CUTS = 12_000
MOST_GROUPS = 500
"""Number of cuts above which cuts are grouped."""


@dataclass(frozen=True)
class MainUnits:
    """The main units of a model, whose cuts are listed once for all microbatch sizes."""

    units: tuple[int, ...]
    """Indices of the main units among the units of a problem."""
    ideals: tuple[int, ...]

    @staticmethod
    def of(problem: Problem, deadline: Deadline) -> MainUnits | None:
        """The main units of a problem: all units if they have few cuts; None if no choice of units has few cuts."""
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
            return MainUnits(tuple(main), tuple(ideals))
        return None

    def cuts(self, problem: Problem) -> Cuts:
        """The cuts of the main units of a problem. The totals of these cuts count only main units."""
        number, flows = {unit: index for index, unit in enumerate(self.units)}, []
        for flow in problem.flows:
            readers = tuple(number[unit] for unit in flow.consumers if unit in number)
            if flow.producer in number and readers:
                flows.append(replace(flow, producer=number[flow.producer], consumers=readers))
        return Cuts.of([problem.units[unit] for unit in self.units], flows, self.ideals, complete=True)


def _units_beside(problem: Problem) -> Ints:
    """For every unit, the number of units that come neither before nor after it."""
    count = len(problem.units)
    before = [0] * count
    for producer, consumer in sorted(problem.edges, key=lambda edge: edge[1]):
        before[consumer] |= before[producer] | 1 << producer
    after = [0] * count
    for producer, consumer in sorted(problem.edges, reverse=True):
        after[producer] |= after[consumer] | 1 << consumer
    return np.array(
        [count - 1 - (one | two).bit_count() for one, two in zip(before, after, strict=True)], dtype=np.intp
    )


def _edges_among(problem: Problem, main: list[int]) -> list[tuple[int, int]]:
    """Edges that keep the order of the main units.

    Two main units have an edge if a path joins them that contains no third main unit.
    """
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


@dataclass(frozen=True)
class CutGroups:
    """Groups of cuts with nearly the same work and parameters, with the smallest and largest totals of each group.

    A stage between two groups has at least the later group's smallest total less the earlier group's largest total.
    """

    least: dict[str, Floats]
    most: dict[str, Floats]
    crossing: Floats
    """Smallest number of bytes of one minibatch that cross a cut of the group forward."""
    returned: Floats

    @staticmethod
    def of(cuts: Cuts) -> CutGroups:
        """The groups of cuts. If there are few cuts, each cut is a group by itself."""
        totals = {
            "work": cuts.work_s - cuts.update_s,
            "forward": cuts.forward_s,
            "update": cuts.update_s,
            "parameters": cuts.parameters,
            "buffers": cuts.buffers,
            "saved": cuts.saved,
        }
        group = _groups(totals["work"], totals["parameters"])
        order = np.argsort(group, kind="stable")
        begins = np.flatnonzero(np.diff(group[order], prepend=-1))

        def extremes(values: Floats) -> tuple[Floats, Floats]:
            ordered = values[order]
            return np.minimum.reduceat(ordered, begins), np.maximum.reduceat(ordered, begins)

        found = {name: extremes(values) for name, values in totals.items()}
        return CutGroups(
            {name: pair[0] for name, pair in found.items()},
            {name: pair[1] for name, pair in found.items()},
            extremes(cuts.sent)[0],
            extremes(cuts.returned)[0],
        )

    def inside(self, name: str) -> Floats:
        """Lower bound on a total of a stage that begins in one group (rows) and ends in another (columns)."""
        return np.maximum(0.0, self.least[name][None, :] - self.most[name][:, None])

    def most_inside(self, name: str) -> Floats:
        """Upper bound on a total of a stage that begins in one group (rows) and ends in another (columns)."""
        return np.maximum(0.0, self.most[name][None, :] - self.least[name][:, None])


def _groups(work: Floats, parameters: Floats) -> Ints:
    """The number of every cut's group.

    A cut is never in an earlier group than a cut that it contains. The empty and the full cut are groups by themselves.
    """
    count = len(work)
    if count <= MOST_GROUPS:
        return np.arange(count)
    inner_work, inner_parameters = work[1:-1], parameters[1:-1]
    cells = 16 * MOST_GROUPS
    while True:
        rows = np.floor(inner_work / work[-1] * cells)
        columns = np.floor(inner_parameters / max(float(parameters[-1]), 1.0) * min(cells, MOST_GROUPS))
        found, group = np.unique(rows * (cells + MOST_GROUPS + 2) + columns, return_inverse=True)
        if len(found) <= MOST_GROUPS:
            return np.concatenate([[0], group + 1, [len(found) + 1]])
        cells = int(cells / 1.4)
