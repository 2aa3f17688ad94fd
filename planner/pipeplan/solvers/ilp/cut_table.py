"""The cuts of a model, with what the layers inside each take: sets of units that have with every unit all before it.

A stage holds the units between two cuts of which the second has all units of the first, and more. What adds up over
units is the difference of two totals. This table shares no code with the one of the dynamic program
(`pipeplan.problem.cuts`), so that a mistake in either shows as a disagreement.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import numpy as np

from pipeplan.cost.stage_times import exchange_times
from pipeplan.problem.problem import Problem
from pipeplan.solvers.ilp.places import Flags, Floats, Ints

MOST_CUTS = 2_000
"""The most cuts of a model for which there is a table. A chain has one more than it has units."""


class CutTable:
    """Arrays over the cuts, subsets first. Seconds are for one minibatch on a device of speed 1, sizes in bytes."""

    def __init__(self, problem: Problem, cuts: list[int]) -> None:
        """`cuts` are bit sets of units, from the empty one to that of all units."""
        units, self._problem, self._cuts = problem.units, problem, cuts
        self.has: Flags = np.array([[cut >> unit & 1 for unit in range(len(units))] for cut in cuts], dtype=bool)
        """Which units every cut has."""
        self.last = len(cuts) - 1
        self.work_s = self._totals(unit.forward_s + unit.backward_s for unit in units)
        self.forward_s = self._totals(unit.forward_s for unit in units)
        self.update_s = self._totals(unit.update_s for unit in units)
        """The part of `work_s` that is the optimiser's step."""
        self.parameters = self._totals(unit.parameter_bytes for unit in units)
        self.buffers = self._totals(unit.buffer_bytes for unit in units)
        self.saved = self._totals(unit.saved_bytes for unit in units)
        self.sent, self.returned = self._crossing()
        """Bytes that cross every cut forward, and bytes of gradients that cross it backward."""

    def __len__(self) -> int:
        return len(self._cuts)

    @staticmethod
    def of(problem: Problem) -> CutTable | None:
        """The table of all cuts, or None where there are more than `MOST_CUTS`."""
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
        """For every cut, which others have all of its units and more."""
        missing = self.has.astype(np.float32) @ (~self.has).T.astype(np.float32)
        return np.asarray((missing == 0) & ~np.eye(len(self), dtype=bool))

    def members(self, begin: int, end: int) -> list[int]:
        """The units between two cuts."""
        return [int(unit) for unit in np.flatnonzero(self.has[end] & ~self.has[begin])]

    def workspace(self, begin: Ints, end: Ints) -> Floats:
        """The largest workspace of the units between cuts, in bytes."""
        given = np.array([float(unit.workspace_bytes) for unit in self._problem.units])
        found, left = np.zeros(len(end)), np.arange(len(end))
        for amount in np.unique(given[given > 0])[::-1].tolist():
            here = self.has[:, given == amount]
            beyond = (here[end[left]] & ~here[begin[left]]).any(axis=1)
            found[left[beyond]] = amount
            left = left[~beyond]
        return found

    def copied(self, begin: Ints, end: Ints) -> Floats:
        """Bytes of shared weights that stages hold beside the parameter bytes of their units."""
        found = np.zeros(len(end))
        for weight in self._problem.shared:
            first = self.has[end, weight.units[0]] & ~self.has[begin, weight.units[0]]
            found += weight.bytes * (~first & (self._held(weight.units, begin, end) > 0))
        return found

    def exchanged_s(self, begin: Ints, end: Ints) -> Floats:
        """Seconds that stages are charged for exchanging the gradients of shared weights."""
        found = np.zeros(len(end))
        for weight, time_s in zip(self._problem.shared, exchange_times(self._problem), strict=True):
            held = self._held(weight.units, begin, end)
            found += time_s * ((held > 0) & (held < len(weight.units)))
        return found

    def _held(self, units: tuple[int, ...], begin: Ints, end: Ints) -> Ints:
        """How many of some units the stages hold."""
        counts = self.has[:, list(units)].sum(axis=1)
        return np.asarray(counts[end] - counts[begin])
