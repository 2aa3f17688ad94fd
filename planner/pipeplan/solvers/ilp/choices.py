"""The stages that a plan within an upper bound on the pace may have: pairs of closed sets of layers on a place.

A plan is a path of such choices, from no layers and the first worker to all layers and the last worker. Left out are
those that cannot keep to the bound or to the memory by themselves (`stage_fit`), and those that are part of no path.
Where nothing is left, there is no plan.

Memory grows with the depth, and the depth with what is in flight behind a stage. Of all paths behind a pair of a set
and a worker, the least that is in flight bounds the depth of a stage in front of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pipeplan.solvers.ilp.closed_sets import ClosedSets, Flags, Ints
from pipeplan.solvers.ilp.facts import Place, PlacementFacts
from pipeplan.solvers.ilp.load_factors import LoadFactors
from pipeplan.solvers.ilp.stage_fit import StageFit
from pipeplan.util.deadline import NO_DEADLINE, Deadline

MOST_CHOICES = 6_000_000
"""The most choices that are looked at; they take some hundred bytes each."""


@dataclass(frozen=True)
class Choices:
    """Choices of a place and of the sets at which its stage begins and ends, by index."""

    sets: ClosedSets
    places: list[Place]
    place: Ints
    begin: Ints
    end: Ints

    def __len__(self) -> int:
        return len(self.place)

    def take(self, kept: Flags) -> Choices:
        """The choices with these flags."""
        return Choices(self.sets, self.places, self.place[kept], self.begin[kept], self.end[kept])

    @property
    def used(self) -> frozenset[Place]:
        """The places of all choices."""
        return frozenset(self.places[number] for number in np.unique(self.place).tolist())

    def decided(self, workers: int) -> tuple[Flags, Flags]:
        """For every block and worker, whether the block's stage starts at the worker or before: in all plans, in none.

        The layers of stages that start at a worker or before are a set that choices with this set as their end have
        begun, and none that begins with it.
        """
        starts = np.array([place[0] for place in self.places], dtype=np.intp)[self.place]
        since, until = np.full(len(self.sets), workers), np.zeros(len(self.sets), dtype=np.intp)
        np.minimum.at(since, self.end, starts)
        np.maximum.at(until, self.begin, starts)
        since[0], until[-1] = 0, workers
        at = np.arange(workers)
        possible = (since[:, None] <= at) & (at < until[:, None])
        has = self.sets.has.astype(np.int32)
        counts = has.T @ possible.astype(np.int32)
        return np.asarray(counts == possible.sum(axis=0)), np.asarray(counts == 0)

    def by_place(self) -> Iterator[tuple[Place, slice]]:
        """The places by their first worker, and where their choices are."""
        bounds = np.searchsorted(self.place, np.arange(len(self.places) + 1))
        for number, place in enumerate(self.places):
            yield place, slice(int(bounds[number]), int(bounds[number + 1]))


def choices_within(
    facts: PlacementFacts, factors: LoadFactors | None, deadline: Deadline = NO_DEADLINE
) -> Choices | None:
    """The choices that may be part of a plan within U, or None where there are too many to look at.

    With `factors` the loads of network cards count.
    """
    sets = ClosedSets.of(facts.layers)
    if sets is None:
        return None
    fit = StageFit(facts, sets, factors)
    places = sorted({(one.start, one.replicas) for one in facts.placements.all})
    found: list[tuple[Ints, Ints]] = []
    total = 0
    for place in places:
        deadline.check()
        found.append(fit.at(place))
        total += len(found[-1][0])
        if total > MOST_CHOICES:
            return None
    numbers = np.repeat(np.arange(len(places)), [len(begin) for begin, _ in found])
    nothing = [np.zeros(0, dtype=np.intp)]
    begins, ends = (np.concatenate([*nothing, *(pair[part] for pair in found)]) for part in (0, 1))
    choices = Choices(sets, places, numbers, begins, ends)
    choices = choices.take(_from_the_input(facts, choices))
    deadline.check()
    choices = choices.take(_to_the_output(facts, fit, choices))
    if facts.problem.options.flushes:
        choices = choices.take(_within_a_batch(facts, fit, choices))
    return choices.take(_from_the_input(facts, choices))


def _from_the_input(facts: PlacementFacts, choices: Choices) -> Flags:
    """Which choices a path leads to from no layers and the first worker. Workers may stay idle."""
    reached = np.zeros((len(choices.sets), facts.workers + 1), dtype=bool)
    reached[0, 0] = True
    kept, until = np.zeros(len(choices), dtype=bool), 0
    for place, mine in choices.by_place():
        for worker in range(until, place[0]):
            reached[:, worker + 1] |= reached[:, worker]
        until = place[0]
        kept[mine] = reached[choices.begin[mine], place[0]]
        reached[choices.end[mine][kept[mine]], sum(place)] = True
    return kept


def _to_the_output(facts: PlacementFacts, fit: StageFit, choices: Choices) -> Flags:
    """Which choices fit in memory with the least in flight behind them, on a path to all layers."""
    in_flight = np.full((len(choices.sets), facts.workers + 1), np.inf)
    in_flight[len(choices.sets) - 1] = 0.0
    kept, until = np.zeros(len(choices), dtype=bool), facts.workers
    for place, mine in reversed(list(choices.by_place())):
        for worker in range(until, place[0], -1):
            in_flight[:, worker - 1] = np.minimum(in_flight[:, worker - 1], in_flight[:, worker])
        until = place[0]
        begin, end = choices.begin[mine], choices.end[mine]
        behind = in_flight[end, sum(place)]
        row = np.flatnonzero(np.isfinite(behind))
        begin, end = begin[row], end[row]
        depth, asked = fit.depths(place, begin, end, behind[row])
        held = fit.holds(place, begin, end, depth)
        kept[mine.start + row[held]] = True
        np.minimum.at(in_flight[:, place[0]], begin[held], asked[held])
    return kept


def _within_a_batch(facts: PlacementFacts, fit: StageFit, choices: Choices) -> Flags:
    """With a flush, which choices keep to U together with the messages of the path through them that has the least."""
    ahead = np.full((len(choices.sets), facts.workers + 1), np.inf)
    ahead[0] = 0.0
    back = np.full_like(ahead, np.inf)
    back[-1] = 0.0
    until, by_place = 0, list(choices.by_place())
    crossing = {place: fit.crossing_s(place) for place, mine in by_place if mine.stop > mine.start}
    for place, mine in by_place:
        for worker in range(until, place[0]):
            ahead[:, worker + 1] = np.minimum(ahead[:, worker + 1], ahead[:, worker])
        until = place[0]
        if place in crossing:
            end = choices.end[mine]
            np.minimum.at(ahead[:, sum(place)], end, ahead[choices.begin[mine], place[0]] + crossing[place][end])
    kept, until = np.zeros(len(choices), dtype=bool), facts.workers
    for place, mine in reversed(by_place):
        for worker in range(until, place[0], -1):
            back[:, worker - 1] = np.minimum(back[:, worker - 1], back[:, worker])
        until = place[0]
        if place in crossing:
            begin, end = choices.begin[mine], choices.end[mine]
            behind = crossing[place][end] + back[end, sum(place)]
            np.minimum.at(back[:, place[0]], begin, behind)
            total = ahead[begin, place[0]] + behind + fit.added_s(place, begin, end)
            kept[mine] = total <= facts.room_s + 1e-9 * facts.unit_s
    return kept
