"""Searches the shapes of a uniform grid for one task, the most promising first."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

from pipeplan.problem.cuts import Cuts
from pipeplan.problem.grid_shapes import GridShape, grid_shapes
from pipeplan.problem.problem import Problem
from pipeplan.solvers.dp.pipelines.pipeline_searches import FoundPipeline, PipelineSearches
from pipeplan.solvers.dp.spaces.best_so_far import BestSoFar
from pipeplan.solvers.dp.spaces.grid import UniformGrids, minibatches_of
from pipeplan.solvers.dp.spaces.search_task import SearchTask
from pipeplan.solvers.dp.threshold import BisectionResult
from pipeplan.solvers.plan_space import plan_spaces
from pipeplan.util.deadline import Deadline


def search_grids(task: SearchTask) -> BestSoFar:
    """Search all shapes of a uniform grid, each for plans that are faster than the best before."""
    space, so_far = plan_spaces(task.problem)[0], BestSoFar(task)
    try:
        searches = PipelineSearches(
            task.problem, task.cuts, task.deadline, task.gap, near=task.near, effort=task.effort
        )
        for result in _shape_results(searches, lambda: so_far.limit_s):
            so_far.add(space, result)
            task.report(0.0, so_far.pace_s)
    except KeyboardInterrupt:
        so_far.stop(0.0)
    return so_far


def _shape_results(searches: PipelineSearches, below: Callable[[], float]) -> Iterator[BisectionResult[FoundPipeline]]:
    """Results for the shapes of a uniform grid in the order of their bounds, until a bound is no longer `below()`."""
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
    """Ever better bounds on the pace of a shape, and last, if known, its best plan without a memory limit."""
    if not grids.has_few_cuts:
        yield None
        return
    searches.effort.spent += grids.rows(shape)
    least, steps = grids.least_pace(shape)
    yield least
    if grids.exact:
        yield BisectionResult(least, least, FoundPipeline(grids.terms, steps))
    else:
        yield None


def shape_floors(problem: Problem, cuts: Cuts) -> Iterator[tuple[GridShape, float]]:
    """The shapes of a uniform grid with lower bounds on their paces, the most promising first."""
    grids = UniformGrids(PipelineSearches(problem, cuts).unlimited)
    floors = [
        (shape, grids.least_pace(shape)[0] if grids.has_few_cuts else grids.floor(shape))
        for shape in grid_shapes(problem)
    ]
    yield from sorted(floors, key=lambda entry: entry[1])
