"""Flush schedules on heterogeneous clusters and over parallel links.

On devices of different speeds the passes of the first minibatch depend on the plan, so they are part of the sum V that
the search minimises (see `flush_search`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from pipeplan.cost import formulas
from pipeplan.problem.cuts import Flags, Floats, Ints
from pipeplan.solvers.dp.budget import SLACK, Step
from pipeplan.solvers.dp.flush_search import BatchBounds, BatchObjective
from pipeplan.solvers.dp.heterogeneous_plans import BoundaryLink, StepTimes, boundary_links, step_times
from pipeplan.solvers.dp.heterogeneous_search import HeterogeneousSearch, HeterogeneousTerms, group_starts
from pipeplan.solvers.dp.search_states import SearchStates
from pipeplan.solvers.dp.stage_costs import StageTerms


@dataclass
class HeterogeneousBatchObjective(BatchObjective):
    """Batch times on one component of a heterogeneous cluster."""

    terms: HeterogeneousTerms

    @property
    def constant_s(self) -> float:
        """The part that all batches have in common: the all-reduce among copies."""
        return self.terms.problem.copies_allreduce_s

    def search(self, bounds: BatchBounds, most_added_s: float = math.inf) -> tuple[float, list[Step]] | None:
        """The least sum over stages under limits on the bounds, with a pipeline that reaches it, or None."""
        search = HeterogeneousFlushSearch(self, bounds)
        steps = search.run()
        return None if steps is None else (search.added_s, steps)

    def bounds_of(self, steps: list[Step]) -> BatchBounds:
        """The bounds that a pipeline meets."""
        stages, count = step_times(self.terms, steps), self.minibatches
        joints: list[BoundaryLink | None] = [*boundary_links(self.terms, steps), None]
        steady, exposed = [0.0] * self.directions, 0.0
        for index, (stage, boundary) in enumerate(zip(stages, joints, strict=True)):
            worst = [float(formulas.flush_steady(time, count, stage.step.replicas)) for time in self._times(stage)]
            if boundary is not None:
                ways = crossing_times(self, stage.step.end, boundary.bandwidth)
                worst = [
                    max(mine, float(formulas.flush_steady(way, count, boundary.links)))
                    for mine, way in zip(worst, ways, strict=True)
                ]
                worst[0] = max(worst[0], self._limited_s(stage.step, steps[index + 1], boundary))
            steady = [max(pair) for pair in zip(steady, worst, strict=True)]
            before = self.terms.cuts.work_s[stage.step.start] / self.terms.fastest
            exposed = max(exposed, float(formulas.flush_exposed(stage.group_s, before)))
        return *steady, exposed

    def _times(self, stage: StepTimes) -> tuple[float, ...]:
        """The passes of one minibatch, one for each bound of the steady part."""
        forward, both = pass_times(self.terms, stage.terms, self.terms.runs.speed[stage.run])
        times = (forward, both - forward) if self.directions == 2 else (both,)
        return tuple(float(time[0]) for time in times)

    def _limited_s(self, step: Step, following: Step, hop: BoundaryLink) -> float:
        """The bound on the steady part that follows from a depth below the minibatches of a replica."""
        enough = step.depth >= formulas.rounds(self.minibatches, step.replicas)
        if enough or self.directions == 2 or not self.limits.memory:
            return 0.0
        transfer = float(formulas.transfer_time(self.terms.busier(step.end), hop.bandwidth, hop.latency_s))
        in_flight = following.depth * following.replicas
        return (self.minibatches - 1) * formulas.depth_limited_pace(step.depth, step.replicas, in_flight, transfer, ())


def pass_times(terms: HeterogeneousTerms, stage: StageTerms, speed: float | Floats) -> tuple[Floats, Floats]:
    """Forward time and total time, recomputation included, of one minibatch on devices of the given speed."""
    return stage.forward_s / speed, stage.work_s / speed


def crossing_times(batches: BatchObjective, cut: int, bandwidth: float | Floats) -> tuple[Floats, ...]:
    """Seconds that one minibatch keeps one link of a boundary busy, for each bound of the steady part."""
    cuts = batches.terms.cuts
    ways = np.asarray(float(cuts.sent[cut]) / bandwidth), np.asarray(float(cuts.returned[cut]) / bandwidth)
    return ways if batches.directions == 2 else (np.maximum(*ways),)


class HeterogeneousFlushSearch(HeterogeneousSearch):
    """The search for the least sum over stages under limits on the bounds, on a heterogeneous cluster."""

    def __init__(self, batches: HeterogeneousBatchObjective, bounds: BatchBounds) -> None:
        super().__init__(batches.terms, 1.0, batches.limits)
        self.batches, self.count = batches, batches.minibatches
        self.steady = tuple(bound * (1 + SLACK) for bound in bounds[:-1])
        self.exposed = bounds[-1] * (1 + SLACK)
        self.pace = formulas.flush_pace(self.steady[0], self.count)
        # (ceil(M/r) - 1) · pass ≤ bound implies r ≥ M · pass / (bound + pass), and parts need no fewer than the whole.
        work, steady_s = self.terms.cuts.work_s / self.terms.fastest, sum(self.steady)
        with np.errstate(divide="ignore", invalid="ignore"):
            need = np.where(work > 0, self.count * work / (steady_s + work), 0.0)
        self.need = np.maximum(np.ceil(need - 1e-9), 1).astype(np.intp)
        self.need[0] = 0
        self.lowest = self.need

    def start(self) -> SearchStates:
        """The initial state, with a sum of 0."""
        return replace(super().start(), extra=np.zeros(1))

    @property
    def counts_depths(self) -> bool:
        """False for GPipe, which holds all minibatches of a replica: its depth follows from the replicas."""
        return self.limits.memory and self.batches.directions == 1

    def _thinned(self, states: SearchStates) -> Ints:
        """Rows that have less demand, or a smaller sum, than any other with their position, level and counts."""
        assert states.extra is not None
        keys = self._keys(states)
        order = np.lexsort((states.extra, states.demand, *reversed(keys)))
        rank, begins = np.empty(len(states), dtype=np.intp), group_starts(keys[:, order])
        rank[np.argsort(states.extra, kind="stable")] = np.arange(len(states))
        # The running minimum restarts with every group, because each group's ranks lie below all those before it.
        added = rank[order] - np.cumsum(begins) * len(states)
        least = np.minimum.accumulate(added)
        rows: Ints = order[np.concatenate([[True], least[1:] < least[:-1]])]
        return rows

    def _quick_boundary(self, cut: int, bandwidth: Floats, links: Ints) -> Flags:
        quick = np.ones(len(bandwidth), dtype=bool)
        for way, bound in zip(crossing_times(self.batches, cut, bandwidth), self.steady, strict=True):
            quick &= formulas.flush_steady(way, self.count, links) <= bound
        return quick

    def _sized(self, stage: StageTerms, behind: Floats, runs: Ints, transfer: Floats) -> tuple[Floats, Floats]:
        """Depth and demand of stages (rows: cuts I) on placements; infinite where a limit is exceeded."""
        terms, table = self.terms, self.terms.runs
        replicas = table.replicas[runs]
        forward, both = (time.T for time in pass_times(terms, stage, table.speed[runs][:, None]))
        times = (forward, both - forward) if self.batches.directions == 2 else (both,)
        allowed = table.first[runs] >= self.lowest[stage.targets][:, None]
        for time, bound in zip(times, self.steady, strict=True):
            allowed = allowed & (formulas.flush_steady(time, self.count, replicas) <= bound)
        before = terms.cuts.work_s[stage.targets][:, None] / terms.fastest
        allowed &= formulas.flush_exposed(terms.stage_s(stage, runs)[1], before) <= self.exposed
        depth = np.broadcast_to(self._depth(stage, behind, replicas, transfer), allowed.shape)
        if self.limits.memory:
            allowed &= self._fits(stage, runs, depth)
        demand = depth * replicas if self.counts_depths else np.zeros(allowed.shape)
        return np.where(allowed, depth, np.inf), np.where(allowed, demand, np.inf)

    def _depth(self, stage: StageTerms, behind: Floats, replicas: Ints, transfer: Floats) -> Floats:
        """Minibatches in flight by placement: never more than a replica has."""
        most = np.asarray(formulas.rounds(self.count, replicas), dtype=np.float64)
        if self.batches.directions == 2:
            return most
        if stage.is_last or not self.counts_depths:
            return np.ones(len(replicas))
        # Without a transfer there is no delay, even if the pace is 0.
        with np.errstate(divide="ignore", invalid="ignore"):
            away = np.where(transfer > 0, 2 * transfer / self.pace, 0.0)
        depth: Floats = np.minimum(most, 1 + np.ceil((behind + away) / replicas - formulas.ROUNDING))
        return depth

    def _round_trip_s(self, stage: StageTerms, states: SearchStates, which: Ints, runs: Ints) -> Floats:
        """Seconds to the stages behind and back, for pairs of a state and a placement; 0 for the last stage."""
        if stage.is_last:
            return np.zeros(len(runs))
        assert isinstance(stage.cut, int)
        bandwidth, latency, _ = self._rates(stage.cut, states, which, runs)
        both = float(self.terms.cuts.sent[stage.cut] + self.terms.cuts.returned[stage.cut])
        times: Floats = both / bandwidth + 2 * latency
        return times

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
        """Every new state, with the sum behind its stage plus the stage's own passes and transfers."""
        assert states.extra is not None
        added = states.extra[which] + pass_times(self.terms, stage, self.terms.runs.speed[runs][:, None])[1].T
        added = added + stage.exchange_s[:, None]
        added = added + self._round_trip_s(stage, states, which, runs)
        columns = self._columns(stage, states, rows, which, runs)
        target, column = np.nonzero(np.isfinite(demand))
        new_states = SearchStates(columns.numbers[:, column], demand[target, column], added[target, column])
        yield from self._completable(stage.targets[target], new_states, depth[target, column])
