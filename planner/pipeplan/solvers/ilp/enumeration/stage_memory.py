"""Lower bounds within U on the minibatches that stages have in flight, and on the memory that these take.

A stage lies between two closed sets (`closed_sets`), on a place.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pipeplan.cost import formulas
from pipeplan.plan.schedules import DOUBLE_BUFFERED, GPIPE, TRAITS, VERTICAL, update_lag
from pipeplan.solvers.ilp.enumeration.closed_sets import ClosedSets, Flags, Floats, Ints
from pipeplan.solvers.ilp.enumeration.place_table import PlaceTable
from pipeplan.solvers.ilp.facts.placement_facts import PlacementFacts

SLACK = 1e-9
"""Relative slack for rounding within which a stage still keeps to a limit."""


class Stages(NamedTuple):
    """Stages by the index of their place, and of the sets at which they begin and end: three arrays."""

    place: Ints
    begin: Ints
    end: Ints

    def take(self, kept: Flags | Ints | slice) -> Stages:
        """The stages with these flags or indices."""
        return Stages(self.place[kept], self.begin[kept], self.end[kept])


class StageDepths:
    """The depths and the memory of stages, from what every set of layers adds up to."""

    def __init__(self, facts: PlacementFacts, sets: ClosedSets, table: PlaceTable) -> None:
        self.facts, self.table, self.sets, blocks = facts, table, sets, facts.layers.blocks
        self.work = sets.sums(block.work_s for block in blocks)
        self.forward = sets.sums(block.forward_s for block in blocks)
        self.update = sets.sums(block.update_s for block in blocks)
        self.parameters = sets.sums(block.parameters for block in blocks)
        self.buffers = sets.sums(block.buffers for block in blocks)
        self.saved = sets.sums(block.saved for block in blocks)
        self.sent = sets.crossing(tensor.sent for tensor in facts.layers.tensors)
        self.returned = sets.crossing(tensor.returned for tensor in facts.layers.tensors)
        self.last = len(sets) - 1
        self.recomputes = (False, True) if facts.problem.options.recompute and facts.problem.training else (False,)

    def group_s(self, stages: Stages) -> Floats:
        """Seconds of one all-reduce among the replicas of stages."""
        place, begin, end = stages
        size = self.parameters[end] - self.parameters[begin]
        return np.asarray(self.table.ring_latency_s[place] + self.table.ring_s_per_byte[place] * size)

    def busy(self, work: Floats) -> Floats:
        """The least workers that do so much work within U, and one at least."""
        return np.maximum(1.0, np.ceil(work / (self.facts.fastest * self.facts.unit_s * (1 + SLACK)) - 1e-6))

    def depths(self, stages: Stages, behind: Floats) -> tuple[Floats, Floats]:
        """Lower bounds on the depths of stages, and on what they have in flight (`formulas.in_flight_behind`), given
        the least that is in flight behind them."""
        facts, table, (place, _, end) = self.facts, self.table, stages
        replicas, nothing = table.replicas[place], np.zeros(len(end))
        if not facts.problem.training:
            return nothing, nothing
        pace_s = facts.unit_s * (1 + SLACK)
        wait = self._wait(stages, pace_s)
        everything = self._everything(stages)
        if facts.problem.options.schedule == GPIPE:
            depth = everything
        elif facts.problem.options.flushes:
            needed = formulas.flush_depth(behind, float(facts.minibatches or 1), replicas)
            depth = np.where(end == self.last, 1.0, needed)
        else:
            busier = np.maximum(self.sent, self.returned)[end]
            transfer = formulas.transfer_time(busier, table.behind_rate[place], table.behind_latency_s[place])
            needed = formulas.in_flight_depth(behind, wait, transfer, pace_s, replicas)
            depth = np.where(end == self.last, 1.0, np.minimum(everything, needed))
        return depth, np.asarray(formulas.in_flight_behind(depth, replicas, wait))

    def covered(self, stages: Stages, depth: Floats) -> Floats:
        """The most that may be in flight behind stages of these depths (`formulas.in_flight_depth` the other way
        round), at the pace U; infinite where that is no matter."""
        facts, table, (place, _, end) = self.facts, self.table, stages
        if not facts.problem.training or facts.problem.options.schedule == GPIPE:
            return np.full(len(end), np.inf)
        if facts.problem.options.flushes:
            behind = (depth - 1.0) * table.replicas[place] + 1e-6
            return np.where(depth >= self._everything(stages), np.inf, behind)
        pace_s = facts.unit_s * (1 + SLACK)
        busier = np.maximum(self.sent, self.returned)[end]
        transfer = formulas.transfer_time(busier, table.behind_rate[place], table.behind_latency_s[place])
        wait = self._wait(stages, facts.unit_s * (1 + SLACK))
        behind = (depth - 1.0) * table.replicas[place] - wait - 2 * transfer / pace_s + 1e-6
        return np.where(depth >= self._everything(stages), np.inf, behind)

    def depth_of(self, stages: Stages, in_flight: Floats) -> Floats:
        """The largest depths of stages with at most so much in flight, their wait for the group included."""
        wait = self._wait(stages, self.facts.unit_s * (1 + SLACK))
        return np.asarray(np.floor((in_flight - wait) / self.table.replicas[stages.place] + 1e-6))

    def most_in_time(self, stages: Stages) -> Floats:
        """Upper bounds on the depths under 2BW (`is_in_time`); infinite under other schedules."""
        facts, problem = self.facts, self.facts.problem
        if problem.options.schedule != DOUBLE_BUFFERED or not problem.training or facts.minibatches is None:
            return np.full(len(stages.end), np.inf)
        late = (self.group_s(stages) + problem.copies_allreduce_s) / (facts.unit_s * (1 + SLACK)) - 1.0 / problem.copies
        spare = (facts.minibatches - np.maximum(0.0, late)) / self.table.replicas[stages.place]
        return np.asarray(np.floor(spare + 1e-6))

    def deepest(self, stages: Stages, behind: Floats, pace_s: float) -> tuple[Floats, Floats]:
        """The most minibatches in flight that stages need at this pace or a slower one, given the most behind them, and
        the longest that they wait for their group."""
        facts, (_, _, end) = self.facts, stages
        wait, everything = self._wait(stages, pace_s), self._everything(stages)
        if facts.problem.options.flushes or pace_s <= 0:
            return np.where((end == self.last) & (facts.problem.options.schedule != GPIPE), 1.0, everything), wait
        bandwidth, latency_s = facts.way(range(facts.workers), len(facts.problem.cluster.levels))
        transfer = formulas.transfer_time(np.maximum(self.sent, self.returned)[end], bandwidth, latency_s)
        needed = formulas.in_flight_depth(behind, wait, transfer, pace_s, self.table.replicas[stages.place])
        # One more for rounding.
        return np.where(end == self.last, 1.0, np.minimum(everything, needed + 1)), wait

    def _everything(self, stages: Stages) -> Floats:
        """With a flush, all minibatches of an update that one replica takes; else infinite."""
        if not self.facts.problem.options.flushes:
            return np.full(len(stages.end), np.inf)
        replicas = self.table.replicas[stages.place]
        return np.asarray(formulas.rounds(float(self.facts.minibatches or 1), replicas))

    def _wait(self, stages: Stages, pace_s: float) -> Floats:
        """The minibatches for which stages wait for their group at this pace."""
        if self.facts.minibatches is not None:
            return np.zeros(len(stages.end))
        replicas = self.table.replicas[stages.place]
        wait = formulas.group_wait(self.group_s(stages), pace_s, replicas, self.facts.problem.copies)
        return np.asarray(wait, dtype=np.float64)

    def is_in_time(self, stages: Stages, depth: Floats) -> Flags:
        """Under 2BW, whether an update is ready before the first forward pass that needs it: d r + (G + G′) / U - 1/m
        is at most the minibatches of an update, as is d r (`formulas.buffered_pace`)."""
        facts, problem = self.facts, self.facts.problem
        if problem.options.schedule != DOUBLE_BUFFERED or not problem.training or facts.minibatches is None:
            return np.ones(len(depth), dtype=bool)
        spare = facts.minibatches - depth * self.table.replicas[stages.place]
        reduced = self.group_s(stages) + problem.copies_allreduce_s
        late = reduced > facts.unit_s * (1 + SLACK) * (spare + 1.0 / problem.copies)
        return np.asarray((spare >= 0) & ~late)

    def fits(self, stages: Stages, depth: Floats, under_way: Floats | None, *, again: bool) -> Flags:
        """Whether stages fit in memory at these depths."""
        fixed, each = self._memory(stages, again=again)
        parameters = self.parameters[stages.end] - self.parameters[stages.begin]
        versions = self._versions(stages, depth, under_way) if self.facts.problem.training else 0
        versions = formulas.version_memory(parameters, versions, self.facts.problem.options.copies_per_version)
        return np.asarray(fixed + versions + depth * each <= self.table.capacity[stages.place] * (1 + SLACK))

    def least_bytes(self) -> Floats:
        """By set, the bytes that its layers take of a worker at least, whatever the depth and the replicas."""
        problem, training = self.facts.problem, self.facts.problem.training
        if not problem.options.memory:
            return np.zeros(len(self.work))
        # Where replicas divide the state, any part of it may be on another worker.
        ratio = problem.state_ratio - problem.divided_ratio
        versions = max(1, TRAITS[problem.options.schedule].versions) if training else 0
        size = formulas.fixed_memory(self.parameters, self.buffers, 0.0, ratio, training)
        size = size + formulas.version_memory(self.parameters, versions, problem.options.copies_per_version)
        return np.asarray(size + self.saved * training)

    def most_depth(self, stages: Stages) -> Floats:
        """Upper bounds on the depths at which stages fit in memory; infinite without limits on memory."""
        if not self.facts.problem.options.memory:
            return np.full(len(stages.end), np.inf)
        most = np.zeros(len(stages.end))
        for again in self.recomputes:
            fixed, each = self._memory(stages, again=again)
            room = self.table.capacity[stages.place] * (1 + SLACK) - fixed
            deep = np.divide(room, each, out=np.full(len(room), np.inf), where=each > 0)
            most = np.maximum(most, np.floor(deep + 1e-6))
        return most

    def _memory(self, stages: Stages, *, again: bool) -> tuple[Floats, Floats]:
        """Bytes that stages need beside weight versions that do not depend on the depth, and bytes for each minibatch
        in flight."""
        problem, options, table = self.facts.problem, self.facts.problem.options, self.table
        place, begin, end = stages
        parameters = self.parameters[end] - self.parameters[begin]
        saved, sent, received = self.saved[end] - self.saved[begin], self.sent[end], self.sent[begin]
        around = sent + received + self.returned[end] + self.returned[begin]
        buffers, ratio = self.buffers[end] - self.buffers[begin], problem.state_ratio
        size = formulas.fixed_memory(parameters, buffers, around, ratio, problem.training)
        if not problem.training:
            return np.asarray(size), np.zeros(len(end))
        stashes = options.copies_per_version if TRAITS[options.schedule].versions == 0 else 0
        everyone = table.replicas[place] * problem.copies
        late = ((end < self.last) | (begin > 0)) * stashes
        size = size + (everyone > 1) * formulas.replica_memory(parameters, 2, late)
        size = size - formulas.divided_state(parameters, everyone, problem.divided_ratio)
        size = size + formulas.recompute_memory(saved, sent, again)
        size = size + self.sets.largest((block.workspace for block in self.facts.layers.blocks), begin, end)
        each = formulas.memory_per_depth(parameters, saved, received, sent, stashes=stashes, recompute=again)
        return np.asarray(size), np.asarray(each)

    def _versions(self, stages: Stages, depth: Floats, under_way: Floats | None) -> Floats | int:
        """The weight versions that stages keep at least, beside those of the minibatches in flight."""
        constant = TRAITS[self.facts.problem.options.schedule].versions
        if self.facts.problem.options.schedule != VERTICAL:
            return constant
        place, begin, end = stages
        replicas, several = self.table.replicas[place], (end < self.last) | (begin > 0)
        if under_way is None:
            # All minibatches in flight at the input stage are under way since.
            least = self.busy(self.work[self.last :]) - 1.0
            return np.asarray(constant + several * np.ceil(least / replicas), dtype=np.float64)
        behind = constant + several * np.ceil(np.maximum(0.0, under_way[replicas]) / replicas)
        lag = update_lag(replicas * self.facts.problem.copies, ~several)
        return np.asarray(np.where(begin == 0, depth + lag, behind), dtype=np.float64)
