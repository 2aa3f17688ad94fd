"""Charges what workers share (network cards, ports, cores) stage by stage, for the search over candidate placements.

The formulas are those of `pipeplan.cost.contention`. A search that puts stages in front of one another, from the output
end, knows the load of a component as soon as no further stage can use it. When a stage on workers s … e-1 is put in
front of one that begins at worker p, and cuts I and J bound the new stage, then at every level

    the component of p        receives the traffic of cut J; unless the new stage also uses it, its load is complete
    the component of e-1      sends that traffic, besides what it may carry already if it is also the component of p
    components in the middle  carry the traffic of both cuts and the ring of the new stage: their load is complete
    the component of s        keeps a pending load: all of its traffic but that of cut I

So one pending load for each level and direction, that of the component of a stage's first worker, is all that a state
of the search has to remember. A stage that begins at the edge of a component leaves nothing pending there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from pipeplan.cluster_data.links import Links
from pipeplan.cost import formulas
from pipeplan.cost.ddp_overlap import ddp_pace_s, waits_for_allreduce
from pipeplan.cost.stage_times import stage_times
from pipeplan.plan.plan import Plan, Stage
from pipeplan.plan.schedules import ACCUMULATING
from pipeplan.problem.cuts import Cuts, Flags, Floats, Ints
from pipeplan.problem.problem import Problem
from pipeplan.solvers.dp.budget import Step
from pipeplan.solvers.dp.states.search_states import SearchStates
from pipeplan.solvers.dp.steady.heterogeneous_search import HeterogeneousTerms
from pipeplan.solvers.dp.terms.stage_costs import StageTerms
from pipeplan.solvers.dp.terms.topology import PlacementTable, least
from pipeplan.solvers.plan_space import PlanSpace


@dataclass(frozen=True)
class ResourceLevel:
    """Components that share a resource, and how every candidate placement lies on them.

    The arrays with an entry for each placement are in the order of the `PlacementTable`.
    """

    component: Ints
    """The component of every worker, counted from 0."""
    start: Ints
    """The first worker of every component; `stop` is one past its last."""
    stop: Ints
    per_message: Floats
    """Seconds that a byte of a message keeps the component's card busy; 0 for cores."""
    per_ring: Floats
    """Seconds that a byte of an all-reduce keeps it busy; 0 for cores."""
    per_core: Floats
    """Inverse of the number of cores that the component's workers share; 0 for cards."""
    first: Ints
    """For each placement, the component of its first worker."""
    last: Ints
    """For each placement, the component of its last worker."""
    in_first: Ints
    """For each placement, its workers in the component of its first worker."""
    in_last: Ints
    middle: tuple[tuple[int, Flags], ...]
    """For each kind of component, one of them, and which placements fill a component of this kind without beginning or
    ending in it."""

    @staticmethod
    def of(
        edges: Ints, per_message: Floats, per_ring: Floats, per_core: Floats, table: PlacementTable
    ) -> ResourceLevel:
        """The level whose components begin at all but the last of `edges`."""
        start, stop = edges[:-1], edges[1:]
        component = np.repeat(np.arange(len(start)), np.diff(edges))
        first, last = component[table.first], component[table.end - 1]
        kinds: dict[tuple[float, ...], list[int]] = {}
        for index in range(len(start)):
            rates = (float(stop[index] - start[index]), per_message[index], per_ring[index], per_core[index])
            kinds.setdefault(tuple(map(float, rates)), []).append(index)
        middle = []
        for indices in kinds.values():
            inside = np.zeros(len(first), dtype=bool)
            for index in indices:
                inside |= (first < index) & (index < last)
            if inside.any():
                middle.append((indices[0], inside))
        # One more component, without workers, stands behind the last worker, where the search begins.
        beyond = edges[-1:]
        return ResourceLevel(
            np.append(component, len(start)),
            np.concatenate([start, beyond]),
            np.concatenate([stop, beyond]),
            np.append(per_message, 0.0),
            np.append(per_ring, 0.0),
            np.append(per_core, 0.0),
            first,
            last,
            np.minimum(table.end, stop[first]) - table.first,
            table.end - np.maximum(table.first, start[last]),
            tuple(middle),
        )

    @property
    def is_card(self) -> bool:
        """Whether the resource is a network card, which has two directions, and not cores."""
        return not self.per_core.any()


