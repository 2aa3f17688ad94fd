"""The fastest uniform grid without a memory limit.

The shape gives every stage's workers, so only the cuts are searched. V_s(J) is the smallest time of stages 1 … s for
the layers inside cut J. Stage s from cut I to cut J takes stage_s(I→J), and the boundary before it boundary_s(I):

    V_1(J) = stage_1(∅→J)        V_s(J) = min over I ⊂ J of max( V_{s-1}(I), boundary_s(I), stage_s(I→J) )

In the steady state, V of all stages and layers is the best step time of the grid. With a flush it is a lower bound on
the time of a batch. The bound counts the work of the layers before each stage, the work of the stage, and its exposed
all-reduce together with its own work or the path to the last stage.

The shapes of a task are searched one by one, the most promising first.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from pipeplan.cost import formulas
from pipeplan.cost.stage_table import CutStages
from pipeplan.plan.schedules import ACCUMULATING, TRAITS
from pipeplan.problem.cuts import Cuts, Flags, Floats, Ints
from pipeplan.problem.grid_shapes import GridShape, grid_shapes
from pipeplan.problem.problem import Problem
from pipeplan.solvers.dp.budget import Step
from pipeplan.solvers.dp.pipeline_searches import FoundPipeline, PipelineSearches
from pipeplan.solvers.dp.results import BestSoFar, SearchTask
from pipeplan.solvers.dp.search.cost_terms import CostTerms
from pipeplan.solvers.dp.threshold import BisectionResult
from pipeplan.solvers.plan_space import plan_spaces
from pipeplan.util.deadline import Deadline

MOST_CUTS = 1500
"""Largest number of cuts for which trying all pairs is faster than a search."""
PAIRS = 50
"""Number of pairs of cuts that take as long as one row of a search."""


@dataclass
class UniformGrids:
    """The uniform grids of a problem."""

    terms: CostTerms
    """The terms of the cost model without a memory limit, on all cuts."""
    _known: dict[tuple[float, ...], Floats] = field(default_factory=dict)

    def floor(self, shape: GridShape) -> float:
        """Lower bound on the step time of a shape: the time of all work on all workers, or of the costliest unit on its
        replicas."""
        problem = self.terms.problem
        largest = max(unit.forward_s + unit.backward_s for unit in problem.units)
        if problem.cluster.uniform:
            return max(problem.work_s / shape.workers, largest / shape.replicas) / problem.cluster.device.speed
        speeds = [device.speed for device in problem.cluster.devices[: shape.workers]]
        return max(problem.work_s / sum(speeds), largest / shape.replicas / max(speeds))

    @property
    def has_few_cuts(self) -> bool:
        """Whether there are few enough cuts to try all pairs of cuts."""
        return len(self.terms.cuts.ideals) <= MOST_CUTS

    @property
    def exact(self) -> bool:
        """Whether `least_step_time` finds a plan, and not only a bound.

        A plan is found if no layer is pinned and depths do not matter.
        """
        options = self.terms.problem.options
        return not options.pins and not options.flushes and self.terms.accumulate is None

    def rows(self, shape: GridShape) -> float:
        """Cost of trying all pairs of cuts, stage by stage, in rows of a search."""
        return len(self.terms.cuts.ideals) ** 2 * shape.stages / PAIRS

    def least_step_time(self, shape: GridShape) -> tuple[float, list[Step]]:
        """The smallest step time of a shape without a memory limit, and its steps; only a bound if not `exact`."""
        values, choices = self._stage_s(shape, 0)[0], []
        for stage in range(1, shape.stages):
            before = np.maximum(values, self._boundary_s(shape, stage))[:, None]
            through = np.maximum(before, self._stage_s(shape, stage))
            choices.append(through.argmin(axis=0))
            values = through.min(axis=0)
        return float(values[-1]) / minibatches_of(self.terms.problem), steps_of(shape, choices)

    def stage(self, shape: GridShape, stage: int) -> tuple[float, ...]:
        """(replicas, speed, bandwidth and latency of the all-reduce) of a stage of a shape."""
        first, end = stage * shape.replicas, (stage + 1) * shape.replicas
        speed = self.terms.problem.cluster.speed_of(range(first, end))
        return shape.replicas, speed, *self.terms.links.allreduce_among(range(first, end))

    def hop(self, shape: GridShape, stage: int) -> tuple[float, float, int]:
        """(bandwidth, latency, number) of the links before a stage."""
        both = range((stage - 1) * shape.replicas, (stage + 1) * shape.replicas)
        return *self.terms.links.sendrecv_among(both), shape.replicas if self.terms.parallel else 1

    def _stage_s(self, shape: GridShape, stage: int) -> Floats:
        """The time of a stage from cut I (rows) to cut J (columns); infinite unless I ⊂ J."""
        key = self.stage(shape, stage)
        if key not in self._known:
            self._known[key] = np.where(self.nested, self._all_stages_s(*key), np.inf)
        return self._known[key]

    def _all_stages_s(self, replicas: float, speed: float, bandwidth: float, latency_s: float) -> Floats:
        """The time of a stage from every cut (rows) to every cut (columns), nested or not."""
        options, terms, stages = self.terms.problem.options, self.terms, self.stages
        allreduce = formulas.ring_allreduce_time(replicas, stages.parameters * terms.training, bandwidth, latency_s)
        if options.flushes and options.accumulate is not None:
            own = formulas.flush_busy(stages.passes_s / speed, options.accumulate, int(replicas))
            waited = stages.waited_s(allreduce, speed)
            return np.asarray(own + np.maximum(waited, self.ahead_s[:, None] - stages.tail_s / speed))
        shared = options.accumulate if terms.training and options.schedule in ACCUMULATING else None
        compute = formulas.compute_time(stages.work_s, replicas, speed)
        synchronisation = allreduce / (shared or replicas) * terms.training
        return np.asarray(formulas.overlapped(compute, synchronisation, options.overlap))

    @cached_property
    def stages(self) -> CutStages:
        """The stages from every cut (rows) to every cut (columns), nested or not."""
        cuts = np.arange(len(self.terms.cuts.ideals))
        return CutStages(self.terms.problem, self.terms.cuts, cuts[:, None], cuts[None, :], shared=self.terms.shared)

    @cached_property
    def ahead_s(self) -> Floats:
        """For each cut, the least time by which the layers inside delay the stages behind it, with a flush."""
        cuts, splits = self.terms.cuts, TRAITS[self.terms.schedule].splits
        fastest = max(device.speed for device in {*self.terms.problem.cluster.devices})
        return np.asarray((cuts.forward_s if splits else cuts.work_s - cuts.update_s) / fastest)

    def _boundary_s(self, shape: GridShape, stage: int) -> Floats:
        """The time of the boundary before a stage, for every cut."""
        cuts, options = self.terms.cuts, self.terms.problem.options
        bandwidth, _, links = self.hop(shape, stage)
        size = np.maximum(cuts.sent, cuts.returned)
        if options.flushes and options.accumulate is not None:
            busy = formulas.flush_busy(size / bandwidth, options.accumulate, links)
            return np.asarray(busy * (not options.contention))
        return np.asarray(formulas.boundary_time(size, bandwidth, links))

    @cached_property
    def nested(self) -> Flags:
        """Whether a cut (rows) is a proper subset of another cut (columns)."""
        cuts = self.terms.cuts
        nested = np.triu(np.ones((len(cuts.ideals),) * 2, dtype=bool), 1)
        if not cuts.chain:
            for end in range(len(cuts.ideals)):
                nested[:, end] = False
                nested[cuts.smaller(end), end] = True
        return nested


def minibatches_of(problem: Problem) -> int:
    """The number of minibatches that the solvers' times refer to: the minibatches of a batch with a flush, else one."""
    return problem.options.accumulate or 1 if problem.options.flushes else 1


