"""The fastest pipeline under the flush schedules, gpipe and 1f1b-flush (docs/cost-model.md, "Flush schedules").

The time from one update to the next is W + V + Σ bounds. W is the work of all layers. V is a sum over stages: their
transfers both ways, the work that they do twice, and the exchange of the gradients of shared weights. Each bound is a
maximum over stages and boundaries:

    1f1b-flush   steady, exposed                 gpipe   forward, backward, exposed

For given upper limits on the bounds, a search over cuts finds the least V. Branch and bound over the limits does the
rest: a box of limits [low, high] holds no pipeline faster than W + V(high) + Σ low.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from pipeplan.cost import formulas
from pipeplan.plan.schedules import GPIPE
from pipeplan.problem.cuts import Flags, Floats, Ints
from pipeplan.solvers.dp.budget import SLACK, OutOfTime, SearchLimits, Step
from pipeplan.solvers.dp.replicas import ReplicaIntervals
from pipeplan.solvers.dp.search_states import SearchStates
from pipeplan.solvers.dp.stage_costs import CostTerms, StageTerms
from pipeplan.solvers.dp.threshold import PRECISION
from pipeplan.solvers.dp.uniform_plans import boundary_level, span_of, stage_terms_of
from pipeplan.solvers.dp.uniform_search import UniformSearch
from pipeplan.solvers.dp.worker_bounds import WorkerBounds

BatchBounds = tuple[float, ...]
"""Seconds: (steady, exposed) for 1f1b-flush, (forward, backward, exposed) for gpipe."""

# A limit is halved until it is this close to what a pipeline needs (relative); then it is put right below that.
_CLOSE = 0.02


@dataclass
class BatchObjective:
    """Batch times, from one update to the next, on one component of the cluster."""

    terms: CostTerms
    limits: SearchLimits

    @property
    def minibatches(self) -> int:
        """Minibatches of one update, in the copy that has most."""
        accumulate = self.terms.problem.options.accumulate
        assert accumulate is not None
        return int(formulas.rounds(accumulate, self.terms.problem.copies))

    @property
    def directions(self) -> int:
        """The number of bounds on the steady part, one for each phase."""
        return 2 if self.terms.schedule == GPIPE else 1

    @property
    def constant_s(self) -> float:
        """The part that all batches have in common: the work of all layers, and the all-reduce among copies."""
        return float(self.terms.cuts.work_s[-1]) / self.terms.speed + self.terms.problem.copies_allreduce_s

    def search(self, bounds: BatchBounds, most_added_s: float = math.inf) -> tuple[float, list[Step]] | None:
        """The least sum over stages under limits on the bounds, with a pipeline that reaches it, or None.

        Pipelines whose sum exceeds `most_added_s` may be left out.
        """
        search = FlushSearch(self, bounds, self.limits, most_added_s)
        pipeline = search.run()
        if pipeline is None:
            return None
        return search.added_s, pipeline

    def bounds_of(self, steps: list[Step]) -> BatchBounds:
        """The bounds that a pipeline meets."""
        terms, count = self.terms, self.minibatches
        steady, exposed = [0.0] * self.directions, 0.0
        for index, step in enumerate(steps):
            forward, backward = self._passes(step.start, step.end, step.recompute)
            passes = (forward, backward) if self.directions == 2 else (forward + backward,)
            worst = [float(formulas.flush_steady(time, count, step.replicas)) for time in passes]
            if index + 1 < len(steps):
                level = boundary_level(terms, step, steps[index + 1])
                crossing = [float(formulas.flush_steady(time, count, 1)) for time in self._crossing(step.end, level)]
                worst = [max(pair) for pair in zip(worst, crossing, strict=True)]
                if self.directions == 1:
                    worst = [max(worst[0], self._depth_s(step, steps[index + 1], level))]
            steady = [max(pair) for pair in zip(steady, worst, strict=True)]
            allreduce = stage_terms_of(terms, step).allreduce(
                _FIRST, np.array([float(step.replicas)]), span_of(terms, step)
            )
            before = terms.cuts.work_s[step.start] / terms.speed
            exposed = max(exposed, float(formulas.flush_exposed(allreduce[0], before)))
        return *steady, exposed

    def _depth_s(self, step: Step, following: Step, level: int) -> float:
        """The bound on the steady part that follows from a depth below the minibatches of a replica."""
        if step.depth >= formulas.rounds(self.minibatches, step.replicas) or not self.limits.memory:
            return 0.0
        transfer = float(self.terms.transfer_s[step.end][level])
        slack = following.depth * following.replicas
        pace = formulas.depth_limited_pace(step.depth, step.replicas, slack, transfer, ())
        return (self.minibatches - 1) * pace

    def _passes(self, start: int, end: int, recompute: bool) -> tuple[float, float]:
        """Forward and backward time of one minibatch on one worker."""
        cuts, speed = self.terms.cuts, self.terms.speed
        forward = float(cuts.forward_s[end] - cuts.forward_s[start]) / speed
        backward = float(cuts.work_s[end] - cuts.work_s[start]) / speed - forward
        half = float(self.terms.executor_s(end, start)) / speed / 2
        return forward + half, float(formulas.backward_time(forward, backward, recompute)) + half

    def _crossing(self, cut: int, level: int) -> tuple[float, ...]:
        """Seconds that one minibatch keeps a boundary's link busy, for each bound of the steady part."""
        cuts, bandwidth = self.terms.cuts, float(self.terms.links.sendrecv_bandwidth[level])
        ways = float(cuts.sent[cut]) / bandwidth, float(cuts.returned[cut]) / bandwidth
        return ways if self.directions == 2 else (max(ways),)


