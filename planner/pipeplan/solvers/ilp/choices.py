"""The stages that a plan within an upper bound on the pace may have: pairs of sets of layers on a place.

A stage is a choice: of the set of layers behind which it begins, of the one at which it ends, and of its place. Both
sets are closed, that is, they have with every layer all layers before it. A plan is a path of choices, from no layers
and the first worker to all layers and the last worker. Left out are choices that by themselves take longer than the
upper bound U, need more memory than there is at the least depth that they can have, or leave the workers before or
behind them more than these can do within U, and those that are part of no path. Where nothing is left, there is no plan.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from pipeplan.cost import formulas
from pipeplan.plan.schedules import GPIPE, TRAITS, VERTICAL
from pipeplan.solvers.ilp.cards import LoadFactors
from pipeplan.solvers.ilp.facts import Place, PlacementFacts
from pipeplan.solvers.ilp.layers import LayerBlocks
from pipeplan.util.deadline import NO_DEADLINE, Deadline

MOST_SETS = 450
"""The most closed sets of layers for which stages are told apart. A chain has one more than it has layers."""
MOST_CHOICES = 6_000_000
"""The most choices that are looked at; they take some hundred bytes each."""

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]
Flags = NDArray[np.bool_]
# Relative slack for rounding within which a stage still keeps to a limit.
_SLACK = 1e-9


class ClosedSets:
    """The sets of blocks that have with every block all those before it, in an order in which subsets come first."""

    def __init__(self, layers: LayerBlocks, masks: list[int]) -> None:
        self._layers, count = layers, len(layers)
        self.has: Flags = np.array([[mask >> block & 1 for block in range(count)] for mask in masks], dtype=bool)
        """Which blocks every set has."""

    def __len__(self) -> int:
        return len(self.has)

    @staticmethod
    def of(layers: LayerBlocks) -> ClosedSets | None:
        """All closed sets, or None where there are more than `MOST_SETS`."""
        before = [0] * len(layers)
        for source, target in layers.edges:
            before[target] |= 1 << source
        found, newest = {0}, {0}
        while newest and len(found) <= MOST_SETS:
            newest = {
                mask | 1 << block
                for mask in newest
                for block, needed in enumerate(before)
                if not mask >> block & 1 and needed & ~mask == 0
            }
            found |= newest
        if len(found) > MOST_SETS:
            return None
        return ClosedSets(layers, sorted(found, key=lambda mask: (mask.bit_count(), mask)))

    def sums(self, amounts: Iterable[float]) -> Floats:
        """For every set, the sum of amounts that are given by block."""
        return np.asarray(self.has @ np.array(list(amounts), dtype=np.float64))

    def crossing(self, sizes: Iterable[float]) -> Floats:
        """For every set, the bytes of the tensors, given by tensor, that leave it."""
        total = np.zeros(len(self))
        for tensor, size in zip(self._layers.tensors, sizes, strict=True):
            total += size * (self.has[:, tensor.producer] & ~self.has[:, list(tensor.consumers)].all(axis=1))
        return total

    @cached_property
    def larger(self) -> Flags:
        """For every set, which others have all of its blocks and more."""
        missing = self.has.astype(np.int32) @ (~self.has).T.astype(np.int32)
        return np.asarray((missing == 0) & ~np.eye(len(self), dtype=bool))


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


def choices_within(
    facts: PlacementFacts, factors: LoadFactors | None, deadline: Deadline = NO_DEADLINE
) -> Choices | None:
    """The choices that may be part of a plan within U, or None where there are too many to look at.

    With `factors` the loads of network cards count.
    """
    sets = ClosedSets.of(facts.layers)
    if sets is None:
        return None
    fitting = _Fitting(facts, sets, factors)
    places = sorted({(one.start, one.replicas) for one in facts.placements.all})
    found: list[tuple[Ints, Ints]] = []
    total = 0
    for place in places:
        deadline.check()
        found.append(fitting.at(place))
        total += len(found[-1][0])
        if total > MOST_CHOICES:
            return None
    place = np.repeat(np.arange(len(places)), [len(begin) for begin, _ in found])
    nothing = [np.zeros(0, dtype=np.intp)]
    begin, end = (np.concatenate([*nothing, *(pair[part] for pair in found)]) for part in (0, 1))
    return _on_paths(facts, Choices(sets, places, place, begin, end))


def _on_paths(facts: PlacementFacts, choices: Choices) -> Choices:
    """The choices that are part of a path from no layers to all of them."""
    starts = np.array([place[0] for place in choices.places], dtype=np.intp)[choices.place]
    stops = np.array([sum(place) for place in choices.places], dtype=np.intp)[choices.place]
    forward = _reached(len(choices.sets), facts.workers, (choices.begin, starts), (choices.end, stops))
    last, size = len(choices.sets) - 1, facts.workers
    back = _reached(last + 1, size, (last - choices.end, size - stops), (last - choices.begin, size - starts))
    return choices.take(forward[choices.begin, starts] & back[last - choices.end, size - stops])


def _reached(count: int, workers: int, tails: tuple[Ints, Ints], heads: tuple[Ints, Ints]) -> Flags:
    """Which pairs of a set and a worker choices lead to, from the first set and worker. Workers may stay idle."""
    reached = np.zeros((count, workers + 1), dtype=bool)
    reached[0, 0] = True
    order = np.argsort(tails[1], kind="stable")
    bounds = np.searchsorted(tails[1][order], np.arange(workers + 1))
    for worker in range(workers):
        mine = order[bounds[worker] : bounds[worker + 1]]
        mine = mine[reached[tails[0][mine], worker]]
        reached[heads[0][mine], heads[1][mine]] = True
        reached[:, worker + 1] |= reached[:, worker]
    return reached


def _ring_bytes(members: int) -> float:
    """Bytes that every member of a ring sends for an all-reduce of one byte."""
    return float(formulas.ring_allreduce_time(members, 1.0, 1.0, 0.0))


class _Fitting:
    """Which stages keep to U and to the memory by themselves, from what every set of layers adds up to."""

    def __init__(self, facts: PlacementFacts, sets: ClosedSets, factors: LoadFactors | None) -> None:
        self.facts, self.sets, self.factors, blocks = facts, sets, factors, facts.layers.blocks
        self.work = sets.sums(block.work_s for block in blocks)
        self.forward = sets.sums(block.forward_s for block in blocks)
        self.parameters = sets.sums(block.parameters for block in blocks)
        self.buffers = sets.sums(block.buffers for block in blocks)
        self.saved = sets.sums(block.saved for block in blocks)
        self.sent = sets.crossing(tensor.sent for tensor in facts.layers.tensors)
        self.returned = sets.crossing(tensor.returned for tensor in facts.layers.tensors)
        self.last = len(sets) - 1
        placements = facts.placements
        self.final = {(one.start, one.replicas) for one in placements.all if placements.final(one)}
        self.followed = {(one.start, one.replicas) for one in placements.all if not placements.final(one)}

    def at(self, place: Place) -> tuple[Ints, Ints]:
        """The sets at which the stages that may be on a place begin and end."""
        facts, (start, stop) = self.facts, (place[0], sum(place))
        before, behind = facts.doable_s(0, start), facts.doable_s(stop, facts.workers)
        through = facts.doable_s(start, facts.workers)
        total, slack = self.work[self.last], _SLACK * self.work[self.last]
        begins = (self.work <= before + slack) & (total - self.work <= through + slack)
        ends = (total - self.work <= behind + slack) & (self.work <= facts.doable_s(0, stop) + slack)
        begins &= self._crosses(start - 1, stop - 1)
        ends &= self._crosses(start, stop)
        begins[0] = start in facts.placements.firsts
        begins[1:] &= start > 0
        ends[self.last], ends[: self.last] = place in self.final, ends[: self.last] & (place in self.followed)
        mine, theirs = np.flatnonzero(begins), np.flatnonzero(ends)
        row, column = np.nonzero(self.sets.larger[np.ix_(mine, theirs)])
        begin, end = mine[row], theirs[column]
        if self.factors is not None:
            light = self._light(place, self.factors, begin, end)
            begin, end = begin[light], end[light]
        kept = self._quick(place, begin, end, again=False)
        if facts.problem.options.memory:
            depth = self._least_depths(place, end)
            kept &= self._holds(place, begin, end, depth, again=False)
            if facts.problem.options.recompute and facts.problem.training:
                again = self._quick(place, begin, end, again=True)
                kept |= again & self._holds(place, begin, end, depth, again=True)
        return begin[kept], end[kept]

    def _crosses(self, first: int, last: int) -> Flags:
        """By set, whether a boundary between stages that hold these two workers carries within U what leaves it."""
        facts = self.facts
        if first < 0 or last >= facts.workers or facts.parallel or not facts.problem.cluster.uniform:
            return np.ones(self.last + 1, dtype=bool)
        level = facts.problem.cluster.level_between(first, last)
        within = facts.way(range(first, last + 1), level)[0] * facts.unit_s
        if facts.problem.options.flushes:
            within /= facts.minibatches or 1
        busier = np.maximum(self.sent, self.returned)
        return np.asarray(busier <= within * (1 + _SLACK))

    def _light(self, place: Place, factors: LoadFactors, begin: Ints, end: Ints) -> Flags:
        """Whether what stages alone put on the cards around their workers takes no longer than U.

        A boundary counts where the stage reaches the edge of a card's component, as the other stage is then outside.
        """
        facts, (start, stop) = self.facts, (place[0], sum(place))
        cluster, copies = facts.problem.cluster, facts.problem.copies
        parameters = (self.parameters[end] - self.parameters[begin]) * facts.problem.training
        light = np.ones(len(begin), dtype=bool)
        for level in range(len(cluster.levels)):
            edges = list(cluster.starts(level))
            around = range(cluster.component(level, start), cluster.component(level, stop - 1) + 1)
            # Equal ports are equally busy.
            for number in around[:1] if level == 0 and cluster.uniform else around:
                first, behind = edges[number], edges[number + 1]
                share = (min(stop, behind) - max(start, first)) / place[1]
                ring = factors.ring(place[1]) * _ring_bytes(place[1]) if share < 1 else 0.0
                ring += share * factors.copies * _ring_bytes(copies)
                messages_rate, rings_rate = facts.links.card(level, first)
                busy = parameters * ring / rings_rate
                ahead = self.sent[end] * (stop >= behind), self.returned[begin] * (start <= first)
                back = self.returned[end] * (stop >= behind), self.sent[begin] * (start <= first)
                messages = share * factors.messages / messages_rate * np.maximum(sum(ahead), sum(back))
                light &= busy + messages <= facts.unit_s * (1 + _SLACK)
        return light

    def _quick(self, place: Place, begin: Ints, end: Ints, *, again: bool) -> Flags:
        """Whether stages keep to U on a place; with their forward work done `again`, if they recompute."""
        facts = self.facts
        work = self.work[end] - self.work[begin]
        if again:
            work = work + self.forward[end] - self.forward[begin]
        if facts.problem.options.flushes:
            rounds = float(formulas.rounds(facts.minibatches or 1, place[1])) - 1.0
            return np.asarray(rounds * work <= (facts.room_s + _SLACK * facts.unit_s) * facts.speed(place))
        latency = facts.synchronisation(place, 0.0)
        rate = (facts.synchronisation(place, facts.total) - latency) / facts.total
        synchronisation = latency + rate * (self.parameters[end] - self.parameters[begin])
        compute = formulas.compute_time(work, place[1], facts.speed(place))
        time = formulas.overlapped(compute, synchronisation, facts.problem.options.overlap)
        return np.asarray(time <= facts.unit_s * (1 + _SLACK))

    def _least_depths(self, place: Place, end: Ints) -> Floats:
        """Lower bounds on the depths of stages: what the workers that must be busy behind them have in flight."""
        facts, options = self.facts, self.facts.problem.options
        if not facts.problem.training:
            return np.zeros(len(end))
        everything = float(formulas.rounds(facts.minibatches or 1, place[1]))
        if options.schedule == GPIPE:
            return np.full(len(end), everything)
        if options.flushes:
            return np.where(end == self.last, 1.0, min(everything, 2.0))
        behind = self._busy(self.work[self.last] - self.work[end])
        return np.where(end == self.last, 1.0, 1.0 + np.ceil(behind / place[1]))

    def _busy(self, work: Floats) -> Floats:
        """The least workers that do so much work within U, and one at least."""
        return np.maximum(1.0, np.ceil(work / (self.facts.fastest * self.facts.unit_s * (1 + _SLACK)) - 1e-6))

    def _holds(self, place: Place, begin: Ints, end: Ints, depth: Floats, *, again: bool) -> Flags:
        """Whether stages fit in memory on a place at these depths."""
        problem, options = self.facts.problem, self.facts.problem.options
        parameters = self.parameters[end] - self.parameters[begin]
        saved, sent, received = self.saved[end] - self.saved[begin], self.sent[end], self.sent[begin]
        around = sent + received + self.returned[end] + self.returned[begin]
        buffers, ratio = self.buffers[end] - self.buffers[begin], problem.state_ratio
        size = formulas.fixed_memory(parameters, buffers, around, ratio, problem.training)
        if problem.training:
            copies, versions = options.copies_per_version, TRAITS[options.schedule].versions
            stashes, everyone = copies if versions == 0 else 0, place[1] * problem.copies
            several = (end < self.last) | (begin > 0)
            if options.schedule == VERTICAL:
                # All minibatches in flight at the input stage are under way since (`schedules.vertical_versions`).
                under_way = self._busy(self.work[self.last :]) - 1.0
                versions = versions + several * np.ceil(under_way / place[1])
            size = size + formulas.version_memory(parameters, versions, copies)
            if everyone > 1:
                size = size + formulas.replica_memory(parameters, 2, several * stashes)
                size = size - formulas.divided_state(parameters, everyone, problem.divided_ratio)
            each = formulas.memory_per_depth(parameters, saved, received, sent, stashes=stashes, recompute=again)
            size = size + depth * each + formulas.recompute_memory(saved, sent, again)
        capacity = problem.capacity_of(range(place[0], sum(place)))
        return np.asarray(size <= capacity * (1 + _SLACK))
