"""Which stages keep to an upper bound on the pace by themselves, and fit in memory at the least depth they can have.

A stage lies between two closed sets (`closed_sets`), on a place. Everything here is necessary for a stage of a plan
within the bound, and not sufficient: boundaries go over the fastest links that they can have, cards carry what the
stage alone puts on them, and a stage has no more minibatches in flight than the least behind it asks for.
"""

from __future__ import annotations

import numpy as np

from pipeplan.cost import formulas
from pipeplan.plan.schedules import GPIPE, TRAITS, VERTICAL
from pipeplan.solvers.ilp.closed_sets import ClosedSets, Flags, Floats, Ints
from pipeplan.solvers.ilp.facts import Place, PlacementFacts
from pipeplan.solvers.ilp.load_factors import LoadFactors

# Relative slack for rounding within which a stage still keeps to a limit.
_SLACK = 1e-9


def _ring_bytes(members: int) -> float:
    """Bytes that every member of a ring sends for an all-reduce of one byte."""
    return float(formulas.ring_allreduce_time(members, 1.0, 1.0, 0.0))


class StageFit:
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
        if facts.problem.options.recompute and facts.problem.training:
            kept |= self._quick(place, begin, end, again=True)
        return begin[kept], end[kept]

    def holds(self, place: Place, begin: Ints, end: Ints, depth: Floats) -> Flags:
        """Whether stages that are quick enough fit in memory on a place at these depths."""
        options = self.facts.problem.options
        if not options.memory:
            return np.ones(len(begin), dtype=bool)
        held = self._quick(place, begin, end, again=False) & self._holds(place, begin, end, depth, again=False)
        if options.recompute and self.facts.problem.training:
            held |= self._quick(place, begin, end, again=True) & self._holds(place, begin, end, depth, again=True)
        return held

    def depths(self, place: Place, begin: Ints, end: Ints, behind: Floats) -> tuple[Floats, Floats]:
        """Lower bounds on the depths of stages, and on what they have in flight (`formulas.in_flight_behind`), given
        the least that is in flight behind them."""
        facts, options, replicas = self.facts, self.facts.problem.options, place[1]
        nothing = np.zeros(len(end))
        if not facts.problem.training:
            return nothing, nothing
        everything, pace_s, wait = np.inf, facts.unit_s * (1 + _SLACK), nothing
        if options.flushes:
            everything = float(formulas.rounds(facts.minibatches or 1, replicas))
            pace_s = float(formulas.flush_pace(facts.room_s + _SLACK * facts.unit_s, facts.minibatches or 1))
        elif facts.minibatches is None:
            wait = self._wait(place, begin, end, pace_s)
        if options.schedule == GPIPE:
            depth = np.full(len(end), everything)
        elif pace_s <= 0:
            depth = np.where(end == self.last, 1.0, everything)
        else:
            needed = formulas.in_flight_depth(behind, wait, self._transfer(place)[end], pace_s, replicas)
            depth = np.where(end == self.last, 1.0, np.minimum(everything, needed))
        return depth, np.asarray(formulas.in_flight_behind(depth, replicas, wait))

    def _wait(self, place: Place, begin: Ints, end: Ints, pace_s: float) -> Floats:
        """The least that stages wait for their group, in minibatches."""
        group = self._group(place, begin, end)
        wait = formulas.group_wait(group, pace_s, place[1], self.facts.problem.copies)
        return np.broadcast_to(np.asarray(wait, dtype=np.float64), end.shape)

    def _group(self, place: Place, begin: Ints, end: Ints) -> Floats:
        """Seconds of one all-reduce among the replicas of stages on a place."""
        latency = self.facts.allreduce(place, 0.0)
        rate = (self.facts.allreduce(place, self.facts.total) - latency) / self.facts.total
        return np.asarray(latency + rate * (self.parameters[end] - self.parameters[begin]))

    def _transfer(self, place: Place) -> Floats:
        """By set, the least time of one message from a place to the stage behind it."""
        facts, (start, stop) = self.facts, (place[0], sum(place))
        if stop >= facts.workers or not facts.problem.cluster.uniform:
            return np.zeros(self.last + 1)
        bandwidth, latency_s = facts.way(range(start, stop + 1), facts.problem.cluster.level_between(start, stop))
        return np.asarray(formulas.transfer_time(np.maximum(self.sent, self.returned), bandwidth, latency_s))

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
        if facts.problem.options.flushes:
            return np.asarray(self.added_s(place, begin, end, again=again) <= facts.room_s + _SLACK * facts.unit_s)
        if again:
            work = work + self.forward[end] - self.forward[begin]
        latency = facts.synchronisation(place, 0.0)
        rate = (facts.synchronisation(place, facts.total) - latency) / facts.total
        synchronisation = latency + rate * (self.parameters[end] - self.parameters[begin])
        compute = formulas.compute_time(work, place[1], facts.speed(place))
        time = formulas.overlapped(compute, synchronisation, facts.problem.options.overlap)
        return np.asarray(time <= facts.unit_s * (1 + _SLACK))

    def added_s(self, place: Place, begin: Ints, end: Ints, *, again: bool = False) -> Floats:
        """With a flush, the seconds that stages add to a batch at least, beside the first minibatch's way through all
        stages: the other minibatches, and the exposed part of the all-reduce."""
        facts = self.facts
        forward = (self.forward[end] - self.forward[begin]) * again
        work = self.work[end] - self.work[begin] + forward
        steady = formulas.flush_steady(work, facts.minibatches or 1, place[1]) + forward
        exposed = formulas.flush_exposed(self._group(place, begin, end), self.work[begin] / facts.fastest)
        return np.asarray(steady / facts.speed(place) + exposed)

    def crossing_s(self, place: Place) -> Floats:
        """By set, the least seconds that a message from a place to the stage behind it and its gradient take."""
        facts, (start, stop) = self.facts, (place[0], sum(place))
        if stop >= facts.workers or not facts.problem.cluster.uniform:
            return np.zeros(self.last + 1)
        bandwidth, latency_s = facts.way(range(start, stop + 1), facts.problem.cluster.level_between(start, stop))
        crossing = (self.sent + self.returned) / bandwidth + 2 * latency_s
        crossing[self.last] = 0.0
        return np.asarray(crossing)

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
            copies, constant = options.copies_per_version, TRAITS[options.schedule].versions
            stashes, everyone = copies if constant == 0 else 0, place[1] * problem.copies
            several = (end < self.last) | (begin > 0)
            versions = np.full(len(end), float(constant))
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