_FIRST = np.zeros(1, dtype=np.intp)


class FlushSearch(UniformSearch):
    """The search for the least sum over stages under limits on the bounds."""

    def __init__(
        self, batches: BatchObjective, bounds: BatchBounds, limits: SearchLimits, most_added_s: float = math.inf
    ) -> None:
        self.batches, self.count = batches, batches.minibatches
        self.most_added_s = most_added_s
        self.steady = tuple(bound * (1 + SLACK) for bound in bounds[:-1])
        self.exposed = bounds[-1] * (1 + SLACK)
        super().__init__(batches.terms, 1.0, limits)
        terms, steady_s = self.terms, sum(self.steady)
        # (ceil(M/r) - 1) · pass ≤ bound implies r ≥ M · pass / (bound + pass), and parts need no fewer than the whole.
        work = terms.cuts.work_s / terms.speed
        with np.errstate(divide="ignore", invalid="ignore"):
            need = np.where(work > 0, self.count * work / (steady_s + work), 0.0)
        self.need = np.maximum(np.ceil(need - 1e-9), 1).astype(np.intp)
        self.need[0] = 0
        self.widest = np.array([self._widest(cut) for cut in range(self.last + 1)])
        self.usable = (self.widest >= 1) | (np.arange(self.last + 1) == 0)
        self.pace = formulas.flush_pace(self.steady[0], self.count)

    def start(self) -> SearchStates:
        """The initial state, with a sum of 0."""
        return replace(super().start(), extra=np.zeros(1))

    @property
    def counts_depths(self) -> bool:
        """False for GPipe, which holds all minibatches of a replica: its depth follows from the replicas."""
        return self.limits.memory and self.batches.directions == 1

    @property
    def counts_up(self) -> bool:
        """False, because a depth need not exceed the minibatches of a replica, whatever is in flight behind."""
        return False

    @property
    def compares_cuts(self) -> bool:
        """False, because an all-reduce hides behind the layers before its stage, so fewer layers may be worse."""
        return False

    def _widest(self, cut: int) -> int:
        levels = range(self.layout.top + 1)
        return sum(self._quick_boundary(cut, level) for level in levels) - 1

    def _quick_boundary(self, cut: int, level: int) -> bool:
        times = self.batches._crossing(cut, level)
        return all((self.count - 1) * time <= bound for time, bound in zip(times, self.steady, strict=True))

    def allowed(self, stage: StageTerms) -> ReplicaIntervals:
        """The allowed replicas: at least those of the steady part (and GPipe's memory), at most those of the
        all-reduce."""
        if 0.0 not in stage.intervals:
            stage.intervals[0.0] = self._intervals(stage)
        return self.only(stage.intervals[0.0])

    def _intervals(self, stage: StageTerms) -> ReplicaIntervals:
        """The allowed replicas of a stage as intervals, by level and stage."""
        terms = self.terms
        forward = stage.forward_s / terms.speed
        both = stage.work_s / terms.speed
        passes = (forward, both - forward) if len(self.steady) == 2 else (both,)
        rounds = np.full(len(both), np.inf)
        with np.errstate(divide="ignore", invalid="ignore"):
            for time, bound in zip(passes, self.steady, strict=True):
                most = np.where(time > 0, 1 + np.floor(bound / time * (1 + 1e-12)), np.inf)
                rounds = np.minimum(rounds, most)
            several, alone = rounds, rounds
            if self.limits.memory and len(self.steady) == 2:
                several = np.minimum(rounds, stage.deepest(replicated=True))
                alone = np.minimum(rounds, stage.deepest(replicated=False))
            fewest = np.where(several >= 1, np.ceil(self.count / several - 1e-12), np.inf)
        single = np.where(alone >= self.count, 1.0, -1.0)
        most = self._most(stage)
        ones = np.ones(most.shape)
        row = ones, single * ones, np.maximum(fewest, 2.0) * ones, most
        low1, high1, low2, high2 = ((column, column) for column in row)
        return ReplicaIntervals(low1, high1, low2, high2)

    def _most(self, stage: StageTerms) -> Floats:
        """The most replicas whose all-reduce stays within its bound, by level and stage."""
        links, terms = self.terms.links, self.terms
        allowance = self.exposed + terms.cuts.work_s[stage.targets] / terms.speed
        transmit = stage.parameters / links.allreduce_bandwidth[:, None]
        latency = np.broadcast_to(links.allreduce_latency[:, None], transmit.shape)
        # 2 (r-1)/r t + 2 (r-1) α ≤ x, times r: 2α r² + (2t - 2α - x) r - 2t ≤ 0.
        linear = 2 * transmit - 2 * latency - allowance
        with np.errstate(divide="ignore", invalid="ignore"):
            root = np.sqrt(linear * linear + 16 * latency * transmit)
            # The larger root, without cancellation.
            curved = np.where(linear > 0, 4 * transmit / (linear + root), (root - linear) / (4 * latency))
            straight = np.where(linear < 0, np.inf, 2 * transmit / linear)
            most = np.where(latency > 0, curved, np.where(transmit == 0, np.inf, straight))
        floored: Floats = np.maximum(np.floor(most * (1 + 1e-12)), 1.0)
        return floored

    def _wait(self, stage: StageTerms, candidates: object, replicas: Floats) -> Floats:
        return np.zeros(len(replicas))

    def _worker_bounds(self) -> WorkerBounds:
        terms, recompute = self.terms, self.limits.recompute
        # r ≥ M · pass / (bound + pass), as in `need`, and no stage's pass is longer than that of all layers.
        longest = float(terms.cuts.work_s[-1] + (terms.cuts.forward_s[-1] if recompute else 0.0)) / terms.speed
        # A stage holds at most all minibatches in flight, and with GPipe no fewer.
        most = float(self.count - 1)
        least = most if self.batches.directions == 2 else 0.0
        return WorkerBounds(
            terms, self.count / (sum(self.steady) + longest), recompute=recompute, demands=(least, most)
        )

    def _workers_for_memory(self, targets: Ints, demand: Floats) -> Floats:
        return (
            np.zeros((len(targets), len(demand))) if self.bounds is None else self.bounds.at(targets[:, None], demand)
        )

    def _versions_suffice(self, stage: StageTerms, candidates: object, replicas: Floats, demand: Floats) -> Flags:
        return np.ones(len(replicas), dtype=bool)

    def _deepened(self, replicas: Floats, cover: Floats) -> Floats:
        depth: Floats = np.minimum(super()._deepened(replicas, cover), formulas.rounds(self.count, replicas))
        return depth

    def _replicas_for(self, depth: Floats, cover: Floats) -> Floats:
        count: Floats = np.minimum(
            super()._replicas_for(depth, cover), formulas.rounds(self.count, np.maximum(depth, 1))
        )
        return count

    def _least_demand(self, replicas: Floats, behind: Floats) -> Floats:
        least: Floats = np.minimum(super()._least_demand(replicas, behind), self.count)
        return least

    def extra(self, stage: StageTerms, before: Floats, target: Ints, joined: Ints) -> Floats:
        """The sum behind a stage plus its own part: transfers both ways over its boundary, work done twice, and the
        exchange of the gradients of shared weights."""
        terms, cut = self.terms, stage.cut
        added = before if terms.shared is None else before + stage.exchange_s[target]
        if not stage.is_last:
            both = float(terms.cuts.sent[cut] + terms.cuts.returned[cut])
            bandwidth, latency = terms.links.sendrecv_bandwidth[joined], terms.links.sendrecv_latency[joined]
            added = added + both / bandwidth + 2 * latency
        if stage.recompute:
            forward = terms.cuts.forward_s[cut] - terms.cuts.forward_s[stage.targets[target]]
            added = added + forward / terms.speed
        if terms.problem.cluster.executor:
            added = added + terms.executor_s(cut, stage.targets[target]) / terms.speed
        return added

    def _states(self, *sized: Any, recompute: bool) -> Iterator[tuple[Ints, SearchStates]]:
        for targets, states in super()._states(*sized, recompute=recompute):
            assert states.extra is not None
            least = states.extra <= self.most_added_s * (1 + SLACK)
            if least.any():
                yield (targets, states) if least.all() else (targets[least], states.take(least))


