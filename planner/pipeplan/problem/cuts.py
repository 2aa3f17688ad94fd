"""The cuts of a problem: the ideals (down-sets) of its DAG, with the total cost of the units in each ideal.

A stage lies between two nested cuts I ⊂ J and holds the units of J that are not in I. A quantity that adds up over
units is therefore the difference of two totals. Workspaces (`Cuts.workspaces`) do not add up.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from pipeplan.problem.between_cuts import Workspaces
from pipeplan.problem.problem import Problem
from pipeplan.problem.units import Flow, Unit
from pipeplan.util import graph
from pipeplan.util.deadline import NO_DEADLINE, Deadline, OutOfTime

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]
Flags = NDArray[np.bool_]
_SELECTED_SHARE = 5
"""If not all cuts can be listed, the selection has the limit divided by this number. Such a selection suffices for
plans within 1% of the bound."""


@dataclass(frozen=True)
class Cuts:
    """Arrays over the N cuts, from the empty cut (index 0) to the full one (index N - 1), subsets before supersets.

    Times and sizes are totals over the units inside a cut: seconds for one minibatch on a device of speed 1, and bytes.
    """

    ideals: tuple[int, ...]
    """The units inside each cut, as bit sets."""
    complete: bool
    """Whether these are all cuts of the DAG (or all that can matter), and not a selection."""
    work_s: Floats
    forward_s: Floats
    update_s: Floats
    """The part of `work_s` that is the optimiser's step."""
    parameters: Floats
    buffers: Floats
    saved: Floats
    sent: Floats
    """Bytes of one minibatch that cross each cut forward."""
    returned: Floats
    """Bytes of one minibatch's gradients that cross each cut backward."""
    workspace_bytes: tuple[int, ...]
    """The workspace of every unit, in bytes."""

    @staticmethod
    def of(units: Sequence[Unit], flows: Sequence[Flow], ideals: Sequence[int], *, complete: bool) -> Cuts:
        """The cuts with these units inside, and their totals."""
        inside = membership(ideals, len(units))

        def total(name: str) -> Floats:
            return np.asarray(inside @ np.array([getattr(unit, name) for unit in units], float))

        work_s, forward_s, update_s = _times(units, inside)
        sent, returned = _crossing(inside, flows)
        return Cuts(
            ideals=tuple(ideals),
            complete=complete,
            work_s=work_s,
            forward_s=forward_s,
            update_s=update_s,
            parameters=total("parameter_bytes"),
            buffers=total("buffer_bytes"),
            saved=total("saved_bytes"),
            sent=sent,
            returned=returned,
            workspace_bytes=tuple(unit.workspace_bytes for unit in units),
        )

    @cached_property
    def words(self) -> NDArray[np.uint64]:
        """The ideals as N rows of 64-bit words, lowest units first."""
        width = max(1, -(-self.ideals[-1].bit_length() // 64))
        raw = b"".join(ideal.to_bytes(8 * width, "little") for ideal in self.ideals)
        return np.frombuffer(raw, dtype="<u8").reshape(len(self.ideals), width)

    @cached_property
    def chain(self) -> bool:
        """Whether every cut contains the previous cut, as in a model without branches."""
        words = self.words
        return not bool((words[:-1] & ~words[1:]).any())

    @cached_property
    def workspaces(self) -> Workspaces:
        """The largest workspace between any two cuts."""
        return Workspaces.of(self.words, self.workspace_bytes, chain=self.chain)

    def smaller(self, index: int) -> Ints:
        """The indices of the cuts that are proper subsets of cut `index`."""
        if self.chain:
            return np.arange(index)
        words = self.words
        outside = ~words[index]
        beyond = words[:index, 0] & outside[0]
        for column in range(1, words.shape[1]):
            beyond = beyond | (words[:index, column] & outside[column])
        return np.flatnonzero(beyond == 0)

    def members(self, start: int, end: int) -> list[int]:
        """The units between two nested cuts."""
        difference, units = self.ideals[end] & ~self.ideals[start], []
        while difference:
            lowest = difference & -difference
            units.append(lowest.bit_length() - 1)
            difference ^= lowest
        return units

    def retimed(self, problem: Problem) -> Cuts:
        """These cuts for a problem that differs only in the times of its layers."""
        inside = membership(list(self.ideals), len(problem.units))
        # A copy keeps the cached values, which do not depend on times.
        cuts = copy(self)
        for name, totals in zip(("work_s", "forward_s", "update_s"), _times(problem.units, inside), strict=True):
            object.__setattr__(cuts, name, totals)
        return cuts

    @property
    def whole(self) -> Cuts:
        """The cuts of a plan with a single stage: the empty and the full cut."""
        ends = np.zeros(len(self.ideals), dtype=bool)
        ends[[0, -1]] = True
        return self.only(ends)

    def only(self, kept: NDArray[np.bool_]) -> Cuts:
        """The cuts selected by a mask, which must include the first and the last cut."""
        arrays = {
            field.name: getattr(self, field.name)[kept]
            for field in fields(self)
            if field.name not in ("ideals", "complete", "workspace_bytes")
        }
        picked = tuple(ideal for ideal, keep in zip(self.ideals, kept, strict=True) if keep)
        return replace(self, ideals=picked, **arrays)


def enumerate_cuts(problem: Problem, limit: int, deadline: Deadline = NO_DEADLINE) -> Cuts:
    """All cuts of the problem, or a selection of cuts with little traffic if there are more than `limit`.

    At the deadline the selection consists of the cuts found so far, completed by the cuts along one topological order.
    If the options ask for one stage, the only cuts are the empty and the full cut. The last few results are cached,
    because choosing a plan asks for the same cuts many times.
    """
    whole = 1 in (problem.options.stages, problem.options.max_stages)
    key = problem.units, problem.flows, limit, whole
    known = _REMEMBERED.get(key)
    if known is None:
        known = _enumerated(problem, limit, deadline, whole=whole)
        if not deadline.passed:
            _REMEMBERED[key] = known
            while len(_REMEMBERED) > REMEMBERED:
                _REMEMBERED.pop(next(iter(_REMEMBERED)))
    return known


REMEMBERED = 8
_REMEMBERED: dict[tuple[tuple[Unit, ...], tuple[Flow, ...], int, bool], Cuts] = {}


def _enumerated(problem: Problem, limit: int, deadline: Deadline, *, whole: bool) -> Cuts:
    count = len(problem.units)
    try:
        if whole:
            ideals, complete = [0, (1 << count) - 1], True
        else:
            ideals, complete = graph.ideals(count, problem.edges, limit, deadline.share(0.5)), True
    except (graph.TooManyIdeals, OutOfTime):
        ideals, complete = _cheapest_cuts(problem, max(1, limit // _SELECTED_SHARE), deadline), False
    return Cuts.of(problem.units, problem.flows, ideals, complete=complete)


def _times(units: Sequence[Unit], inside: Floats) -> tuple[Floats, Floats, Floats]:
    """(both passes, forward pass, optimiser's step) of the units inside every cut, in seconds."""
    forward, backward, update = np.array([(unit.forward_s, unit.backward_s, unit.update_s) for unit in units]).T
    return inside @ (forward + backward), inside @ forward, inside @ update


def membership(ideals: Sequence[int], count: int) -> Floats:
    """Zeros and ones of shape (ideals, units): whether an ideal contains a unit."""
    width = max(1, -(-count // 8))
    raw = b"".join(ideal.to_bytes(width, "little") for ideal in ideals)
    bits = np.frombuffer(raw, dtype=np.uint8).reshape(len(ideals), width)
    return np.unpackbits(bits, axis=1, count=count, bitorder="little").astype(float)


def _crossing(inside: Floats, flows: Sequence[Flow]) -> tuple[Floats, Floats]:
    """Bytes that cross every cut, forward and backward.

    A tensor crosses a cut if a unit inside computes it and a unit outside reads it."""
    sent, returned = np.zeros((2, len(inside)))
    members = np.ascontiguousarray(inside.T != 0)
    for flow in flows:
        crossed = members[flow.producer] & ~members[list(flow.consumers)].all(axis=0)
        sent[crossed] += flow.bytes
        returned[crossed] += flow.gradient_bytes
    return sent, returned


def _cheapest_cuts(problem: Problem, limit: int, deadline: Deadline) -> list[int]:
    """Beam search for cuts of every size: the cuts with the least traffic, and the cut along the topological order."""
    count = len(problem.units)
    growth = graph.IdealGrowth(count, problem.edges)
    width = max(1, limit // count)
    crossing = _CrossingBytes(problem)
    cuts, level = [0], {0: growth.sources}
    bytes_of = {0: 0}
    for size in range(1, count + 1):
        if deadline.passed:
            # Complete the selection with the cuts along the topological order, one of each size.
            return [*cuts, *((1 << number) - 1 for number in range(size, count + 1))]
        larger: dict[int, int] = {}
        grown_bytes: dict[int, int] = {}
        for ideal, ready in level.items():
            for unit, grown, after in growth.steps(ideal, ready):
                if grown not in larger:
                    larger[grown] = after
                    grown_bytes[grown] = bytes_of[ideal] + crossing.added(unit, grown)
        ordered = (1 << size) - 1
        kept = sorted(larger, key=lambda ideal: (ideal != ordered, grown_bytes[ideal], ideal))[:width]
        level = {ideal: larger[ideal] for ideal in kept}
        bytes_of = {ideal: grown_bytes[ideal] for ideal in kept}
        cuts.extend(sorted(kept))
    return cuts


class _CrossingBytes:
    """The change in the bytes that cross a cut when one unit joins it."""

    def __init__(self, problem: Problem) -> None:
        self._produced = [0] * len(problem.units)
        self._read: list[list[tuple[int, int]]] = [[] for _ in problem.units]
        for flow in problem.flows:
            size, needed = flow.bytes + flow.gradient_bytes, sum(1 << unit for unit in flow.consumers)
            self._produced[flow.producer] += size
            for unit in flow.consumers:
                self._read[unit].append((needed, size))

    def added(self, unit: int, grown: int) -> int:
        """The change in bytes when `unit` joins, so that the ideal becomes `grown`.

        The unit's outputs begin to cross the cut. Tensors whose consumers are now all inside no longer cross the
        cut."""
        return self._produced[unit] - sum(size for needed, size in self._read[unit] if needed & ~grown == 0)
