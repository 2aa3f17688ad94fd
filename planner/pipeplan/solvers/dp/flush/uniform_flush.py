"""The search for the fastest batch under a flush schedule, gpipe or 1f1b-flush, on a uniform cluster.

It is the search over cuts with the parts of a batch's time in every state (`batch_limit`): the fastest batch within a
limit is that of the best state at the empty cut. A stage is tried with every number of replicas that may matter, not
only the fewest, because replicas also shorten the steady part:

  r   the fewest replicas that leave so many minibatches to each of them, and where memory is limited, any other number
      that lets a depth suffice which does not suffice with one replica less
  d   the depth that the longest steady part needs, and any larger one up to that which the stage's own passes need
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property

import numpy as np

from pipeplan.cost import formulas
from pipeplan.problem.cuts import Flags, Floats, Ints
from pipeplan.solvers.dp.budget import SearchLimits
from pipeplan.solvers.dp.states.candidate_placements import CandidateStages, EndPositions
from pipeplan.solvers.dp.states.search_states import SearchStates
from pipeplan.solvers.dp.states.worker_bounds import WorkerBounds
from pipeplan.solvers.dp.steady.uniform_search import UniformSearch
from pipeplan.solvers.dp.terms.batch_limit import BatchLimit, Placed
from pipeplan.solvers.dp.terms.cost_terms import CostTerms
from pipeplan.solvers.dp.terms.stage_terms import StageTerms

# The number of pairs of a cut and an end position that are looked at a time.
_AT_ONCE = 100_000


class FlushSearch(UniformSearch):
    """The search for the fastest batch within a limit, in seconds from one update to the next."""

    batch: BatchLimit

    def __init__(
        self, terms: CostTerms, limit_s: float, limits: SearchLimits, steady_s: tuple[float, float] = (0.0, math.inf)
    ) -> None:
        """`steady_s` are the ends of the band of steady parts that is searched (`steady_bands`)."""
        self.batch = BatchLimit(terms, limit_s, *steady_s)
        super().__init__(terms, 1.0, limits)
        self.need = self.batch.workers_in_front
        levels = range(self.layout.top + 1)
        self.widest = np.array([sum(self._quick(cut, level) for level in levels) - 1 for cut in range(self.last + 1)])
        self.usable = (self.widest >= 1) | (np.arange(self.last + 1) == 0)
        self.usable[self.last] = True

    @property
    def counts_depths(self) -> bool:
        """False for GPipe, which holds all minibatches of a replica: its depth follows from the replicas."""
        return self.limits.memory and self.batch.phases == 1

    def _quick(self, cut: int, level: int) -> bool:
        """Whether a boundary over a level leaves time for the first minibatch's passes."""
        times = self.batch.crossing_s(cut, float(self.terms.links.sendrecv_bandwidth[level]))
        return all((self.batch.minibatches - 1) * float(time) <= self.batch.most_steady_s for time in times)

    def _worker_bounds(self) -> WorkerBounds:
        terms, recompute, count = self.terms, self.limits.recompute, self.batch.minibatches
        # r ≥ M · pass / (S + pass), and no stage's pass is longer than that of all layers.
        longest = float(terms.cuts.work_s[-1] + (terms.cuts.forward_s[-1] if recompute else 0.0)) / terms.speed
        # A stage holds at most all minibatches in flight, and with GPipe no fewer.
        demands = (float(count - 1) * (self.batch.phases - 1), float(count - 1))
        rate = count / (self.batch.phases * self.batch.most_steady_s + longest)
        return WorkerBounds(terms, rate, recompute=recompute, demands=demands)

    def workers_for_memory(self, targets: Ints, demand: Floats) -> Floats:
        if self.bounds is None:
            return np.zeros((len(targets), len(demand)))
        return self.bounds.at(targets[:, None], demand)

    # -- replicas and depths --

    def _size_stages(
        self, stage: StageTerms, states: SearchStates, rows: Ints, places: EndPositions, recompute: bool
    ) -> Iterator[tuple[Ints, SearchStates]]:
        size = max(1, _AT_ONCE // max(1, len(stage.targets)))
        for begin in range(0, len(places), size):
            part = places.take(slice(begin, begin + size))
            candidates, replicas = self._with_replicas(stage, states, part)
            self.limits.step(len(replicas) / 4)
            if self.counts_depths:
                assert states.times is not None
                candidates, replicas, depth = self._with_depths(stage, candidates, replicas, states.times[:, 1])
            else:
                depth = formulas.rounds(self.batch.minibatches, replicas) * float(self.batch.phases == 2)
                depth = np.maximum(depth, 1.0)
                if self.limits.memory:
                    fits = depth <= stage.max_depth_of(candidates.target, replicas)
                    candidates, replicas, depth = candidates.take(fits), replicas[fits], depth[fits]
            demand = depth * replicas * self.counts_depths
            yield from self._states(stage, states, rows, candidates, replicas, depth, demand, recompute=recompute)

    @cached_property
    def _counts(self) -> Ints:
        """The numbers of replicas to try: all, or without depths the fewest for every number of minibatches of one."""
        if self.limits.shape is not None:
            return np.array([self.limits.shape.replicas])
        divided, count = bool(self.terms.problem.divided_ratio), self.batch.minibatches
        # A replica without a minibatch only holds a part of divided state.
        every = np.arange(1, (self.terms.most_replicas if divided else min(self.terms.most_replicas, count)) + 1)
        if self.limits.coarse:
            return np.asarray(every[(every & (every - 1) == 0) | (every == count)])
        if self.counts_depths or (self.limits.memory and divided):
            return every
        per_replica = formulas.rounds(self.batch.minibatches, every)
        return np.asarray(every[np.diff(per_replica, prepend=per_replica[:1] + 1) != 0])

    @property
    def _drops_spare(self) -> bool:
        """Whether a replica that makes a stage no quicker is left out."""
        return self.limits.shape is None and not self.limits.coarse and not self.terms.problem.divided_ratio

    def _with_replicas(
        self, stage: StageTerms, states: SearchStates, places: EndPositions
    ) -> tuple[CandidateStages, Floats]:
        """The stages with the numbers of replicas that are quick enough and leave enough workers in front."""
        assert states.times is not None
        counts = self._counts
        cut = np.broadcast_to(stage.cut, len(places))
        spare = self.batch.spare_s(np.asarray(cut), states.times[places.state])
        least = np.maximum.reduce([self.batch.least_replicas(own, spare) for own in self.batch.stage_passes_s(stage)])
        need = np.maximum(self.batch.least_workers(stage.targets, spare), places.lowest)
        if self.limits.memory:
            need = np.maximum(need, self.workers_for_memory(stage.targets, states.demand[places.state]))
        room = np.minimum(places.end - need, places.room[-1])
        begin = np.asarray(np.searchsorted(counts, least))
        many = np.asarray(np.searchsorted(counts, room, side="right")) - begin
        target, place = np.nonzero(many > 0)
        options = many[target, place]
        pair = np.repeat(np.arange(len(options)), options)
        within = np.arange(len(pair)) - np.repeat(np.cumsum(options) - options, options)
        option = begin[target, place][pair] + within
        target, place = target[pair], place[pair]
        if self._drops_spare and self.batch.phases == 1 and not self.counts_depths:
            fewer = np.where(option > 0, counts[option - 1], 0)
            kept = ~self._suffices(stage, target, states.times[places.state[place], 1], fewer)
            option, target, place = option[kept], target[kept], place[kept]
        replicas = counts[option]
        level = (places.room[:, place] < replicas).sum(axis=0)
        candidates = CandidateStages.of(stage, states, places, self.need, (level, target, place))
        return candidates, replicas.astype(float)

    def _suffices(self, stage: StageTerms, target: Ints, behind_s: Floats, fewer: Ints | Floats) -> Flags:
        """Whether so many replicas, if any, leave the steady part as long as that of the states behind a stage."""
        several = np.maximum(fewer, 1)
        own = formulas.flush_steady(stage.work_s[target] / self.terms.speed, self.batch.minibatches, several)
        return np.asarray((fewer > 0) & (own <= np.maximum(behind_s, self.batch.least_steady_s)))

    def _with_depths(
        self, stage: StageTerms, candidates: CandidateStages, replicas: Floats, steady_s: Floats
    ) -> tuple[CandidateStages, Floats, Floats]:
        """The stages with every depth that may matter, as far as it fits in memory; `steady_s` are those of states."""
        least, most = self._depths(stage, candidates, replicas)
        fits = least <= stage.max_depth_of(candidates.target, replicas)
        # With one replica less at no greater depth, a stage is as quick and holds no more (but for divided state).
        fewer = np.maximum(replicas - 1, 1)
        rounds = formulas.rounds(self.batch.minibatches, replicas)
        spare = formulas.rounds(self.batch.minibatches, fewer) == rounds
        spare |= self._suffices(stage, candidates.target, steady_s[candidates.state], fewer)
        spare &= replicas > 1
        if self._drops_spare:
            fits &= ~(spare & (self._depths(stage, candidates, fewer)[1] <= least))
        candidates, replicas, least, most = candidates.take(fits), replicas[fits], least[fits], most[fits]
        most = np.minimum(most, stage.max_depth_of(candidates.target, replicas))
        options = (most - least).astype(np.intp) + 1
        chosen = np.repeat(np.arange(len(options)), options)
        deeper = np.arange(len(chosen)) - np.repeat(np.cumsum(options) - options, options)
        return candidates.take(chosen), replicas[chosen], least[chosen] + deeper

    def _depths(self, stage: StageTerms, candidates: CandidateStages, replicas: Floats) -> tuple[Floats, Floats]:
        """The depths for the longest steady part, and for that which every pipeline with the stage has at least."""
        if stage.is_last:
            return np.ones(len(replicas)), np.ones(len(replicas))
        transfer = self.terms.transfer_s[stage.cut, self._joined(candidates, replicas)]
        alone = Placed(stage, candidates.target, replicas, self.terms.speed, np.zeros(len(replicas)))
        own = np.maximum(self.batch.steady_parts(alone)[0], self.batch.least_steady_s)
        least = self.batch.depth(candidates.behind, transfer, self.batch.most_steady_s, replicas)
        return least, self.batch.depth(candidates.behind, transfer, own, replicas)

    def _joined(self, candidates: CandidateStages, replicas: Floats) -> Ints:
        """The level of the smallest component that holds a stage and the one behind it."""
        start = (candidates.end - replicas).astype(np.intp)
        return np.maximum(self.layout.between(start, candidates.next_first), candidates.next_level)

    def _times(
        self, stage: StageTerms, states: SearchStates, candidates: CandidateStages, replicas: Floats, depth: Floats
    ) -> Floats | None:
        assert states.times is not None
        before, limited = states.times[candidates.state], np.zeros(len(replicas))
        allreduce = stage.allreduce(candidates.target, replicas, candidates.level)
        if stage.is_last:
            placed = Placed(stage, candidates.target, replicas, self.terms.speed, allreduce)
            return self.batch.in_front(before, placed)
        joined, links = self._joined(candidates, replicas), self.terms.links
        if self.counts_depths:
            transfer = self.terms.transfer_s[stage.cut, joined]
            limited = self.batch.limited_s(depth, replicas, candidates.behind, transfer)
        hop = links.sendrecv_bandwidth[joined], links.sendrecv_latency[joined]
        return self.batch.in_front(
            before, Placed(stage, candidates.target, replicas, self.terms.speed, allreduce, *hop), limited
        )
