"""The fastest uniform grid without a memory limit. The shape gives every stage's workers, so only the cuts are open.

The least time over stages s and cuts J follows from the time of a stage from cut I to cut J on the workers of s, and
from that of the boundary before it:

    V_1(J) = stage_1(∅→J)        V_s(J) = min over I ⊂ J of max( V_{s-1}(I), boundary_s(I), stage_s(I→J) )

In the steady state V is the best pace of the grid. With a flush it is a lower bound on the steady part of a batch plus
the all-reduce that the same stage exposes, on top of the work of all layers. `fastest_grid_batch` then finds the
fastest batch by the branch and bound of `flush_search`, with a search over all pairs of cuts, stage by stage.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from pipeplan.cost import formulas
from pipeplan.plan.schedules import ACCUMULATING, GPIPE
from pipeplan.problem.cuts import Flags, Floats, Ints
from pipeplan.problem.grid_shapes import GridShape
from pipeplan.problem.problem import Problem
from pipeplan.solvers.dp import flush_search
from pipeplan.solvers.dp.budget import SLACK, SearchEffort, Step, limits_of
from pipeplan.solvers.dp.choose_search import batch_objective
from pipeplan.solvers.dp.flush_search import BatchBounds, BatchObjective
from pipeplan.solvers.dp.stage_costs import CostTerms

MOST_CUTS = 1500
"""The most cuts for which going over all their pairs is faster than a search."""
PAIRS = 50
"""Pairs of cuts that take as long as one row of a search."""


@dataclass
class UniformGrids:
    """The uniform grids of a problem."""

    terms: CostTerms
    """The terms of the cost model without a memory limit, on all cuts."""
    _known: dict[tuple[float, ...], Floats] = field(default_factory=dict)

    def floor(self, shape: GridShape) -> float:
        """Lower bound on the pace of a shape: all work on all workers, and the costliest unit on its replicas."""
        problem = self.terms.problem
        largest = max(unit.forward_s + unit.backward_s for unit in problem.units)
        if problem.cluster.uniform:
            return max(problem.work_s / shape.workers, largest / shape.replicas) / problem.cluster.device.speed
        speeds = [device.speed for device in problem.cluster.devices[: shape.workers]]
        return max(problem.work_s / sum(speeds), largest / shape.replicas / max(speeds))

    @property
    def has_few_cuts(self) -> bool:
        """Whether the cuts are few enough to go over all their pairs."""
        return len(self.terms.cuts.ideals) <= MOST_CUTS

    @property
    def exact(self) -> bool:
        """Whether `least_pace` finds a plan, not only a bound: no layer is pinned, and depths do not matter."""
        options = self.terms.problem.options
        return not options.pins and not options.flushes and self.terms.accumulate is None

    @property
    def exact_batches(self) -> bool:
        """Whether `fastest_grid_batch` finds the fastest batch."""
        options = self.terms.problem.options
        return options.flushes and not options.pins

    def rows(self, shape: GridShape) -> float:
        """Effort of going over all pairs of cuts, stage by stage, in rows of a search."""
        return len(self.terms.cuts.ideals) ** 2 * shape.stages / PAIRS

    def least_pace(self, shape: GridShape) -> tuple[float, list[Step]]:
        """The least pace of a shape without a memory limit, and its steps; only a bound where not `exact`."""
        values, choices = self._stage_s(shape, 0)[0], []
        for stage in range(1, shape.stages):
            before = np.maximum(values, self._boundary_s(shape, stage))[:, None]
            through = np.maximum(before, self._stage_s(shape, stage))
            choices.append(through.argmin(axis=0))
            values = through.min(axis=0)
        return self._pace(shape, float(values[-1])), steps_of(shape, choices)

    def _pace(self, shape: GridShape, value: float) -> float:
        problem = self.terms.problem
        if not problem.options.flushes:
            return value
        fastest = max(problem.cluster.device_of(worker).speed for worker in range(shape.workers))
        return (problem.work_s / fastest + value) / minibatches_of(problem)

    def stage(self, shape: GridShape, stage: int) -> tuple[float, ...]:
        """Replicas and speed of a stage of a shape, and bandwidth and latency of its all-reduce."""
        first, end = stage * shape.replicas, (stage + 1) * shape.replicas
        speed = self.terms.problem.cluster.speed_of(range(first, end))
        return shape.replicas, speed, *self.terms.links.allreduce_among(range(first, end))

    def hop(self, shape: GridShape, stage: int) -> tuple[float, float, int]:
        """Bandwidth, latency and number of the links before a stage."""
        both = range((stage - 1) * shape.replicas, (stage + 1) * shape.replicas)
        return *self.terms.links.sendrecv_among(both), shape.replicas if self.terms.parallel else 1

    def _stage_s(self, shape: GridShape, stage: int) -> Floats:
        """The time of a stage from one cut I (rows) to another J (columns), infinite unless I ⊂ J."""
        key = self.stage(shape, stage)
        if key not in self._known:
            self._known[key] = np.where(self.nested, self._all_stages_s(*key), np.inf)
        return self._known[key]

    def _all_stages_s(self, replicas: float, speed: float, bandwidth: float, latency_s: float) -> Floats:
        """The time of a stage from every cut (rows) to every cut (columns), nested or not."""
        options, terms = self.terms.problem.options, self.terms
        work, allreduce = self.work_s, self.allreduce_s(replicas, bandwidth, latency_s)
        if options.flushes and options.accumulate is not None:
            steady = formulas.flush_steady(work / speed, options.accumulate, int(replicas))
            return np.asarray(steady + self.exposed_s(allreduce))
        shared = options.accumulate if terms.training and options.schedule in ACCUMULATING else None
        compute = formulas.compute_time(work, replicas, speed)
        return np.asarray(formulas.overlapped(compute, allreduce / (shared or replicas), options.overlap))

    @cached_property
    def executor_s(self) -> Floats:
        """The executor's own work at the stage from one cut (rows) to another (columns)."""
        cuts = np.arange(len(self.terms.cuts.ideals))
        return self.terms.executor_s(cuts[None, :], cuts[:, None])

    @cached_property
    def work_s(self) -> Floats:
        """Compute of one minibatch, from one cut (rows) to another (columns), with the executor's own work."""
        return self.between(self.terms.cuts.work_s) + self.executor_s

    def between(self, totals: Floats) -> Floats:
        """A quantity that adds up over units, from one cut (rows) to another (columns)."""
        return totals[None, :] - totals[:, None]

    def allreduce_s(self, replicas: float, bandwidth: float, latency_s: float) -> Floats:
        """Seconds of one all-reduce of every stage among so many replicas."""
        if not self.terms.training:
            return np.zeros((len(self.terms.cuts.ideals),) * 2)
        size, shared = self.between(self.terms.cuts.parameters), self.terms.shared
        if shared is not None:
            size = size + np.where(self.nested, shared.copied(*self._ends), 0.0)
        return np.asarray(formulas.ring_allreduce_time(replicas, size, bandwidth, latency_s))

    @property
    def _ends(self) -> tuple[Ints, Ints]:
        """The cuts at which every stage starts and ends, from every cut (rows) to every cut (columns)."""
        starts, ends = np.indices((len(self.terms.cuts.ideals),) * 2)
        return starts, ends

    def exchange_s(self) -> Floats:
        """Seconds that every stage is charged for exchanging the gradients of shared weights."""
        shared, count = self.terms.shared, len(self.terms.cuts.ideals)
        if shared is None:
            return np.zeros((count, count))
        return np.where(self.nested, shared.exchanged_s(*self._ends), 0.0)

    def exposed_s(self, allreduce: Floats) -> Floats:
        """The part of an all-reduce that a flush waits for."""
        fastest = max(device.speed for device in {*self.terms.problem.cluster.devices})
        return np.asarray(formulas.flush_exposed(allreduce, self.terms.cuts.work_s[:, None] / fastest))

    def _boundary_s(self, shape: GridShape, stage: int) -> Floats:
        """The time of the boundary before a stage, by cut."""
        cuts, options = self.terms.cuts, self.terms.problem.options
        bandwidth, _, links = self.hop(shape, stage)
        both_ways = options.flushes and options.schedule == GPIPE
        size = cuts.sent + cuts.returned if both_ways else np.maximum(cuts.sent, cuts.returned)
        if options.flushes and options.accumulate is not None:
            return np.asarray(formulas.flush_steady(size / bandwidth, options.accumulate, links))
        return np.asarray(formulas.boundary_time(size, bandwidth, links))

    @cached_property
    def nested(self) -> Flags:
        """Whether a cut (rows) is a proper subset of another (columns)."""
        cuts = self.terms.cuts
        nested = np.triu(np.ones((len(cuts.ideals),) * 2, dtype=bool), 1)
        if not cuts.chain:
            for end in range(len(cuts.ideals)):
                nested[:, end] = False
                nested[cuts.smaller(end), end] = True
        return nested


