"""The cuts of a problem: every ideal of its DAG, with running totals, so that a stage's cost is a difference of two.

A stage lies between two nested cuts I ⊂ J and holds the units of J without I; what adds over units is a difference of
two totals.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeplan import graph
from pipeplan.problem import Problem

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Cuts:
    """Arrays over the N cuts, from the empty one (index 0) to everything (index N-1), subsets first."""

    ideals: tuple[int, ...]
    """Bit sets of units."""
    complete: bool
    """Whether these are all cuts of the DAG, or only those of one order of its units."""
    work_s: Floats
    parameters: Floats
    buffers: Floats
    saved: Floats
    sent: Floats
    """Bytes that cross the cut forward."""
    returned: Floats
    """Bytes of gradients that cross it backward."""

    def smaller(self, index: int) -> NDArray[np.intp]:
        """The cuts that are proper subsets of cut `index`."""
        outside = ~self.ideals[index]
        return np.array([i for i in range(index) if self.ideals[i] & outside == 0], dtype=np.intp)

    def members(self, start: int, end: int) -> list[int]:
        """The units between two cuts."""
        difference = self.ideals[end] & ~self.ideals[start]
        return [unit for unit in range(difference.bit_length()) if difference >> unit & 1]


def enumerate_cuts(problem: Problem, limit: int) -> Cuts:
    """All cuts of the problem, or those of its topological order alone where there are more than `limit`."""
    count = len(problem.units)
    try:
        ideals, complete = graph.ideals(count, problem.edges, limit), True
    except graph.TooManyIdeals:
        ideals, complete = [(1 << size) - 1 for size in range(count + 1)], False
    units = problem.units
    return Cuts(
        ideals=tuple(ideals),
        complete=complete,
        work_s=_totals(ideals, [unit.forward_s + unit.backward_s for unit in units]),
        parameters=_totals(ideals, [unit.parameter_bytes for unit in units]),
        buffers=_totals(ideals, [unit.buffer_bytes for unit in units]),
        saved=_totals(ideals, [unit.saved_bytes for unit in units]),
        sent=_crossing(ideals, problem, backward=False),
        returned=_crossing(ideals, problem, backward=True),
    )


def _totals(ideals: list[int], values: list[float] | list[int]) -> Floats:
    return np.array([sum(value for unit, value in enumerate(values) if ideal >> unit & 1) for ideal in ideals], float)


def _crossing(ideals: list[int], problem: Problem, *, backward: bool) -> Floats:
    totals = np.zeros(len(ideals))
    for flow in problem.flows:
        needed = sum(1 << unit for unit in flow.consumers)
        size = flow.gradient_bytes if backward else flow.bytes
        for index, ideal in enumerate(ideals):
            if ideal >> flow.producer & 1 and needed & ~ideal:
                totals[index] += size
    return totals
