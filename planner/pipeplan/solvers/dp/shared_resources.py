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

from dataclasses import dataclass
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
from pipeplan.solvers.dp.search_states import SearchStates
from pipeplan.solvers.dp.stage_costs import StageTerms
from pipeplan.solvers.dp.topology import PlacementTable
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
    allowed: Flags
    """Whether the components that the placement no longer uses keep within the limit."""


@dataclass(frozen=True)
class SharedResources:
    """The shared resources of one space of plans."""

    problem: Problem
    """The problem of one copy of the pipeline, on one component of the cluster."""
    whole: Problem
    """The problem on the whole cluster."""
    space: PlanSpace
    cuts: Cuts
    table: PlacementTable

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
        size = sum(unit.parameter_bytes for unit in self.whole.units) * self.among_copies
        links, cluster = Links.of(self.whole.cluster), self.whole.cluster
        if not size:
            return 0.0
        workers = self.space.workers(cluster)
        crossed = range(self.space.level, cluster.level_between(workers[0], workers[-1]))
        firsts = cluster.starts(self.space.level)[self.space.first : self.space.first + self.copies]
        return max((size / links.card(level, first)[1] for level in crossed for first in firsts), default=0.0)

    @cached_property
    def _sent(self) -> Floats:
        """Bytes forward across every cut for a minibatch of the whole plan, in one copy."""
        return np.asarray(self.cuts.sent / self.copies, dtype=np.float64)

    @cached_property
    def _returned(self) -> Floats:
        """Bytes backward across every cut."""
        return np.asarray(self.cuts.returned / self.copies, dtype=np.float64)

    # -- the search's questions --

    def behind(self, cut: int, states: SearchStates, which: Ints, placements: Ints, limit_s: float) -> PendingLoads:
        """The loads once placements are put in front of states (pairs by index), with cut J between the two."""
        allowed = np.ones(len(placements), dtype=bool)
        busy = np.zeros((self.columns, len(placements)))
        if cut == len(self.cuts.ideals) - 1 or not len(placements):
            return PendingLoads(busy, allowed)
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
                allowed &= shared | (at_receiver <= limit_s)
                busy[column + row] = leaving * out * level.per_message[mine] + np.where(shared, at_receiver, 0.0)
            column += 2
        return PendingLoads(busy, allowed)

    def in_front(
        self, stage: StageTerms, target: Ints, placement: Ints, busy: Floats, limit_s: float
    ) -> tuple[Flags, Floats]:
        """Whether stages on placements keep within the limit, and the pending loads that they leave, by row.

        `target` and `placement` name the stages and their placements; `busy` has the loads behind them, by column.
        """
        assert isinstance(stage.cut, int)
        table, starts = self.table, stage.targets[target]
        replicas = table.replicas[placement]
        out_behind, in_behind = float(self._sent[stage.cut]), float(self._returned[stage.cut])
        in_ahead, out_ahead = self._sent[starts] / replicas, self._returned[starts] / replicas
        size = stage.parameters[target] * float(self.problem.training)
        interval = self.accumulate or replicas * self.copies
        hop = np.asarray(formulas.ring_allreduce_time(replicas, size, 1.0, 0.0)) / interval
        copied = self.among_copies * size / replicas
        allowed = self._within_single_stage(stage, target, placement, limit_s)
        directions = (out_behind / replicas, out_ahead), (in_behind / replicas, in_ahead)
        for per_message, per_ring, held in self.ports:
            for one, other in directions:
                allowed &= ((one + other) * per_message + (hop + copied) * per_ring <= limit_s) | ~held[placement]
        loads, column = np.zeros((len(target), self.columns)), 0
        for level in self.levels:
            first, last = level.first[placement], level.last[placement]
            straddles, inner_edge = first != last, table.first[placement] == level.start[first]
            if not level.is_card:
                core = self._core_s(stage, target, placement)
                complete = busy[column] + level.in_last[placement] * core * level.per_core[last]
                for index, held in level.middle:
                    total = (level.stop[index] - level.start[index]) * core * level.per_core[index]
                    allowed &= (total <= limit_s) | ~held[placement]
                pending = np.where(straddles, level.in_first[placement] * core * level.per_core[first], complete)
                allowed &= (complete <= limit_s) & (pending <= limit_s)
                loads[:, column] = np.where(inner_edge, 0.0, pending)
                column += 1
                continue
            for row, (one, other) in enumerate(directions):
                mine, rest = level.in_last[placement], level.in_first[placement]
                complete = busy[column + row] + (hop + mine * copied) * level.per_ring[last]
                complete = complete + mine * other * level.per_message[last]
                allowed &= (complete <= limit_s) | ~straddles
                for index, held in level.middle:
                    count = level.stop[index] - level.start[index]
                    total = count * (one + other) * level.per_message[index]
                    total = total + (hop + count * copied) * level.per_ring[index]
                    allowed &= (total <= limit_s) | ~held[placement]
                across = rest * one * level.per_message[first] + (hop + rest * copied) * level.per_ring[first]
                within = busy[column + row] + rest * copied * level.per_ring[first]
                pending = np.where(straddles, across, within)
                closed = pending + rest * other * level.per_message[first] <= limit_s
                allowed &= (pending <= limit_s) & (closed | ~inner_edge)
                loads[:, column + row] = np.where(inner_edge, 0.0, pending)
            column += 2
        return allowed, loads

    def closed(self, cut: int, states: SearchStates, level: ResourceLevel, column: int, limit_s: float) -> Flags:
        """Whether the component of each state's first worker keeps within the limit if no other stage uses it."""
        assert states.loads is not None
        if not level.is_card or cut == len(self.cuts.ideals) - 1:
            return np.ones(len(states), dtype=bool)
        component = level.component[states.first]
        receiving = np.minimum(states.first + states.replicas, level.stop[component]) - states.first
        closed = np.ones(len(states), dtype=bool)
        for row, size in enumerate((float(self._returned[cut]), float(self._sent[cut]))):
            entering = receiving / states.replicas * size * level.per_message[component]
            closed &= states.loads[:, column + row] + entering <= limit_s
        return closed

    # -- parts --

    def _core_s(self, stage: StageTerms, target: Ints, placement: Ints) -> Floats:
        """Core time of each replica, in seconds per minibatch of the whole plan."""
        table, overlap = self.table, self.whole.options.overlap
        everyone = table.replicas[placement] * self.copies
        allreduce: Floats = np.zeros(len(target))
        if self.problem.training and overlap < 1.0:
            bandwidth, latency = table.allreduce_bandwidth[placement], table.allreduce_latency[placement]
            if self.copies > 1:
                among = Links.of(self.whole.cluster).allreduce_among(self.space.workers(self.whole.cluster))
                bandwidth, latency = (np.full(len(target), rate) for rate in among)
            size = stage.parameters[target]
            allreduce = np.asarray(formulas.ring_allreduce_time(everyone, size, bandwidth, latency))
        work = stage.work_s[target] / table.speed[placement]
        return np.asarray(formulas.core_time(work, everyone, allreduce, self.accumulate or everyone, overlap))

    def _within_single_stage(self, stage: StageTerms, target: Ints, placement: Ints, limit_s: float) -> Flags:
        """False for a stage that holds the whole model and waits longer than the limit for its all-reduce."""
        within = np.ones(len(target), dtype=bool)
        if not stage.is_last or not (stage.targets == 0).any():
            return within
        alone = np.flatnonzero(stage.targets[target] == 0)
        for row in alone.tolist():
            within[row] = self.single_stage_s(int(placement[row]), recompute=stage.recompute) <= limit_s
        return within

    def single_stage_s(self, placement: int, *, recompute: bool) -> float:
        """Seconds per minibatch of plain data parallelism on a placement, whose forward pass waits for the update."""
        first, end = int(self.table.first[placement]), int(self.table.end[placement])
        table = self.table
        rate = float(table.allreduce_bandwidth[placement]), float(table.allreduce_latency[placement])
        key = end - first, float(table.speed[placement]), recompute, *rate
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


def _meeting(sending: Ints, receiving: Ints, common: Ints) -> Ints:
    """Pairs that meet of the last `sending` senders and the first `receiving` receivers, in one period.

    Sender p and receiver q meet if p ≡ q modulo `common`, which divides the number of either.
    """
    rounds, more = np.divmod(sending, common)
    others, rest = np.divmod(receiving, common)
    pairs: Ints = common * rounds * others + rounds * rest + others * more + np.maximum(0, more + rest - common)
    return pairs