def steps_of(shape: GridShape, choices: list[Ints]) -> list[Step]:
    """The steps (stages with their cuts) of a shape of a grid.

    For each stage except the first, `choices` gives the cut where the stage begins, by the cut where it ends."""
    ends = [-1]
    for choice in reversed(choices):
        ends.insert(0, int(choice[ends[0]]))
    starts = [0, *ends[:-1]]
    return [
        Step(start, end, stage * shape.replicas, shape.replicas, 1, False)
        for stage, (start, end) in enumerate(zip(starts, ends, strict=True))
    ]


def search_grids(task: SearchTask) -> BestSoFar:
    """Search all shapes of a uniform grid, each for plans that are faster than the best plan so far."""
    space, so_far = plan_spaces(task.problem)[0], BestSoFar(task)
    try:
        searches = PipelineSearches(
            task.problem, task.cuts, task.deadline, task.gap, near=task.near, effort=task.effort
        )
        for result in _shape_results(searches, lambda: so_far.limit_s):
            so_far.add(space, result)
            task.report(0.0, so_far.step_time_s)
    except KeyboardInterrupt:
        so_far.stop(0.0)
    return so_far


def _shape_results(searches: PipelineSearches, below: Callable[[], float]) -> Iterator[BisectionResult[FoundPipeline]]:
    """Results for the shapes of a uniform grid in the order of their bounds, until a bound reaches `below()`."""
    grids, per_update = UniformGrids(searches.unlimited), minibatches_of(searches.problem)
    shapes_of = enumerate(filter(searches.unlimited.has_minibatches_for, grid_shapes(searches.problem)))
    waiting = [(grids.floor(shape), number, shape, _bounds(searches, grids, shape)) for number, shape in shapes_of]
    heapq.heapify(waiting)
    interrupted = False
    while waiting:
        bound, number, shape, tighter = heapq.heappop(waiting)
        limit = below()
        if bound >= limit:
            return
        if interrupted or searches.effort.over or Deadline(searches.deadline).passed:
            yield BisectionResult(bound * per_update, finished=False, interrupted=interrupted)
            return
        bound_or_grid = next(tighter)
        if isinstance(bound_or_grid, float):
            heapq.heappush(waiting, (max(bound, bound_or_grid), number, shape, tighter))
        else:
            result = searches.for_shape(shape, bound * per_update, limit * per_update, bound_or_grid).best()
            interrupted = result.interrupted
            yield result


def _bounds(
    searches: PipelineSearches, grids: UniformGrids, shape: GridShape
) -> Iterator[float | BisectionResult[FoundPipeline] | None]:
    """Increasing bounds on the step time of a shape, and last, if known, its best plan without a memory limit."""
    if not grids.has_few_cuts:
        yield None
        return
    searches.effort.spent += grids.rows(shape)
    least, steps = grids.least_step_time(shape)
    yield least
    if grids.exact:
        yield BisectionResult(least, least, FoundPipeline(grids.terms, steps))
    else:
        yield None


def shape_floors(problem: Problem, cuts: Cuts) -> Iterator[tuple[GridShape, float]]:
    """The shapes of a uniform grid with lower bounds on their step times, the most promising first."""
    grids = UniformGrids(PipelineSearches(problem, cuts).unlimited)
    floors = [
        (shape, grids.least_step_time(shape)[0] if grids.has_few_cuts else grids.floor(shape))
        for shape in grid_shapes(problem)
    ]
    yield from sorted(floors, key=lambda entry: entry[1])
