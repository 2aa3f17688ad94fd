"""The search over cuts on heterogeneous clusters and over parallel links, with all candidate placements.

Where servers differ, no place in the cluster stands for another. So a stage in front of a state is tried on every run
of consecutive workers, and a state (p', λ') dominates another (p, λ) at the same cut, of no less demand, if p' ≥ p
and the component of level λ' that holds p' lies within that of level m = max(λ, level(p-1, p)) that holds p. Any
stage that can be put in front of p can then be put in front of p', and the component that joins the two is no larger.
The links from the stage of p' up to level m, and to every level above, must also be no slower than those from the
stage of p (`PlacementTable.no_slower`).

A stage ends right before the state behind it or at the end of a server. If worker e is idle and on the same server as
the stage's last worker e - 1, the stage can move by one worker: it leaves one and gains another like its last.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pipeplan.cost import formulas
from pipeplan.plan import schedules
from pipeplan.problem.cuts import Flags, Floats, Ints
from pipeplan.solvers.dp.budget import SLACK, SearchLimits
from pipeplan.solvers.dp.states.search_states import SearchStates, group_starts, no_later, time_order, undominated_rows
from pipeplan.solvers.dp.steady.uniform_search import UniformSearch
from pipeplan.solvers.dp.terms.heterogeneous_terms import HeterogeneousTerms, stage_rows
from pipeplan.solvers.dp.terms.input_stages import AnyInputStage
from pipeplan.solvers.dp.terms.stage_terms import StageTerms

# The number of stages, pairs of a cut and a placement, that are sized at a time.
_AT_ONCE = 1_000_000


class HeterogeneousSearch(UniformSearch):
    """The search for a pipeline within one threshold on a heterogeneous cluster."""

    terms: HeterogeneousTerms

    def __init__(self, terms: HeterogeneousTerms, threshold: float, limits: SearchLimits) -> None:
        self.terms, self.limits = terms, limits
        self.threshold, self.within = threshold, threshold * (1 + SLACK)
        self.last = len(terms.cuts.ideals) - 1
        self.kept: dict[int, SearchStates] = {}
        # A cut needs enough speed in front for the work before it, and a worker at least.
        speed = terms.cuts.work_s / self.within * (1 - 1e-9)
        self.lowest = np.maximum(np.searchsorted(terms.speed_before, speed), 1).astype(np.intp)
        self.need = np.maximum(np.ceil(speed / terms.fastest), 1).astype(np.intp)
        self.lowest[0] = self.need[0] = 0
        self.most_demand, self.bounds = self._most_demand(), None

    def _undominated(self, cut: int, waiting: SearchStates) -> SearchStates:
        """The states that no other dominates; of equal states the first in a fixed order."""
        states = waiting.take(self._thinned(waiting))
        if len(states) == 1:
            return states
        counts = states.level, -states.replicas, states.workers, states.stages
        order = np.lexsort((*counts, *time_order(states), states.demand, -states.first))
        states = states.take(order)
        return states.take(undominated_rows(len(states), lambda some, others: self._dominates(states, some, others)))

    def _thinned(self, states: SearchStates) -> Ints:
        """Rows that have the least demand for their position, level and counts."""
        keys = self._keys(states)
        order = np.lexsort((states.demand, *reversed(keys)))
        least: Ints = order[group_starts(keys[:, order])]
        return least

    def _dominates(self, states: SearchStates, some: Ints, others: Ints) -> Flags:
        """Flags of shape (some, others): whether each of some states dominates each of the others."""
        between, counting = self.terms.between, self.limits.counting
        mine, first = states.first[some][:, None], states.first[others]
        joined = np.where(first > 0, between[first - 1, first], len(self.terms.problem.cluster.levels))
        joined = np.maximum(joined, states.level[others])
        result: Flags = states.demand[some][:, None] <= states.demand[others]
        result &= mine >= first
        result &= (states.level[some][:, None] <= joined) & (between[mine, first] <= joined)
        if states.times is not None:
            result &= no_later(states.times, some, others)
        result &= self.terms.runs.no_slower[joined, states.ways[some][:, None], states.ways[others]]
        if self.terms.parallel:
            result &= states.replicas[some][:, None] >= states.replicas[others]
        if counting.exact_stages:
            result &= states.stages[some][:, None] == states.stages[others]
        elif counting.stages:
            result &= states.stages[some][:, None] <= states.stages[others]
        if counting.workers:
            result &= states.workers[some][:, None] <= states.workers[others]
        return result

    def _keys(self, states: SearchStates) -> Ints:
        """The columns that tell states apart, as rows."""
        counting = self.limits.counting
        rows = [states.first, states.level, states.ways]
        rows += [states.replicas] if self.terms.parallel else []
        rows += [states.stages] if counting.stages or counting.exact_stages else []
        rows += [states.workers] if counting.workers else []
        return np.stack(rows)

    def _extend(self, cut: int, states: SearchStates) -> Iterator[tuple[Ints, SearchStates]]:
        """Every state that a stage in front of these states leads to, with the cut of each."""
        states, rows = self.open_states(states)
        targets = self._leading(cut)
        if not len(states) or not len(targets):
            return
        ends, states, rows = self._with_idle_workers(cut, states, rows)
        which, runs = self.terms.runs.with_ends(ends)
        if self.limits.shape is not None:
            in_shape = self.terms.runs.replicas[runs] == self.limits.shape.replicas
            which, runs = which[in_shape], runs[in_shape]
        if not len(runs):
            return
        transfer, allowed = self._boundary_times(cut, states, which, runs)
        which, runs, transfer = which[allowed], runs[allowed], transfer[allowed]
        if not len(runs):
            return
        size = max(1, _AT_ONCE // len(runs))
        for begin in range(0, len(targets), size):
            self.limits.step(len(runs) * min(size, len(targets) - begin))
            for recompute in (False, True) if self.limits.recompute else (False,):
                stage = StageTerms.of(self.terms, cut, targets[begin : begin + size], recompute=recompute)
                for depth, demand in self._sizes(stage, states.demand[which], runs, transfer):
                    yield from self._new_states(stage, states, rows, which, runs, depth, demand)

    def _with_idle_workers(self, cut: int, states: SearchStates, rows: Ints) -> tuple[Ints, SearchStates, Ints]:
        """The states with idle workers in front of them.

        Returns where the stage in front ends, the states by the component that joins them, and their rows.
        """
        # In a uniform grid no worker between stages is idle.
        edges = np.array(self.terms.problem.cluster.starts(1)[1:] if self.limits.shape is None else [], dtype=np.intp)
        before, edge = np.nonzero(edges < states.first[:, None])
        which = np.concatenate([np.arange(len(states)), before])
        ends = np.concatenate([states.first, edges[edge]])
        spread, rows = states.take(which), rows[which]
        if cut != self.last:
            spread.numbers[1] = np.maximum(spread.level, self.terms.between[ends, spread.first])
        spread.numbers[0] = ends
        kept = self._thinned(spread)
        return ends[kept], spread.take(kept), rows[kept]

    def _rates(self, cut: int, states: SearchStates, which: Ints, runs: Ints) -> tuple[Floats, Floats, Ints]:
        """Bandwidth and latency from a placement to the state behind it, and the number of links."""
        table = self.terms.runs
        if cut == self.last:
            return np.full(len(runs), np.inf), np.zeros(len(runs)), np.ones(len(runs), dtype=np.intp)
        first = table.first[runs]
        joined = np.maximum(self.terms.between[first, states.first[which]], states.level[which])
        links = np.ones(len(runs), dtype=np.intp)
        if self.terms.parallel:
            links = np.minimum(table.replicas[runs], states.replicas[which])
        return *self.terms.rates_between(joined, table.ways[runs], states.ways[which]), links

    def _boundary_times(self, cut: int, states: SearchStates, which: Ints, runs: Ints) -> tuple[Floats, Flags]:
        """One-way time from a placement to the state behind it, and whether the boundary is fast enough."""
        bandwidth, latency, links = self._rates(cut, states, which, runs)
        allowed = self._quick_boundary(cut, bandwidth, links) & self.terms.usable[runs]
        if self.limits.max_workers is not None:
            busy = states.workers[which] + self.terms.runs.replicas[runs]
            allowed = allowed & (busy <= self.limits.max_workers)
        return np.asarray(formulas.transfer_time(self.terms.busier(cut), bandwidth, latency)), allowed

    def _quick_boundary(self, cut: int, bandwidth: Floats, links: Ints) -> Flags:
        quick: Flags = formulas.boundary_time(self.terms.busier(cut), bandwidth, links) <= self.within
        return quick

    def _sizes(
        self, stage: StageTerms, behind: Floats, runs: Ints, transfer: Floats
    ) -> Iterator[tuple[Floats, Floats]]:
        """For every depth that may matter, depth and demand of stages (rows: cuts I) on placements.

        Both are infinite where a stage is too slow or too large.
        """
        yield self._sized(stage, behind, runs, transfer)

    def _sized(
        self, stage: StageTerms, behind: Floats, runs: Ints, transfer: Floats, *, pairs: bool = False
    ) -> tuple[Floats, Floats]:
        """Depth and demand of stages on placements, infinite where a stage is too slow or too large.

        With `pairs` every stage is on the placement of the same index, else stages are rows and placements columns.
        """
        terms, table = self.terms, self.terms.runs
        replicas = table.replicas[runs]
        time, group = terms.stage_s(stage, runs, pairs=pairs)
        allowed = (time <= self.within) & (table.first[runs] >= self.lowest[stage.targets][stage_rows(pairs)])
        depth, wait = np.ones(time.shape), np.zeros(time.shape)
        counted = terms.training and (self.limits.memory or terms.accumulate is not None)
        if counted and terms.accumulate is None:
            wait = np.broadcast_to(
                formulas.group_wait(group, self.threshold, replicas, terms.problem.copies), time.shape
            )
        if counted and not stage.is_last:
            depth = formulas.in_flight_depth(behind, wait, transfer, self.threshold, replicas)
        if counted and terms.accumulate is not None:
            allowed &= self._two_versions_suffice(depth, replicas, group)
        if self.limits.memory:
            allowed &= self._fits(stage, runs, depth, pairs=pairs)
        depth = np.where(allowed, depth, np.inf)
        demand = formulas.in_flight_behind(depth, replicas, wait) if counted else np.where(allowed, 0.0, np.inf)
        return depth, demand

    def _fits(self, stage: StageTerms, runs: Ints, depth: Floats, *, pairs: bool = False) -> Flags:
        """Whether the smallest worker of each placement has the memory for each stage at its depth."""
        (alone, growing), (shared, _) = (stage.memory(replicated=replicated) for replicated in (False, True))
        replicas, first, rows = self.terms.runs.replicas[runs], self.terms.first, stage_rows(pairs)
        fixed = np.where(replicas > 1, shared[rows], alone[rows])
        fixed = fixed - stage.divided_bytes(stage.parameters[rows], replicas)
        if first is not None:
            # One version is already included.
            versions = schedules.vertical_versions(first.delay, first.replicas, replicas)
            fixed = fixed + formulas.version_memory(stage.parameters[rows], versions - 1)
            if not isinstance(first, AnyInputStage):
                fixed = np.where((stage.targets == 0)[rows] & (replicas != first.replicas), np.inf, fixed)
        within: Flags = fixed + growing[rows] * depth <= self.terms.runs.memory[runs] * (1 + 1e-12)
        return within

    def _two_versions_suffice(self, depth: Floats, replicas: Ints, group: Floats) -> Flags:
        """Whether two weight versions suffice (`formulas.buffered_pace`)."""
        accumulate, copies = self.terms.accumulate, self.terms.problem.copies
        assert accumulate is not None
        spare = accumulate - depth * replicas
        reduce = group + self.terms.problem.copies_allreduce_s
        in_time: Flags = (spare >= 0) & (reduce <= self.within * (np.maximum(spare, 0) + 1 / copies))
        return in_time

    def _new_states(
        self,
        stage: StageTerms,
        states: SearchStates,
        rows: Ints,
        which: Ints,
        runs: Ints,
        depth: Floats,
        demand: Floats,
    ) -> Iterator[tuple[Ints, SearchStates]]:
        """The state of least demand among those that lead to the same position from the same cut."""
        columns = self._columns(stage, states, rows, which, runs)
        keys = self._keys(columns)
        order = np.lexsort(tuple(reversed(keys)))
        begins = np.flatnonzero(group_starts(keys[:, order]))
        sorted_demand = demand[:, order]
        least = np.minimum.reduceat(sorted_demand, begins, axis=1)
        # Pick the first entry of each group that has the least demand.
        counts = np.diff([*begins, len(order)])
        place = np.where(sorted_demand == np.repeat(least, counts, axis=1), np.arange(len(order)), len(order))
        target, group = np.nonzero(np.isfinite(least))
        if not len(target):
            return
        chosen = order[np.minimum.reduceat(place, begins, axis=1)[target, group]]
        new_states = SearchStates(columns.numbers[:, chosen], least[target, group])
        yield from self._completable(stage.targets[target], new_states, depth[target, chosen])

    def _completable(self, targets: Ints, states: SearchStates, depth: Floats) -> Iterator[tuple[Ints, SearchStates]]:
        """The states that can still become a pipeline within the user's limits, with their depths."""
        states.numbers[5] = depth
        completable = self.can_complete(targets, states)
        if completable.any():
            yield targets[completable], states.take(completable)

    def _placed_times(
        self, stage: StageTerms, states: SearchStates, target: Ints, which: Ints, runs: Ints, depth: Floats
    ) -> Floats | None:
        """The parts of the batches that new states belong to; None in the steady state."""
        return None

    def _columns(self, stage: StageTerms, states: SearchStates, rows: Ints, which: Ints, runs: Ints) -> SearchStates:
        """The new states of placements; depths and demands are still to be filled in."""
        table = self.terms.runs
        columns = {
            "first": table.first[runs],
            "level": table.span[runs],
            "stages": states.stages[which] + 1,
            "workers": states.workers[which] + table.replicas[runs],
            "replicas": table.replicas[runs],
            "depth": np.ones(len(runs), dtype=np.intp),
            "recompute": np.full(len(runs), int(stage.recompute)),
            "end": np.full(len(runs), stage.cut),
            "source": rows[which],
            "ways": table.ways[runs],
        }
        return SearchStates.of(columns, np.zeros(len(runs)))
