"""The cuts of a model, with the totals of the layers inside each.

A cut is a set of units that contains, for every unit, all units before it. A stage holds the units between two cuts,
the second of which contains the first. A quantity that adds up over units is the difference of two totals. This module
shares no code with the dynamic program (`pipeplan.problem.cuts`), so that a mistake in either shows as a disagreement.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import numpy as np

from pipeplan.cost.stage_table import shared_in_cuts
from pipeplan.problem.between_cuts import SharedInCuts, Workspaces
from pipeplan.problem.problem import Problem
from pipeplan.solvers.ilp.places import Flags, Floats

MOST_CUTS = 2_000
"""Largest number of cuts for which there is a table. A chain of n units has n + 1 cuts."""


class CutTable:
    """Arrays over the cuts, subsets first.

    Times are seconds for one minibatch on a device of speed 1, sizes are bytes.
    """

    def __init__(self, problem: Problem, cuts: list[int]) -> None:
        """Compute the totals. `cuts` are bit sets of units, from the empty set to the set of all units."""
        units, self._problem, self._cuts = problem.units, problem, cuts
        self.has: Flags = np.array([[cut >> unit & 1 for unit in range(len(units))] for cut in cuts], dtype=bool)
        """Flags of shape (cuts, units): whether the cut contains the unit."""
        self.last = len(cuts) - 1
        self.work_s = self._totals(unit.forward_s + unit.backward_s for unit in units)
        self.forward_s = self._totals(unit.forward_s for unit in units)
        self.update_s = self._totals(unit.update_s for unit in units)
        """The part of `work_s` that is the optimiser's step."""
        self.parameters = self._totals(unit.parameter_bytes for unit in units)
        self.buffers = self._totals(unit.buffer_bytes for unit in units)
        self.saved = self._totals(unit.saved_bytes for unit in units)
        self.sent, self.returned = self._crossing()
        """(bytes that cross every cut forward, bytes of gradients that cross it backward)."""

    def __len__(self) -> int:
        return len(self._cuts)

    @staticmethod
    def of(problem: Problem) -> CutTable | None:
        """The table of all cuts; None if there are more than `MOST_CUTS`."""
        before = [1 << unit for unit in range(len(problem.units))]
        for producer, consumer in sorted(problem.edges):  # units are in topological order
            before[consumer] |= before[producer]
        found, newest = {0}, {0}
        while newest and len(found) <= MOST_CUTS:
            newest = {cut | one for cut in newest for one in before if one & ~cut} - found
            found |= newest
        if len(found) > MOST_CUTS:
            return None
        return CutTable(problem, sorted(found, key=lambda cut: (cut.bit_count(), cut)))

    def _totals(self, amounts: Iterable[float]) -> Floats:
        return np.asarray(self.has @ np.array(list(amounts), dtype=np.float64))

    def _crossing(self) -> Floats:
        crossing = np.zeros((2, len(self)))
        for flow in self._problem.flows:
            crossed = self.has[:, flow.producer] & ~self.has[:, list(flow.consumers)].all(axis=1)
            crossing += np.outer((flow.bytes, flow.gradient_bytes), crossed)
        return crossing

    @cached_property
    def larger(self) -> Flags:
        """Flags of shape (cuts, cuts): whether the second cut contains the first and more units."""
        missing = self.has.astype(np.float32) @ (~self.has).T.astype(np.float32)
        return np.asarray((missing == 0) & ~np.eye(len(self), dtype=bool))

    def members(self, begin: int, end: int) -> list[int]:
        """The units between two cuts."""
        return [int(unit) for unit in np.flatnonzero(self.has[end] & ~self.has[begin])]

    @cached_property
    def workspaces(self) -> Workspaces:
        """The largest workspace between any two cuts."""
        bits = np.packbits(self.has, axis=1, bitorder="little")
        words = np.pad(bits, ((0, 0), (0, -bits.shape[1] % 8))).view("<u8")
        return Workspaces.of(words, [unit.workspace_bytes for unit in self._problem.units], chain=False)

    @cached_property
    def shared(self) -> SharedInCuts | None:
        """The copies and exchanges of shared weights; None if no weights are shared."""
        return shared_in_cuts(self._problem, self._cuts)
