"""Charges contention (network cards, ports, cores) stage by stage, for the search over candidate placements.

The formulas are those of `pipeplan.cost.contention`. The search adds stages in front of one another, from the output
end. The load of a component is known as soon as no further stage can use the component. Let a new stage on workers s …
e-1, between cuts I and J, be added in front of a stage that begins at worker p. Then at every level

    the component of p        receives the traffic of cut J; unless the new stage also uses it, its load is complete
    the component of e-1      sends that traffic, in addition to its earlier load if it is also the component of p
    components in the middle  carry the traffic of both cuts and the ring of the new stage: their load is complete
    the component of s        keeps a pending load: all of its traffic except that of cut I

So a state of the search has only one pending load for each level and direction: that of the component of its first
worker. A stage that begins at the edge of a component leaves no pending load there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from pipeplan.cost import formulas
from pipeplan.plan.schedules import ACCUMULATING
from pipeplan.problem.cuts import Cuts, Floats, Ints
from pipeplan.problem.problem import Problem
from pipeplan.solvers.dp.budget import Step
from pipeplan.solvers.dp.search.heterogeneous_terms import HeterogeneousTerms
from pipeplan.solvers.dp.search.resource_levels import (
    Port,
    ResourceLevel,
    StageCharges,
    card_levels,
    core_level,
    core_loads,
    meeting_pairs,
    ports_of,
)
from pipeplan.solvers.dp.search.stage_terms import StageTerms
from pipeplan.solvers.dp.search.states import SearchStates
from pipeplan.solvers.dp.search.topology import PlacementTable
from pipeplan.solvers.plan_space import PlanSpace


@dataclass(frozen=True)
class PendingLoads:
    """Loads of the components that hold the last workers of the placements, with the traffic of the stages behind.

    `busy` has a row for every column of `SearchStates.loads` and a column for every pair of a state and a placement.
    """

    busy: Floats
    peak: Floats
    """For each pair, the largest complete load: that of components that the placement does not use."""


@dataclass(frozen=True)
class SharedResources:
    """The shared resources of one space of plans."""

    terms: HeterogeneousTerms
    """The terms of one copy of the pipeline, on one component of the cluster."""
    whole: Problem
    """The problem on the whole cluster."""
    space: PlanSpace

    @staticmethod
    def of(whole: Problem, space: PlanSpace, cuts: Cuts, *, memory: bool) -> SharedResources:
        """The shared resources of a space of plans, with or without the memory limit in their terms."""
        inner = space.inner(whole)
        if not memory:
            inner = inner.without_memory_limit()
        return SharedResources(HeterogeneousTerms(inner, cuts), whole, space)

    @property
    def problem(self) -> Problem:
        """The problem of one copy."""
        return self.terms.problem

    @property
    def cuts(self) -> Cuts:
        """The cuts of the model's graph."""
        return self.terms.cuts

    @property
    def table(self) -> PlacementTable:
        """The candidate placements of a stage."""
        return self.terms.runs

    @cached_property
    def levels(self) -> tuple[ResourceLevel, ...]:
        """The levels whose components have several workers, smallest components first; cores come last."""
        cores = core_level(self.whole, self.space, self.problem.cluster, self.table)
        return (*card_levels(self.problem.cluster, self.table), *(() if cores is None else (cores,)))

    @cached_property
    def ports(self) -> tuple[Port, ...]:
        """The kinds of ports. Each port belongs to one worker."""
        return ports_of(self.problem.cluster, self.table)

    @property
    def columns(self) -> int:
        """The number of pending loads of a state: two for each level of cards, one for cores."""
        return sum(2 if level.is_card else 1 for level in self.levels)

    @property
    def copies(self) -> int:
        """Number of copies of the pipeline."""
        return self.space.copies

    @cached_property
    def accumulate(self) -> int | None:
        """Minibatches of the whole plan between two all-reduces, if the schedule fixes them; else None."""
        options = self.whole.options
        return options.accumulate if options.schedule in ACCUMULATING and self.whole.training else None

    @property
    def has_rings(self) -> bool:
        """Whether all-reduces are charged here.

        With a flush they are not: the formulas of a batch charge the exposed part of the all-reduces.
        """
        return self.whole.training and not self.whole.options.flushes

    @property
    def among_copies(self) -> float:
        """Bytes of rings among the copies on a worker's card, per minibatch and per byte of the worker's gradients."""
        if self.copies == 1 or not self.has_rings:
            return 0.0
        return 2 * (self.copies - 1) / self.copies / (self.accumulate or self.copies)

    @cached_property
    def floor_s(self) -> float:
        """Load of the cards of components that hold whole copies, in seconds per minibatch."""
        size = self.whole.parameter_bytes * self.among_copies
        return size / self.space.card_rate(self.whole.cluster) if size else 0.0

    @cached_property
    def _sent(self) -> Floats:
        """Bytes that cross every cut forward in one copy, per minibatch of the whole plan."""
        return np.asarray(self.cuts.sent / self.copies, dtype=np.float64)

    @cached_property
    def _returned(self) -> Floats:
        """Bytes that cross every cut backward in one copy, per minibatch of the whole plan."""
        return np.asarray(self.cuts.returned / self.copies, dtype=np.float64)

    # -- the search's questions --

    def behind(self, cut: int, states: SearchStates, which: Ints, placements: Ints) -> PendingLoads:
        """The loads after placements have been added in front of states (pairs by index), with cut J between them."""
        peak = np.zeros(len(placements))
        busy = np.zeros((self.columns, len(placements)))
        if cut == len(self.cuts.ideals) - 1 or not len(placements):
            return PendingLoads(busy, peak)
        assert states.loads is not None
        sent, returned = float(self._sent[cut]), float(self._returned[cut])
        senders, receivers = self.table.replicas[placements], states.replicas[which]
        common = np.gcd(senders, receivers)
        period = senders // common * receivers
        column = 0
        for level in self.levels:
            mine, theirs = level.last[placements], level.component[states.first[which]]
            shared = mine == theirs
            if not level.is_card:
                busy[column] = np.where(shared, states.loads[which, column], 0.0)
                column += 1
                continue
            sending = level.in_last[placements]
            receiving = np.minimum(states.first[which] + receivers, level.stop[theirs]) - states.first[which]
            inside = np.where(shared, meeting_pairs(sending, receiving, common), 0)
            leaving = (sending * (receivers // common) - inside) / period
            entering = (receiving * (senders // common) - inside) / period
            for row, (out, back) in enumerate(((sent, returned), (returned, sent))):
                at_receiver = states.loads[which, column + row] + entering * back * level.per_message[theirs]
                peak = np.maximum(peak, np.where(shared, 0.0, at_receiver))
                busy[column + row] = leaving * out * level.per_message[mine] + np.where(shared, at_receiver, 0.0)
            column += 2
        return PendingLoads(busy, peak)

    def in_front(self, stage: StageTerms, target: Ints, placement: Ints, busy: Floats) -> tuple[Floats, Floats]:
        """(largest load that becomes complete, pending loads) after stages have been added on placements, by row.

        `target` and `placement` have the indices of the stages and their placements; `busy` has the loads behind them,
        by column. A component that no further stage can use counts as complete, including the traffic across the cut in
        front of the stage.
        """
        charges, table = self._charges(stage, target, placement), self.table
        peak = self._single_stage_s(stage, target, placement)
        for port in self.ports:
            for sent, received in charges.directions:
                load = (sent + received) * port.per_message + (charges.hop + charges.copied) * port.per_ring
                peak = np.maximum(peak, np.where(port.held[placement], load, 0.0))
        loads, column = np.zeros((len(target), self.columns)), 0
        for level in self.levels:
            at_edge = table.first[placement] == level.start[level.first[placement]]
            if not level.is_card:
                core = self._core_s(stage, target, placement)
                complete, pending = core_loads(level, placement, core, busy[column])
                peak = np.maximum(peak, np.maximum(complete, pending))
                loads[:, column] = np.where(at_edge, 0.0, pending)
                column += 1
                continue
            for row, (sent, received) in enumerate(charges.directions):
                complete, pending = charges.card_loads(level, placement, sent, received, busy[column + row])
                closing = level.in_first[placement] * received * level.per_message[level.first[placement]]
                peak = np.maximum(peak, np.maximum(complete, pending + np.where(at_edge, closing, 0.0)))
                loads[:, column + row] = np.where(at_edge, 0.0, pending)
            column += 2
        return peak, loads

    def _charges(self, stage: StageTerms, target: Ints, placement: Ints) -> StageCharges:
        """Bytes that stages on placements send through each worker's card, per minibatch of the whole plan."""
        assert isinstance(stage.end, int)
        replicas, starts = self.table.replicas[placement], stage.begin[target]
        size = stage.parameters[target] * float(self.has_rings)
        ring = np.asarray(formulas.ring_allreduce_time(replicas, size, 1.0, 0.0))
        sent, returned = float(self._sent[stage.end]) / replicas, float(self._returned[stage.end]) / replicas
        return StageCharges(
            ring / (self.accumulate or replicas * self.copies),
            self.among_copies * size / replicas,
            ((sent, self._returned[starts] / replicas), (returned, self._sent[starts] / replicas)),
        )

    def busiest_s(self, steps: Sequence[Step]) -> float:
        """The load of the busiest shared resource under a pipeline, or its wait for the all-reduce, in seconds per
        minibatch."""
        states = replace(SearchStates.start(self.problem.cluster.workers), loads=np.zeros((1, self.columns)))
        cut, busiest, only = len(self.cuts.ideals) - 1, self.floor_s, np.zeros(1, dtype=np.intp)
        for step in reversed(steps):
            placement = np.array([self.table.index(step.first, step.first + step.replicas)])
            behind = self.behind(cut, states, only, placement)
            stage = StageTerms.of(self.terms, cut, np.array([step.start]), recompute=step.recompute)
            peak, loads = self.in_front(stage, only, placement, behind.busy)
            busiest = max(busiest, float(behind.peak[0]), float(peak[0]))
            states = states.moved(step.first, step.replicas, loads)
            cut = step.start
        return max(busiest, float(states.loads.max(initial=0.0)) if states.loads is not None else 0.0)

    def closing_load(self, cut: int, states: SearchStates, level: ResourceLevel, column: int) -> Floats:
        """The load of the component of each state's first worker if no other stage uses it, in the busier direction."""
        assert states.loads is not None
        if not level.is_card or cut == len(self.cuts.ideals) - 1:
            return np.zeros(len(states))
        component, load = level.component[states.first], np.zeros(len(states))
        receiving = np.minimum(states.first + states.replicas, level.stop[component]) - states.first
        for row, size in enumerate((float(self._returned[cut]), float(self._sent[cut]))):
            entering = receiving / states.replicas * size * level.per_message[component]
            load = np.maximum(load, states.loads[:, column + row] + entering)
        return load

    # -- parts --

    def _core_s(self, stage: StageTerms, target: Ints, placement: Ints) -> Floats:
        """Core time of each replica, in seconds per minibatch of the whole plan."""
        table, overlap = self.table, self.whole.options.overlap
        everyone = table.replicas[placement] * self.copies
        allreduce: Floats = np.zeros(len(target))
        if self.has_rings and overlap < 1.0:
            bandwidth, latency = (rate[placement] for rate in self.terms.group_rates)
            size = stage.parameters[target]
            allreduce = np.asarray(formulas.ring_allreduce_time(everyone, size, bandwidth, latency))
        work = stage.work_s[target] / table.speed[placement]
        return np.asarray(formulas.core_time(work, everyone, allreduce, self.accumulate or everyone, overlap))

    def _single_stage_s(self, stage: StageTerms, target: Ints, placement: Ints) -> Floats:
        """Step time of stages that hold the whole model and wait for their all-reduce; 0 for other stages."""
        step_times = np.zeros(len(target))
        if stage.is_last and (stage.begin == 0).any():
            for row in np.flatnonzero(stage.begin[target] == 0).tolist():
                step_times[row] = self.single_stage_s(int(placement[row]), recompute=stage.recompute)
        return step_times

    def single_stage_s(self, placement: int, *, recompute: bool) -> float:
        """Seconds per minibatch of plain data parallelism on a placement, whose forward pass waits for the update."""
        first, end = int(self.table.first[placement]), int(self.table.end[placement])
        bandwidth, latency = (float(rate[placement]) for rate in self.terms.group_rates)
        key = end - first, float(self.table.speed[placement]), recompute, bandwidth, latency
        if key not in self._single_stages:
            self._single_stages[key] = self.space.single_stage_s(self.whole, range(first, end), recompute=recompute)
        return self._single_stages[key]

    @cached_property
    def _single_stages(self) -> dict[tuple[int, float, bool, float, float], float]:
        return {}
