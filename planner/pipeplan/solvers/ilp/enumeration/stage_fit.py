"""Which stages keep to an upper bound on the pace by themselves, and fit in memory at the least depth they can have.

A stage lies between two closed sets (`closed_sets`), on a place. Everything here is necessary for a stage of a plan
within the bound, and not sufficient: boundaries go over the fastest links that they can have, cards carry what the
stage alone puts on them, and a stage has no more minibatches in flight than the least behind it asks for.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from pipeplan.cost import formulas
from pipeplan.plan.schedules import TRAITS
from pipeplan.solvers.ilp.enumeration.closed_sets import ClosedSets, Flags, Floats, Ints
from pipeplan.solvers.ilp.enumeration.place_table import PlaceTable
from pipeplan.solvers.ilp.enumeration.stage_memory import SLACK, StageDepths, Stages
from pipeplan.solvers.ilp.facts.placement_facts import PlacementFacts


class StageFit(StageDepths):
    """Tell which stages keep to U and to the memory by themselves."""

    def __init__(self, facts: PlacementFacts, sets: ClosedSets, table: PlaceTable) -> None:
        super().__init__(facts, sets, table)
        self.may_be_last, self.may_be_followed = self._idle_behind()
        self.reached = self._reached()
        """By set and worker, whether the layers of the set may be those of the workers before."""

    def _idle_behind(self) -> tuple[Flags, Flags]:
        """By place, whether its stage may be the last one, and whether others may follow."""
        placements, table, workers = self.facts.placements, self.table, self.facts.workers
        if placements.shapes is None:
            return workers - table.stop <= placements.most_idle, table.stop < workers
        final = {(one.start, one.replicas) for one in placements.all if placements.final(one)}
        followed = {(one.start, one.replicas) for one in placements.all if not placements.final(one)}
        flags = [np.array([place in those for place in table.places], dtype=bool) for those in (final, followed)]
        return flags[0], flags[1]

    def _reached(self) -> Flags:
        facts, total = self.facts, self.work[self.last]
        before = np.array([facts.doable_s(0, worker) for worker in range(facts.workers + 1)])
        behind = np.array([facts.doable_s(worker, facts.workers) for worker in range(facts.workers + 1)])
        work, slack = self.work[:, None], SLACK * total
        return np.asarray((work <= before + slack) & (total - work <= behind + slack))

    # -- necessary conditions on a stage alone --

    def most_work_s(self) -> Floats:
        """By place, the most work that a stage can have there."""
        facts, table = self.facts, self.table
        if facts.problem.options.flushes:
            rounds = formulas.rounds(float(facts.minibatches or 1), table.replicas)
            return np.asarray(facts.unit_s * (1 + SLACK) / rounds * table.speed)
        return np.asarray(facts.unit_s * (1 + SLACK) * table.replicas * table.speed)

    def begins(self, worker: int) -> Ints:
        """The sets at which a stage from this worker on may begin."""
        found = self.reached[:, worker].copy()
        found[0] = worker in self.facts.placements.firsts
        found[1:] &= worker > 0
        return np.flatnonzero(found)

    def kept(self, stages: Stages) -> Ints:
        """The indices of those stages that keep to U, and fit in memory with the least that can be in flight."""
        rows = np.flatnonzero(self._ordered(stages))
        for test in (self._is_quick, self._crosses, self._is_held_at_least, self._is_light):
            rows = rows[test(stages.take(rows))]
        return rows

    def _ordered(self, stages: Stages) -> Flags:
        """Whether stages have layers, and all workers around them enough for the others."""
        table, (place, begin, end) = self.table, stages
        ends = np.where(end == self.last, self.may_be_last[place], self.may_be_followed[place])
        begins = np.where(begin == 0, np.isin(table.start, self.facts.placements.firsts)[place], table.start[place] > 0)
        # Idle workers may be before the first stage and behind the last one.
        begins &= (begin == 0) | self.reached[begin, table.start[place]]
        ends &= (end == self.last) | self.reached[end, table.stop[place]]
        return np.asarray(begins & ends & self.sets.larger[begin, end])

    def _is_quick(self, stages: Stages) -> Flags:
        quick = self._quick(stages, again=False)
        return quick | self._quick(stages, again=True) if len(self.recomputes) > 1 else quick

    def _quick(self, stages: Stages, *, again: bool) -> Flags:
        """Whether stages keep to U; with their forward work done `again`, if they recompute."""
        facts, table, (place, begin, end) = self.facts, self.table, stages
        if facts.problem.options.flushes:
            longest = np.maximum(self.alone_s(stages, again=again), self.late_s(stages, again=again))
            return np.asarray(longest <= facts.unit_s * (1 + SLACK))
        work = self.work[end] - self.work[begin]
        if again:
            work = work + self.forward[end] - self.forward[begin]
        shared = table.replicas[place] if facts.minibatches is None else facts.minibatches
        compute = formulas.compute_time(work, table.replicas[place], table.speed[place])
        time = formulas.overlapped(compute, self.group_s(stages) / shared, facts.problem.options.overlap)
        return np.asarray(time <= facts.unit_s * (1 + SLACK))

    def _crosses(self, stages: Stages) -> Flags:
        """Whether the boundaries carry within U what goes over them."""
        facts, table, (place, begin, end) = self.facts, self.table, stages
        if facts.parallel or (facts.problem.options.flushes and facts.problem.options.contention):
            return np.ones(len(place), dtype=bool)
        rounds = (facts.minibatches or 1) if facts.problem.options.flushes else 1
        within_s = facts.unit_s * (1 + SLACK) / rounds
        busier = np.maximum(self.sent, self.returned)
        before = busier[begin] <= within_s * table.before_rate[place]
        return np.asarray(before & (busier[end] <= within_s * table.behind_rate[place]))

    def _is_light(self, stages: Stages) -> Flags:
        """Whether what stages alone put on the cards around their workers takes no longer than U.

        A boundary counts where the stage reaches the edge of a card's component, as the other stage is then outside.
        """
        place, begin, end = stages
        parameters = self.parameters[end] - self.parameters[begin]
        light = np.ones(len(place), dtype=bool)
        for per_parameter, per_byte, at_end, at_start in self.table.cards:
            out = at_end[place] * self.sent[end] + at_start[place] * self.returned[begin]
            back = at_end[place] * self.returned[end] + at_start[place] * self.sent[begin]
            busy = parameters * per_parameter[place] + per_byte[place] * np.maximum(out, back)
            light &= busy <= self.facts.unit_s * (1 + SLACK)
        return light

    def _is_held_at_least(self, stages: Stages) -> Flags:
        """Whether stages fit in memory if every worker that must be busy behind them has one minibatch in flight."""
        behind = np.zeros(len(stages.end))
        if self.facts.problem.training and not self.facts.problem.options.flushes:
            behind = np.where(stages.end == self.last, 0.0, self.busy(self.work[self.last] - self.work)[stages.end])
        depth, _ = self.depths(stages, behind)
        return self.holds(stages, depth)

    # -- a flush --

    def _own_s(self, stages: Stages, *, again: bool) -> tuple[Floats, Floats]:
        """With a flush, the least seconds of both passes of one minibatch, and of all of the busiest replica."""
        table, (place, begin, end) = self.table, stages
        work = self.work - self.update
        passes = (work[end] - work[begin] + (self.forward[end] - self.forward[begin]) * again) / table.speed[place]
        return passes, np.asarray(
            formulas.flush_busy(passes, float(self.facts.minibatches or 1), table.replicas[place])
        )

    def alone_s(self, stages: Stages, *, again: bool = False) -> Floats:
        """With a flush, the least seconds of a batch for stages by themselves: their passes and their update."""
        facts, table, (place, begin, end) = self.facts, self.table, stages
        passes, own = self._own_s(stages, again=again)
        # A backward pass takes less than a whole pass with the executor's work, which this bound leaves to hide more.
        longest = passes + facts.most_executor_s / table.speed[place]
        step = (self.update[end] - self.update[begin]) / table.speed[place] / facts.problem.options.update_share
        return np.asarray(
            own + formulas.flush_exposed(self.group_s(stages), longest, facts.problem.hidden_share) + step
        )

    def late_s(self, stages: Stages, *, again: bool = False) -> Floats:
        """With a flush, the least seconds of a batch until stages have done their passes, without transfers."""
        facts, table, (place, begin, _) = self.facts, self.table, stages
        passes, own = self._own_s(stages, again=again)
        tail = (passes + facts.most_executor_s / table.speed[place]) / 2 if self.splits else 0.0
        return np.asarray(own + self.ahead_s[begin] - np.where(begin > 0, tail, 0.0))

    @property
    def splits(self) -> bool:
        """Whether gradients of weights may fill the time in which the pipeline drains."""
        return TRAITS[self.facts.problem.options.schedule].splits

    @cached_property
    def ahead_s(self) -> Floats:
        """With a flush, by set, how long its layers delay the stages behind them at least."""
        return np.asarray((self.forward if self.splits else self.work - self.update) / self.facts.fastest)

    def crossing_s(self, stages: Stages) -> Floats:
        """With a flush, the least seconds by which messages behind every stage and back delay the stages there."""
        table, (place, _, end) = self.table, stages
        crossing = (self.sent + self.returned)[end] / table.behind_rate[place] + 2 * table.behind_latency_s[place]
        crossing = crossing / 2 if self.splits else crossing
        return np.where(end == self.last, 0.0, crossing)

    # -- memory --

    def holds(self, stages: Stages, depth: Floats, under_way: Floats | None = None) -> Flags:
        """Whether stages that are quick enough hold in memory, and under 2BW in an update, what these depths ask for.

        Under vertical sync, `under_way` has by number of replicas the least that a plan's input stage has under way
        (`schedules.vertical_versions`, less the first version).
        """
        options = self.facts.problem.options
        held = self.is_in_time(stages, depth)
        if not options.memory:
            return held
        if len(self.recomputes) == 1:
            return held & self.fits(stages, depth, under_way, again=False)
        ways = [self._quick(stages, again=a) & self.fits(stages, depth, under_way, again=a) for a in self.recomputes]
        return held & (ways[0] | ways[1])
