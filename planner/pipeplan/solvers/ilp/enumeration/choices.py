"""The stages that a plan within an upper bound on the pace may have: pairs of closed sets of layers on a place.

A plan is a path of such choices, from no layers and the first worker to all layers and the last worker. Left out are
those that cannot keep to the bound or to the memory by themselves (`stage_fit`), and those that are part of no path,
or of none that fits in memory (`in_flight`). Where nothing is left, there is no plan.

The choices within a bound are among those within a larger one. So a search for the least bound that leaves any looks
at all stages once, for the largest bound, and from there on only at those that were left.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pipeplan.solvers.ilp.enumeration import in_flight
from pipeplan.solvers.ilp.enumeration.closed_sets import ClosedSets, Flags, Floats, Ints
from pipeplan.solvers.ilp.enumeration.place_table import PlaceTable
from pipeplan.solvers.ilp.enumeration.stage_fit import StageFit
from pipeplan.solvers.ilp.enumeration.stage_memory import Stages
from pipeplan.solvers.ilp.facts.placement_facts import Place, PlacementFacts
from pipeplan.util.deadline import NO_DEADLINE, Deadline

MOST_CHOICES = 6_000_000
"""The most choices that are kept; they take some hundred bytes each."""
MOST_LOOKED_AT = 60_000_000
"""The most pairs of sets on places that are looked at, which takes about a minute."""
# So many pairs are looked at together.
_TOGETHER = 500_000


@dataclass(frozen=True)
class Choices:
    """Choices of a place and of the sets at which its stage begins and ends, by index."""

    sets: ClosedSets
    table: PlaceTable
    stages: Stages

    def __len__(self) -> int:
        return len(self.stages.place)

    def take(self, kept: Flags | Ints) -> Choices:
        """The choices with these flags or indices."""
        return Choices(self.sets, self.table, self.stages.take(kept))

    @property
    def places(self) -> list[Place]:
        """First worker and replicas of every place, by index."""
        return self.table.places

    @cached_property
    def used(self) -> dict[Place, frozenset[int]]:
        """The places of all choices, with the last idle workers behind each: the next stage goes on with its layers."""
        (place, begin, end), workers = self.stages, len(self.table.bounds) - 1
        follows = np.zeros((len(self.sets), workers + 1), dtype=bool)
        follows[begin, self.table.start[place]] = True
        follows[-1, workers] = True
        numbers, first = np.unique(place, return_index=True)
        behind = np.logical_or.reduceat(follows[end], first) if len(first) else follows[:0]
        found = {}
        for number, flags in zip(numbers.tolist(), behind, strict=True):
            stop = int(self.table.stop[number])
            found[self.places[number]] = frozenset(int(one) - 1 for one in np.flatnonzero(flags) if one >= stop)
        return found

    @cached_property
    def from_worker(self) -> list[slice]:
        """By worker, the choices that start there."""
        return self.table.by_worker(self.stages.place)

    def decided(self, workers: int) -> tuple[Flags, Flags]:
        """For every block and worker, whether the block's stage starts at the worker or before: in all plans, in none.

        The layers of stages that start at a worker or before are a set that choices with this set as their end have
        begun, and none that begins with it.
        """
        starts = self.table.start[self.stages.place]
        since, until = np.full(len(self.sets), workers), np.zeros(len(self.sets), dtype=np.intp)
        np.minimum.at(since, self.stages.end, starts)
        np.maximum.at(until, self.stages.begin, starts)
        since[0], until[-1] = 0, workers
        at = np.arange(workers)
        possible = (since[:, None] <= at) & (at < until[:, None])
        counts = self.sets.has.astype(np.float32).T @ possible.astype(np.float32)
        return np.asarray(counts == possible.sum(axis=0)), np.asarray(counts == 0)

    def least_crossing(self, sizes: Iterable[float], workers: int) -> list[float]:
        """For every cut between two workers, the least sum of sizes, by tensor, that cross it where a stage ends before
        it and another starts behind it; infinite where none does."""
        crossing, stages = self.sets.crossing(sizes), self.stages
        since, until = np.full(len(self.sets), workers + 1), np.zeros(len(self.sets), dtype=np.intp)
        np.minimum.at(since, stages.end, self.table.stop[stages.place])
        np.maximum.at(until, stages.begin, self.table.start[stages.place])
        at = np.arange(1, workers)[:, None]
        return [float(least) for least in np.where((since <= at) & (at <= until), crossing, np.inf).min(axis=1)]


def choices_within(
    facts: PlacementFacts,
    table: PlaceTable,
    deadline: Deadline = NO_DEADLINE,
    *,
    among: Choices | None = None,
) -> Choices | None:
    """The choices that may be part of a plan within U, or None where there are too many to look at.

    The choices within a larger bound, `among` which they are, save most of the time where the layers are joined in the
    same blocks.
    """
    if among is not None and among.sets.home == facts.layers.home:
        fit = StageFit(facts, among.sets, table)
        found = among.take(fit.kept(among.stages))
    else:
        sets = ClosedSets.of(facts.layers)
        if sets is None:
            return None
        fit = StageFit(facts, sets, table)
        stages = _all_kept(fit, deadline)
        if stages is None:
            return None
        found = Choices(sets, fit.table, stages)
    return _on_paths(fit, found, deadline)


def _all_kept(fit: StageFit, deadline: Deadline) -> Stages | None:
    """All stages that keep to U by themselves, by place; None where there are too many."""
    kept: list[Stages] = []
    pending: list[Stages] = []
    looked, waiting, count = 0, 0, 0
    for stages in _pairs(fit):
        pending.append(stages)
        waiting += len(stages.place)
        if waiting < _TOGETHER:
            continue
        deadline.check()
        kept.append(_kept_of(fit, pending))
        looked, waiting, count, pending = looked + waiting, 0, count + len(kept[-1].place), []
        if looked > MOST_LOOKED_AT or count > MOST_CHOICES:
            return None
    return _joined([*kept, _kept_of(fit, pending)])


def _kept_of(fit: StageFit, parts: list[Stages]) -> Stages:
    stages = _joined(parts)
    return stages.take(fit.kept(stages))


def _joined(parts: list[Stages]) -> Stages:
    nothing = np.zeros(0, dtype=np.intp)
    arrays = zip(*(parts or [Stages(nothing, nothing, nothing)]), strict=True)
    return Stages(*(np.concatenate(one) for one in arrays))


def _pairs(fit: StageFit) -> Iterator[Stages]:
    """For every place, the pairs of a set at which a stage may begin and one at which it may end, by their work and the
    least memory that they need."""
    table, work, held, slack = fit.table, fit.work, fit.least_bytes(), 1e-9 * fit.work[fit.last]
    by_work = np.argsort(work, kind="stable")
    most_s, most_bytes = fit.most_work_s() + slack, table.capacity * (1 + 1e-9)
    ends: dict[int, tuple[Ints, Floats]] = {}
    for worker in range(fit.facts.workers):
        begin = fit.begins(worker)
        if not len(begin):
            continue
        for place in range(table.bounds[worker], table.bounds[worker + 1]):
            stop = int(table.stop[place])
            if stop not in ends:
                may_end = fit.reached[:, stop].copy()
                may_end[0], may_end[fit.last] = False, True
                mine = by_work[may_end[by_work]]
                # The least of each set and of all with more work, which does not fall.
                ends[stop] = mine, np.minimum.accumulate(held[mine][::-1])[::-1]
            mine, least_held = ends[stop]
            low = np.searchsorted(work[mine], work[begin] - slack)
            high = np.searchsorted(work[mine], work[begin] + most_s[place], "right")
            high = np.minimum(high, np.searchsorted(least_held, held[begin] + most_bytes[place], "right"))
            counts = np.maximum(0, high - low)
            total = int(counts.sum())
            if total:
                ahead = np.repeat(low - np.cumsum(counts) + counts, counts)
                yield Stages(np.full(total, place), np.repeat(begin, counts), mine[ahead + np.arange(total)])


def _on_paths(fit: StageFit, choices: Choices, deadline: Deadline) -> Choices:
    """The choices on paths from the first worker to the last one that fit in memory.

    What is left out leaves fewer paths for the others, until nothing changes.
    """
    while True:
        deadline.check()
        choices = choices.take(_from_the_input(fit, choices))
        kept = in_flight.fitting(fit, choices.stages, deadline)
        if fit.facts.problem.options.flushes:
            kept[kept] = _within_a_batch(fit, choices.take(kept))
        if kept.all():
            return choices
        choices = choices.take(kept)


def _from_the_input(fit: StageFit, choices: Choices) -> Flags:
    """Tell which choices a path reaches from no layers and the first worker. Workers may stay idle."""
    reached = np.zeros((len(choices.sets), fit.facts.workers + 1), dtype=bool)
    reached[0, 0] = True
    place, begin, end = choices.stages
    kept, stop = np.zeros(len(choices), dtype=bool), choices.table.stop[place]
    for worker, mine in enumerate(choices.from_worker):
        kept[mine] = reached[begin[mine], worker]
        row = mine.start + np.flatnonzero(kept[mine])
        reached[end[row], stop[row]] = True
        reached[:, worker + 1] |= reached[:, worker]
    return kept


def _within_a_batch(fit: StageFit, choices: Choices) -> Flags:
    """With a flush, which choices keep to U together with the messages of the path before them that has the least."""
    place, begin, end = choices.stages
    stop, crossing = choices.table.stop[place], fit.crossing_s(choices.stages)
    ahead = np.full((len(choices.sets), fit.facts.workers + 1), np.inf)
    ahead[0] = 0.0
    for worker, mine in enumerate(choices.from_worker):
        np.minimum.at(ahead, (end[mine], stop[mine]), ahead[begin[mine], worker] + crossing[mine])
        ahead[:, worker + 1] = np.minimum(ahead[:, worker + 1], ahead[:, worker])
    total = ahead[begin, choices.table.start[place]] + fit.late_s(choices.stages)
    return np.asarray(total <= fit.facts.unit_s * (1 + 1e-9))