@dataclass(frozen=True)
class PendingLoads:
    """Loads of the components of the last workers of placements, once the traffic behind them is known.

    `busy` has a row for every column of `SearchStates.loads` and a column for every pair of a state and a placement.
    """

    busy: Floats
    peak: Floats
    """For each pair, the largest load of the components that the placement does not use, which is complete."""


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
        """The levels with components of several workers, smallest components first; cores come last."""
        inner, links, table = self.problem.cluster, Links.of(self.problem.cluster), self.table
        found = []
        for level in range(1, len(inner.levels)):
            edges = np.array(inner.starts(level), dtype=np.intp)
            rates = np.array([links.card(level, int(worker)) for worker in edges[:-1]])
            if np.isfinite(rates).any():
                messages, rings = 1 / rates.T
                found.append(ResourceLevel.of(edges, messages, rings, np.zeros(len(rates)), table))
        cores = self._cores
        if cores is not None:
            found.append(cores)
        return tuple(found)

    @property
    def _cores(self) -> ResourceLevel | None:
        """The servers whose workers share cores, or None. A server may hold several whole copies of the pipeline."""
        size, shared = self.problem.cluster.workers, self.whole.cluster.shared_cores
        if not shared:
            return None
        if shared[0][1] - shared[0][0] > size and self.copies > 1:
            first, stop, cores = shared[0]
            edges, rates = np.array([0, size]), np.array([min(self.copies, (stop - first) // size) / cores])
        else:
            base = self.space.workers(self.whole.cluster)[0]
            starts = self.whole.cluster.starts(self.whole.cluster.server_level)
            edges = np.array([start - base for start in starts if 0 <= start - base <= size], dtype=np.intp)
            number = {first - base: cores for first, _, cores in shared}
            rates = np.array([1 / number[first] if first in number else 0.0 for first in edges[:-1].tolist()])
        nothing = np.zeros(len(rates))
        return ResourceLevel.of(edges, nothing, nothing, rates, self.table)

    @cached_property
    def ports(self) -> tuple[tuple[float, float, Flags], ...]:
        """For each kind of port, the seconds for a byte of a message and of a ring, and the placements that have it."""
        cluster, links = self.problem.cluster, Links.of(self.problem.cluster)
        kinds: dict[tuple[float, float], list[int]] = {}
        for worker in range(cluster.workers):
            kinds.setdefault(links.card(0, worker), []).append(worker)
        ports = []
        for (message, ring), workers in kinds.items():
            held = np.zeros(cluster.workers + 1, dtype=np.intp)
            held[np.array(workers) + 1] = 1
            count = np.cumsum(held)
            if np.isfinite(message) or np.isfinite(ring):
                ports.append((1 / message, 1 / ring, count[self.table.end] > count[self.table.first]))
        return tuple(ports)

    @property
    def columns(self) -> int:
        """The number of pending loads of a state: two for each level of cards, one for cores."""
        return sum(2 if level.is_card else 1 for level in self.levels)

    @property
    def copies(self) -> int:
        """Copies of the pipeline."""
        return self.space.copies

    @cached_property
    def accumulate(self) -> int | None:
        """Minibatches of the whole plan between two all-reduces, where the schedule gives it."""
        options = self.whole.options
        return options.accumulate if options.schedule in ACCUMULATING and self.whole.training else None

    @property
    def among_copies(self) -> float:
        """Bytes on a worker's card for each byte of gradients of its share, by rings among the copies, a minibatch."""
        if self.copies == 1 or not self.whole.training:
            return 0.0
        return 2 * (self.copies - 1) / self.copies / (self.accumulate or self.copies)

    @cached_property
    def floor_s(self) -> float:
        """Load of the cards of components that hold whole copies, in seconds per minibatch."""
        size = self.whole.parameter_bytes * self.among_copies
        return size / self.space.card_rate(self.whole.cluster) if size else 0.0

    @cached_property
    def _sent(self) -> Floats:
        """Bytes forward across every cut for a minibatch of the whole plan, in one copy."""
        return np.asarray(self.cuts.sent / self.copies, dtype=np.float64)

    @cached_property
    def _returned(self) -> Floats:
        """Bytes backward across every cut."""
        return np.asarray(self.cuts.returned / self.copies, dtype=np.float64)

    # -- the search's questions --

    def behind(self, cut: int, states: SearchStates, which: Ints, placements: Ints) -> PendingLoads:
        """The loads once placements are put in front of states (pairs by index), with cut J between the two."""
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
            inside = np.where(shared, _meeting(sending, receiving, common), 0)
            leaving = (sending * (receivers // common) - inside) / period
            entering = (receiving * (senders // common) - inside) / period
            for row, (out, back) in enumerate(((sent, returned), (returned, sent))):
                at_receiver = states.loads[which, column + row] + entering * back * level.per_message[theirs]
                peak = np.maximum(peak, np.where(shared, 0.0, at_receiver))
                busy[column + row] = leaving * out * level.per_message[mine] + np.where(shared, at_receiver, 0.0)
            column += 2
        return PendingLoads(busy, peak)

    def in_front(self, stage: StageTerms, target: Ints, placement: Ints, busy: Floats) -> tuple[Floats, Floats]:
        """The largest load that stages on placements complete, and the pending loads that they leave, by row.

        `target` and `placement` name the stages and their placements; `busy` has the loads behind them, by column.
        A component that is left for good counts as complete with the traffic of the cut in front of the stage.
        """
        charges, table = self._charges(stage, target, placement), self.table
        peak = self._single_stage_s(stage, target, placement)
        for per_message, per_ring, held in self.ports:
            for sent, received in charges.directions:
                load = (sent + received) * per_message + (charges.hop + charges.copied) * per_ring
                peak = np.maximum(peak, np.where(held[placement], load, 0.0))
        loads, column = np.zeros((len(target), self.columns)), 0
        for level in self.levels:
            at_edge = table.first[placement] == level.start[level.first[placement]]
            if not level.is_card:
                core = self._core_s(stage, target, placement)
                complete, pending = _core_loads(level, placement, core, busy[column])
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
        """The bytes that stages on placements put on each worker's card, per minibatch of the whole plan."""
        assert isinstance(stage.cut, int)
        replicas, starts = self.table.replicas[placement], stage.targets[target]
        size = stage.parameters[target] * float(self.problem.training)
        ring = np.asarray(formulas.ring_allreduce_time(replicas, size, 1.0, 0.0))
        sent, returned = float(self._sent[stage.cut]) / replicas, float(self._returned[stage.cut]) / replicas
        return StageCharges(
            ring / (self.accumulate or replicas * self.copies),
            self.among_copies * size / replicas,
            ((sent, self._returned[starts] / replicas), (returned, self._sent[starts] / replicas)),
        )

    def busiest_s(self, steps: Sequence[Step]) -> float:
        """The load of the busiest shared resource under a pipeline, or its wait for the all-reduce, per minibatch."""
        states = replace(SearchStates.start(self.problem.cluster.workers), loads=np.zeros((1, self.columns)))
        cut, busiest, only = len(self.cuts.ideals) - 1, self.floor_s, np.zeros(1, dtype=np.intp)
        for step in reversed(steps):
            placement = np.array([self.table.index(step.first, step.first + step.replicas)])
            behind = self.behind(cut, states, only, placement)
            stage = self.terms.stage(cut, np.array([step.start]), recompute=step.recompute)
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
        if self.problem.training and overlap < 1.0:
            bandwidth, latency = (rate[placement] for rate in self._group_rates)
            size = stage.parameters[target]
            allreduce = np.asarray(formulas.ring_allreduce_time(everyone, size, bandwidth, latency))
        work = stage.work_s[target] / table.speed[placement]
        return np.asarray(formulas.core_time(work, everyone, allreduce, self.accumulate or everyone, overlap))

    @cached_property
    def _group_rates(self) -> tuple[Floats, Floats]:
        """For each placement, bandwidth and latency of an all-reduce among its replicas in all copies."""
        if self.copies == 1:
            return self.table.allreduce_bandwidth, self.table.allreduce_latency
        cluster, workers = self.whole.cluster, self.space.workers(self.whole.cluster)
        ways, rings = Links.of(cluster).ways[cluster.level_between(workers[0], workers[-1])], cluster.exchange_rings
        if cluster.uniform:
            ones = np.ones(len(self.table.first))
            return ones * ways.allreduce[0], ones * ways.latency[0] * rings
        mine = slice(workers.start, workers.stop)
        bandwidth, latency = (rate[mine].reshape(self.copies, -1) for rate in (ways.allreduce, ways.latency * rings))
        first, end = self.table.first, self.table.end
        return least(bandwidth.min(axis=0), first, end), -least(-latency.max(axis=0), first, end)

    def _single_stage_s(self, stage: StageTerms, target: Ints, placement: Ints) -> Floats:
        """For stages that hold the whole model, the pace at which they wait for their all-reduce; 0 for others."""
        paces = np.zeros(len(target))
        if stage.is_last and (stage.targets == 0).any():
            for row in np.flatnonzero(stage.targets[target] == 0).tolist():
                paces[row] = self.single_stage_s(int(placement[row]), recompute=stage.recompute)
        return paces

    def single_stage_s(self, placement: int, *, recompute: bool) -> float:
        """Seconds per minibatch of plain data parallelism on a placement, whose forward pass waits for the update."""
        first, end = int(self.table.first[placement]), int(self.table.end[placement])
        bandwidth, latency = (float(rate[placement]) for rate in self._group_rates)
        key = end - first, float(self.table.speed[placement]), recompute, bandwidth, latency
        if key not in self._single_stages:
            stage = Stage(self.whole.layer_names, tuple(range(first, end)), 1, 1, recompute)
            options = self.whole.options
            plan = self.space.plan(self.whole, [stage])
            plan = Plan(plan.stages, plan.copies, options.inference, options.schedule, options.accumulate)
            pace = 0.0
            if waits_for_allreduce(plan):
                links = Links.of(self.whole.cluster)
                pace = ddp_pace_s(plan, self.whole, links, stage_times(plan, self.whole, links, 0).pass_s)
            self._single_stages[key] = pace
        return self._single_stages[key]

    @cached_property
    def _single_stages(self) -> dict[tuple[int, float, bool, float, float], float]:
        return {}


@dataclass(frozen=True)
class StageCharges:
    """The bytes that stages on placements put on the card of each of their workers, per minibatch of the whole plan."""

    hop: Floats
    """Bytes of the ring of the stage's replicas, on each hop."""
    copied: Floats
    """Bytes of the rings among copies of the pipeline."""
    directions: tuple[tuple[Floats, Floats], ...]
    """For outgoing and incoming traffic, bytes of messages of the cut behind the stage, and of the cut in front."""

    def card_loads(
        self, level: ResourceLevel, placement: Ints, behind: Floats, ahead: Floats, busy: Floats
    ) -> tuple[Floats, Floats]:
        """Seconds that cards of a level are busy in one direction: the longest complete load, and the pending one.

        `busy` is the load of the component of the last worker with the traffic of the cut behind the stage.
        """
        first, last = level.first[placement], level.last[placement]
        ending, beginning = level.in_last[placement], level.in_first[placement]
        end = busy + (self.hop + ending * self.copied) * level.per_ring[last] + ending * ahead * level.per_message[last]
        straddles = first != last
        complete = np.where(straddles, end, 0.0)
        for index, held in level.middle:
            count = level.stop[index] - level.start[index]
            load = count * (behind + ahead) * level.per_message[index]
            load = load + (self.hop + count * self.copied) * level.per_ring[index]
            complete = np.maximum(complete, np.where(held[placement], load, 0.0))
        across = (
            beginning * behind * level.per_message[first] + (self.hop + beginning * self.copied) * level.per_ring[first]
        )
        within = busy + beginning * self.copied * level.per_ring[first]
        return complete, np.where(straddles, across, within)


def _core_loads(level: ResourceLevel, placement: Ints, core_s: Floats, busy: Floats) -> tuple[Floats, Floats]:
    """Seconds that the cores of servers are busy: the longest complete load, and that pending at the first server."""
    first, last = level.first[placement], level.last[placement]
    end = busy + level.in_last[placement] * core_s * level.per_core[last]
    complete = end
    for index, held in level.middle:
        load = (level.stop[index] - level.start[index]) * core_s * level.per_core[index]
        complete = np.maximum(complete, np.where(held[placement], load, 0.0))
    return complete, np.where(first != last, level.in_first[placement] * core_s * level.per_core[first], end)


def _meeting(sending: Ints, receiving: Ints, common: Ints) -> Ints:
    """Pairs that meet of the last `sending` senders and the first `receiving` receivers, in one period.

    Sender p and receiver q meet if p ≡ q modulo `common`, which divides the number of either.
    """
    rounds, more = np.divmod(sending, common)
    others, rest = np.divmod(receiving, common)
    pairs: Ints = common * rounds * others + rounds * rest + others * more + np.maximum(0, more + rest - common)
    return pairs