def minibatches_of(problem: Problem) -> int:
    """The number of minibatches that the solvers' times refer to: those of a batch with a flush, else one."""
    return problem.options.accumulate or 1 if problem.options.flushes else 1


def steps_of(shape: GridShape, choices: list[Ints]) -> list[Step]:
    """The steps of a shape; `choices` gives, for each stage but the first and each end cut, the cut where it begins."""
    ends = [-1]
    for choice in reversed(choices):
        ends.insert(0, int(choice[ends[0]]))
    starts = [0, *ends[:-1]]
    return [
        Step(start, end, stage * shape.replicas, shape.replicas, 1, False)
        for stage, (start, end) in enumerate(zip(starts, ends, strict=True))
    ]


@dataclass
class GridBatchObjective:
    """Batch times of one shape; `batches` scores the pipelines found."""

    grids: UniformGrids
    shape: GridShape
    batches: BatchObjective

    @property
    def terms(self) -> CostTerms:
        """The terms of the cost model without a memory limit."""
        return self.batches.terms

    @property
    def minibatches(self) -> int:
        """Minibatches of one update."""
        return self.batches.minibatches

    @property
    def directions(self) -> int:
        """The number of bounds on the steady part."""
        return self.batches.directions

    @property
    def constant_s(self) -> float:
        """The part that all batches have in common, in seconds."""
        return self.batches.constant_s

    def bounds_of(self, steps: list[Step]) -> BatchBounds:
        """The bounds that a pipeline meets."""
        return self.batches.bounds_of(steps)

    def search(self, bounds: BatchBounds, most_added_s: float = math.inf) -> tuple[float, list[Step]] | None:
        """The least sum over stages under limits on the bounds, with a pipeline that reaches it, or None."""
        self.batches.limits.step(self.grids.rows(self.shape))
        limits = tuple(bound * (1 + SLACK) for bound in bounds)
        allowed: dict[tuple[float, ...], Floats] = {}
        values, choices = np.zeros(0), []
        for stage, key in enumerate(self._keys):
            if key not in allowed:
                allowed[key] = np.where(self._within(key, limits), self._added[key], np.inf)
            if stage == 0:
                values = allowed[key][0]
                continue
            through = (values + self._crossed(stage, limits))[:, None] + allowed[key]
            choices.append(through.argmin(axis=0))
            values = through.min(axis=0)
        added = float(values[-1])
        return (added, steps_of(self.shape, choices)) if np.isfinite(added) else None

    @cached_property
    def _keys(self) -> list[tuple[float, ...]]:
        return [self.grids.stage(self.shape, stage) for stage in range(self.shape.stages)]

    @cached_property
    def _added(self) -> dict[tuple[float, ...], Floats]:
        """A stage's part of the sum that depends on the plan: its own passes where devices differ, and the exchange of
        the gradients of shared weights."""
        work, exchange_s = self.grids.work_s, self.grids.exchange_s()
        uniform = self.terms.problem.cluster.uniform and not self.terms.parallel
        return {key: exchange_s + (self.grids.executor_s if uniform else work) / key[1] for key in self._keys}

    @cached_property
    def _bounded(self) -> dict[tuple[float, ...], list[Floats]]:
        """For every kind of stage, the times that each of the bounds limits."""
        cuts, bounded = self.terms.cuts, {}
        forward = self.grids.between(cuts.forward_s) + self.grids.executor_s / 2
        both = self.grids.work_s
        passes = (forward, both - forward) if self.directions == 2 else (both,)
        for key in self._keys:
            replicas, speed, *rate = key
            times = [formulas.flush_steady(time / speed, self.minibatches, int(replicas)) for time in passes]
            bounded[key] = [*times, self.grids.exposed_s(self.grids.allreduce_s(replicas, *rate))]
        return bounded

    def _within(self, key: tuple[float, ...], limits: BatchBounds) -> Flags:
        within = self.grids.nested
        for times, limit in zip(self._bounded[key], limits, strict=True):
            within = within & (times <= limit)
        return within

    def _crossed(self, stage: int, limits: BatchBounds) -> Floats:
        """The transfers both ways over the boundary before a stage, by cut; infinite where a bound is exceeded."""
        cuts, (bandwidth, latency_s, links) = self.terms.cuts, self.grids.hop(self.shape, stage)
        ways = cuts.sent / bandwidth, cuts.returned / bandwidth
        steady = ways if self.directions == 2 else (np.maximum(*ways),)
        within = np.ones(len(cuts.ideals), dtype=bool)
        for way, limit in zip(steady, limits[:-1], strict=True):
            within &= formulas.flush_steady(way, self.minibatches, links) <= limit
        return np.where(within, ways[0] + ways[1] + 2 * latency_s, np.inf)


def fastest_grid_batch(
    grids: UniformGrids, shape: GridShape, deadline: float | None, effort: SearchEffort
) -> flush_search.BatchResult:
    """The fastest batch of a shape that is found before the deadline and within the effort."""
    limits = limits_of(grids.terms.problem, memory=False, deadline=deadline, shape=shape, effort=effort)
    return flush_search.fastest_batch(GridBatchObjective(grids, shape, batch_objective(grids.terms, limits)))
