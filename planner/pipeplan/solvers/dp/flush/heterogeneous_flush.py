"""The search for the fastest batch under a flush schedule on heterogeneous clusters and over parallel links.

It is the search over candidate placements with two numbers of a batch's time in every state (`batch_limit`).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pipeplan.cost import formulas
from pipeplan.problem.cuts import Flags, Floats, Ints
from pipeplan.solvers.dp.budget import SearchLimits
from pipeplan.solvers.dp.states.search_states import SearchStates
from pipeplan.solvers.dp.steady.placement_search import AT_ONCE, PlacementSearch, SharedLimit
from pipeplan.solvers.dp.terms.batch_limit import BatchLimit, Placed
from pipeplan.solvers.dp.terms.heterogeneous_terms import HeterogeneousTerms
from pipeplan.solvers.dp.terms.stage_terms import StageTerms


class PlacementFlushSearch(PlacementSearch):
    """The search for the fastest batch within a limit, in seconds from one update to the next."""

    batch: BatchLimit

    def __init__(
        self, terms: HeterogeneousTerms, limit_s: float, limits: SearchLimits, shared: SharedLimit | None = None
    ) -> None:
        super().__init__(terms, 1.0, limits, shared)
        self.batch = BatchLimit(terms, limit_s)
        self.need = self.lowest = self.batch.workers_in_front

    @property
    def counts_depths(self) -> bool:
        """False for GPipe, which holds all minibatches of a replica: its depth follows from the replicas."""
        return self.limits.memory and not self.batch.holds_all

    def _quick_boundary(self, cut: int, bandwidth: Floats, links: Ints) -> Flags:
        return np.asarray(self.batch.crossing_s(cut, bandwidth, links) <= self.batch.budget_s)

    def _useful(self, stages: list[StageTerms], kinds: tuple[Floats, Ints, Floats]) -> Flags:
        return np.ones(len(kinds[1]), dtype=bool)

    def _stages(
        self, stage: StageTerms, kinds: tuple[Floats, Ints, Floats], kind: Ints
    ) -> Iterator[tuple[Ints, Ints, Floats, Floats]]:
        size = max(1, AT_ONCE // len(kind))
        for begin in range(0, len(stage.targets), size):
            some = stage.take(np.arange(begin, min(begin + size, len(stage.targets))))
            self.limits.step(len(kind) * len(some.targets) / 8)
            depth, demand = self._sizes(some, kinds[0], kinds[1])
            target, pair = np.nonzero(np.isfinite(demand)[:, kind])
            yield begin + target, pair, depth[target, kind[pair]], demand[target, kind[pair]]

    def _sizes(self, stage: StageTerms, behind: Floats, runs: Ints) -> tuple[Floats, Floats]:
        """Depth and demand of stages (rows: cuts I) on placements, infinite where a stage is too slow or too large."""
        replicas, speed = self.terms.runs.replicas[runs], self.terms.runs.speed[runs]
        work = self.batch.passes_s(stage)[:, None] / speed
        own = formulas.flush_busy(work, self.batch.minibatches, replicas)
        chosen = self.terms.runs.first[runs] >= self.lowest[stage.targets][:, None]
        ahead = self.batch.ahead_s[stage.targets][:, None] - self.batch.tail_s(stage)[:, None] / speed
        chosen &= own + np.maximum(ahead, 0.0) <= self.batch.budget_s
        depth = np.ones(len(runs))
        if self.limits.memory and (self.batch.holds_all or not stage.is_last):
            depth = self.batch.depth(behind, replicas)
        depth = np.broadcast_to(depth, chosen.shape)
        if self.limits.memory:
            chosen &= self._fits(stage, runs, depth)
        demand = depth * replicas if self.counts_depths else np.zeros(chosen.shape)
        return np.where(chosen, depth, np.inf), np.where(chosen, demand, np.inf)

    def _placed_times(
        self, stage: StageTerms, states: SearchStates, target: Ints, which: Ints, runs: Ints, depth: Floats
    ) -> Floats:
        """The parts of the batches that new states belong to: pairs of a state and a placement, with a cut each."""
        assert states.times is not None
        assert isinstance(stage.cut, int)
        table, before = self.terms.runs, states.times[which]
        replicas, speed = table.replicas[runs], table.speed[runs]
        size = stage.parameters[target] * self.terms.training
        members = self.terms.members(replicas)
        allreduce = np.asarray(formulas.ring_allreduce_time(members, size, *self.terms.ring(runs)))
        if stage.is_last:
            return self.batch.in_front(before, Placed(stage, target, replicas, speed, allreduce))
        bandwidth, latency, links = self._rates(stage.cut, states, which, runs)
        placed = Placed(stage, target, replicas, speed, allreduce, bandwidth, latency, links)
        return self.batch.in_front(before, placed)