@dataclass
class BatchResult:
    """The fastest batch found, in seconds, with a pipeline that reaches it."""

    total_s: float = float("inf")
    steps: list[Step] | None = None
    bound_s: float = 0.0
    """No pipeline has a faster batch."""
    finished: bool = True
    interrupted: bool = False


class SearchableBatches(Protocol):
    """The batch times that `fastest_batch` minimises: `BatchObjective`, or those of a narrower space of plans."""

    @property
    def terms(self) -> CostTerms:
        """The terms of the cost model."""

    @property
    def minibatches(self) -> int:
        """Minibatches of one update."""

    @property
    def directions(self) -> int:
        """The number of bounds on the steady part."""

    @property
    def constant_s(self) -> float:
        """The part that all batches have in common, in seconds."""

    def search(self, bounds: BatchBounds, most_added_s: float = math.inf) -> tuple[float, list[Step]] | None:
        """The least sum over stages under limits on the bounds, with a pipeline that reaches it, or None.

        Pipelines whose sum exceeds `most_added_s` may be left out.
        """

    def bounds_of(self, steps: list[Step]) -> BatchBounds:
        """The bounds that a pipeline meets."""


def fastest_batch(
    batches: SearchableBatches,
    above_s: float = 0.0,
    below_s: float = math.inf,
    gap: float = 0.0,
    *,
    perhaps_none: bool = False,
) -> BatchResult:
    """The fastest batch below `below_s` seconds, by branch and bound; `above_s` is a known lower bound.

    The search may stop at the relative `gap`. With `perhaps_none` it begins with the loosest limits, because something
    else than the limits may rule out every pipeline. A deadline or Ctrl-C ends it with the best so far.
    """
    batch = BatchResult(below_s)
    number = batches.directions + 1
    everything = batches.constant_s * (1 + batches.minibatches) + batches.terms.most * batches.minibatches
    everything = min(everything, below_s - batches.constant_s)
    if everything < 0:
        return replace(batch, bound_s=below_s)
    low, high = (0.0,) * number, (everything,) * number
    # Below a known batch a search under the loosest limits would teach nothing, so that box is split unsearched.
    searched = None if perhaps_none or below_s == math.inf else (0.0, high)
    boxes: list[tuple[float, int, BatchBounds, BatchBounds, tuple[float, BatchBounds] | None]] = [
        (0.0, 0, low, high, searched)
    ]
    pushed = 0
    try:
        while boxes:
            bound, _, low, high, searched = heapq.heappop(boxes)
            batch.bound_s = bound = max(bound, above_s)
            if bound >= batch.total_s * (1 - PRECISION):
                batch.bound_s = batch.total_s
                break
            if batch.steps is not None and bound >= batch.total_s * (1 - gap):
                break
            if searched is None:
                result = batches.search(high, batch.total_s - batches.constant_s - sum(low))
                if result is None:
                    continue
                extra, steps = result
                real = batches.bounds_of(steps)
                total = batches.constant_s + extra + sum(real)
                if total < batch.total_s:
                    batch.total_s, batch.steps = total, steps
                searched = extra, real
            for part in _split(low, high, searched):
                pushed += 1
                heapq.heappush(boxes, (batches.constant_s + searched[0] + sum(part[0]), pushed, *part))
        else:
            batch.bound_s = batch.total_s
    except OutOfTime:
        batch.finished = False
    except KeyboardInterrupt:
        batch.finished, batch.interrupted = False, True
    return batch


def _split(
    low: BatchBounds, high: BatchBounds, searched: tuple[float, BatchBounds]
) -> list[tuple[BatchBounds, BatchBounds, tuple[float, BatchBounds] | None]]:
    """Split a box along the bound that is farthest above its lower limit. The upper part needs no new search."""
    gaps = [max(0.0, real - least) for real, least in zip(searched[1], low, strict=True)]
    # In an unsearched box all bounds are as far from their limits; the steady part is what most depends on the plan.
    axes = range(len(gaps) - 1) if searched[1] == high and max(gaps[:-1]) > _CLOSE * high[0] else range(len(gaps))
    axis = max(axes, key=gaps.__getitem__)
    real, least = searched[1][axis], low[axis]
    middle = (real + least) / 2 if least < real * (1 - _CLOSE) else real * (1 - PRECISION / 2)
    if gaps[axis] <= real * PRECISION:
        return []
    below = (*high[:axis], middle, *high[axis + 1 :])
    above = (*low[:axis], middle, *low[axis + 1 :])
    return [(low, below, None), (above, high, searched)]
