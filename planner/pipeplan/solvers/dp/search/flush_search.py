"""The searches for the fastest batch under a flush schedule: on equal servers, and over all candidate placements.

Every state of these searches over cuts has the two numbers V1 and V2 of a batch (`batch_limit`). A state at the empty
cut is a complete pipeline; the best of these states is the fastest batch within a limit. On equal servers, the search
also tries more than the fewest replicas, because the number of replicas changes the time of the stages behind. For each
number of minibatches per replica, it tries the fewest replicas. If memory is limited, it also tries every number of
replicas with another depth.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property

import numpy as np

from pipeplan.cost import formulas
from pipeplan.problem.cuts import Flags, Floats, Ints
from pipeplan.solvers.dp.budget import SearchLimits
from pipeplan.solvers.dp.search.batch_limit import BatchLimit, Placed
from pipeplan.solvers.dp.search.cost_terms import CostTerms
from pipeplan.solvers.dp.search.heterogeneous_terms import HeterogeneousTerms
from pipeplan.solvers.dp.search.placement_search import AT_ONCE, PlacementSearch, SharedLimit
from pipeplan.solvers.dp.search.stage_sizing import CandidateStages, EndPositions
from pipeplan.solvers.dp.search.stage_terms import StageTerms
from pipeplan.solvers.dp.search.states import SearchStates
from pipeplan.solvers.dp.search.uniform_search import UniformSearch
from pipeplan.solvers.dp.search.worker_bounds import WorkerBounds

# Number of pairs (cut, end position) that are processed at a time.
_AT_ONCE = 100_000


class FlushSearch(UniformSearch):
    """The search for the fastest batch within a limit, in seconds from one update to the next."""

    batch: BatchLimit

    def __init__(self, terms: CostTerms, limit_s: float, limits: SearchLimits) -> None:
        self.batch = BatchLimit(terms, limit_s)
        super().__init__(terms, 1.0, limits)
        self.need = self.batch.workers_in_front
        levels = range(self.layout.top + 1)
        self.widest = np.array([sum(self._quick(cut, level) for level in levels) - 1 for cut in range(self.last + 1)])
        self.usable = (self.widest >= 1) | (np.arange(self.last + 1) == 0)
        self.usable[self.last] = True

    @property
    def counts_depths(self) -> bool:
        """False under GPipe, where a replica holds all its minibatches, so the depth follows from the replicas."""
        return self.limits.memory and not self.batch.holds_all

    def _quick(self, cut: int, level: int) -> bool:
        """Whether a boundary at a level carries all messages within the limit."""
        crossing = self.batch.crossing_s(cut, float(self.terms.links.sendrecv_bandwidth[level]), 1)
        return bool(crossing <= self.batch.budget_s)

    def _worker_bounds(self) -> WorkerBounds:
        count = self.batch.minibatches
        # A stage holds at most all minibatches in flight; under GPipe it holds all.
        demands = (float(count - 1) * self.batch.holds_all, float(count - 1))
        rate = count / self.batch.budget_s
        return WorkerBounds(self.terms, rate, recompute=self.limits.recompute, demands=demands)

    def workers_for_memory(self, targets: Ints, demand: Floats) -> Floats:
        if self.bounds is None:
            return np.zeros((len(targets), len(demand)))
        return self.bounds.at(targets[:, None], demand)

    # -- replicas and depths --

    def _size_stages(
        self, stage: StageTerms, states: SearchStates, rows: Ints, places: EndPositions
    ) -> Iterator[tuple[Ints, SearchStates]]:
        size = max(1, _AT_ONCE // max(1, len(stage)))
        for begin in range(0, len(places), size):
            part = places.take(slice(begin, begin + size))
            candidates, replicas = self._with_replicas(stage, states, part)
            self.limits.step(len(replicas) / 4)
            depth = np.ones(len(replicas))
            if self.limits.memory:
                candidates, replicas, depth = self._with_depths(stage, states, candidates, replicas)
            demand = depth * replicas * self.counts_depths
            yield from self._states(stage, states, rows, candidates, replicas, depth, demand)

    @cached_property
    def _counts(self) -> Ints:
        """The numbers of replicas to try: all, or, if depths do not matter, the fewest for every number of minibatches
        per replica."""
        if self.limits.shape is not None:
            return np.array([self.limits.shape.replicas])
        divided, count = bool(self.terms.problem.divided_ratio), self.batch.minibatches
        # A replica without a minibatch only helps by holding a part of the divided state.
        every = np.arange(1, (self.terms.most_replicas if divided else min(self.terms.most_replicas, count)) + 1)
        if self.limits.coarse:
            return np.asarray(every[(every & (every - 1) == 0) | (every == count)])
        if self.counts_depths or (self.limits.memory and divided):
            return every
        per_replica = formulas.rounds(self.batch.minibatches, every)
        return np.asarray(every[np.diff(per_replica, prepend=per_replica[:1] + 1) != 0])

    @property
    def _drops_spare(self) -> bool:
        """Whether the search leaves out replicas that do not make a stage faster."""
        return self.limits.shape is None and not self.limits.coarse and not self.terms.problem.divided_ratio

    def _with_replicas(
        self, stage: StageTerms, states: SearchStates, places: EndPositions
    ) -> tuple[CandidateStages, Floats]:
        """The stages with numbers of replicas that are fast enough and leave enough workers in front."""
        assert states.times is not None
        counts = self._counts
        least = self.batch.least_replicas(stage)[:, None]
        need = np.maximum(self.need[stage.begin][:, None], places.lowest)
        if self.limits.memory:
            need = np.maximum(need, self.workers_for_memory(stage.begin, states.demand[places.state]))
        room = np.minimum(places.end - need, places.room[-1])
        # The stages behind must still finish in time after the passes of this stage and of the stages in front.
        ahead = stage.ahead_s / self.terms.speed + self.batch.ahead_s[stage.begin]
        room = np.where(ahead[:, None] + states.times[places.state, 0] <= self.batch.budget_s, room, 0)
        begin = np.broadcast_to(np.searchsorted(counts, least), room.shape)
        many = np.asarray(np.searchsorted(counts, room, side="right")) - begin
        target, place = np.nonzero(many > 0)
        options = many[target, place]
        pair = np.repeat(np.arange(len(options)), options)
        within = np.arange(len(pair)) - np.repeat(np.cumsum(options) - options, options)
        option = begin[target, place][pair] + within
        target, place = target[pair], place[pair]
        if self._drops_spare and not self.limits.memory:
            fewer = np.where(option > 0, counts[option - 1], 0)
            kept = ~self._suffices(stage, target, states.times[places.state[place], 0], fewer)
            option, target, place = option[kept], target[kept], place[kept]
        replicas = counts[option]
        level = (places.room[:, place] < replicas).sum(axis=0)
        candidates = CandidateStages.of(stage, states, places, self.need, (level, target, place))
        return candidates, replicas.astype(float)

    def _suffices(self, stage: StageTerms, target: Ints, behind_s: Floats, fewer: Ints | Floats) -> Flags:
        """Whether `fewer` replicas, if there are any, finish no later than the stages behind."""
        if stage.splits:
            return np.zeros(len(target), dtype=bool)
        several = np.maximum(fewer, 1)
        own = formulas.flush_busy(stage.passes_s[target] / self.terms.speed, self.batch.minibatches, several)
        ahead = stage.ahead_s[target] / self.terms.speed
        return np.asarray((fewer > 0) & (own <= ahead + behind_s))

    def _with_depths(
        self, stage: StageTerms, states: SearchStates, candidates: CandidateStages, replicas: Floats
    ) -> tuple[CandidateStages, Floats, Floats]:
        """The stages that fit in memory, with their depths."""
        assert states.times is not None
        depth = self._depth(stage, candidates, replicas)
        kept = depth <= stage.max_depth_of(candidates.target, replicas)
        if self._drops_spare:
            # A stage with one replica less is better if it is as fast with at most the same depth.
            fewer = np.maximum(replicas - 1, 1)
            count = self.batch.minibatches
            spare = formulas.rounds(count, fewer) == formulas.rounds(count, replicas)
            spare |= self._suffices(stage, candidates.target, states.times[candidates.state, 0], fewer)
            kept &= ~(spare & (replicas > 1) & (self._depth(stage, candidates, fewer) <= depth))
        return candidates.take(kept), replicas[kept], depth[kept]

    def _depth(self, stage: StageTerms, candidates: CandidateStages, replicas: Floats) -> Floats:
        """The minibatches that stages hold in flight."""
        if stage.is_last and not self.batch.holds_all:
            return np.ones(len(replicas))
        return self.batch.depth(candidates.behind, replicas)

    def _times(
        self, stage: StageTerms, states: SearchStates, candidates: CandidateStages, replicas: Floats
    ) -> Floats | None:
        assert states.times is not None
        if self.limits.fitting:
            return np.zeros((len(replicas), 2))
        before = states.times[candidates.state]
        allreduce = stage.allreduce(candidates.target, replicas, candidates.level)
        placed = Placed(stage.take(candidates.target), replicas, self.terms.speed, allreduce)
        if not stage.is_last:
            joined, links = self.joined(candidates, replicas), self.terms.links
            hop = links.sendrecv_bandwidth[joined], links.sendrecv_latency[joined]
            placed = replace(placed, bandwidth=hop[0], latency_s=hop[1])
        return self.batch.in_front(before, placed)


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
        """False under GPipe, where a replica holds all its minibatches, so the depth follows from the replicas."""
        return self.limits.memory and not self.batch.holds_all

    def _quick_boundary(self, cut: int, bandwidth: Floats, links: Ints) -> Flags:
        return np.asarray(self.batch.crossing_s(cut, bandwidth, links) <= self.batch.budget_s)

    def _useful(self, stages: list[StageTerms], kinds: tuple[Floats, Ints, Floats]) -> Flags:
        return np.ones(len(kinds[1]), dtype=bool)

    def _stages(
        self, stage: StageTerms, kinds: tuple[Floats, Ints, Floats], kind: Ints
    ) -> Iterator[tuple[Ints, Ints, Floats, Floats]]:
        size = max(1, AT_ONCE // len(kind))
        for begin in range(0, len(stage), size):
            some = stage.take(np.arange(begin, min(begin + size, len(stage))))
            self._count(some, len(kind) * len(some) / 8)
            depth, demand = self._sizes(some, kinds[0], kinds[1])
            target, pair = np.nonzero(np.isfinite(demand)[:, kind])
            yield begin + target, pair, depth[target, kind[pair]], demand[target, kind[pair]]

    def _sizes(self, stage: StageTerms, behind: Floats, runs: Ints) -> tuple[Floats, Floats]:
        """Depth and demand of stages (rows: cuts I) on placements; infinite if a stage is too slow or too large."""
        replicas, speed = self.terms.runs.replicas[runs], self.terms.runs.speed[runs]
        work = stage.passes_s[:, None] / speed
        own = formulas.flush_busy(work, self.batch.minibatches, replicas)
        chosen = self.terms.runs.first[runs] >= self.lowest[stage.begin][:, None]
        ahead = self.batch.ahead_s[stage.begin][:, None] - stage.tail_s[:, None] / speed
        chosen &= own + np.maximum(ahead, 0.0) <= self.batch.budget_s
        depth = np.ones(len(runs))
        if self.limits.memory and (self.batch.holds_all or not stage.is_last):
            depth = self.batch.depth(behind, replicas)
        depth = np.broadcast_to(depth, chosen.shape)
        if self.limits.memory:
            chosen &= self._fits(stage, runs, depth)
        demand = depth * replicas if self.counts_depths else np.zeros(chosen.shape)
        return np.where(chosen, depth, np.inf), np.where(chosen, demand, np.inf)

    def _placed_times(self, stage: StageTerms, states: SearchStates, target: Ints, which: Ints, runs: Ints) -> Floats:
        """The batch times of new states: one for each pair of a state and a placement, at its cut."""
        assert states.times is not None
        if self.limits.fitting:
            return np.zeros((len(target), 2))
        assert isinstance(stage.end, int)
        table, before = self.terms.runs, states.times[which]
        replicas, speed = table.replicas[runs], table.speed[runs]
        size = stage.parameters[target] * self.terms.training
        members = self.terms.members(replicas)
        allreduce = np.asarray(formulas.ring_allreduce_time(members, size, *self.terms.ring(runs)))
        # The last stage has no links behind it: their bandwidth is infinite.
        links = self._rates(stage.end, states, which, runs)
        return self.batch.in_front(before, Placed(stage.take(target), replicas, speed, allreduce, *links))
