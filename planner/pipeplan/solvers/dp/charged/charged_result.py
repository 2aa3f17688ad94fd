"""The result with everything charged, from what the searches without shared resources have found and proven."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from pipeplan.cost import contention
from pipeplan.plan.plan import Plan
from pipeplan.solvers.dp.charged.charged_pipelines import MOST_PLACEMENTS, ChargedPipelines, charges
from pipeplan.solvers.dp.pipelines.pipeline_searches import PipelineSearches
from pipeplan.solvers.dp.spaces.best_so_far import BestSoFar, Region
from pipeplan.solvers.dp.spaces.results import alone_result, found_result, plan_of
from pipeplan.solvers.dp.spaces.search_grids import shape_floors
from pipeplan.solvers.dp.spaces.search_task import SearchTask
from pipeplan.solvers.dp.threshold import BisectionResult
from pipeplan.solvers.passed_components import PassedLevel, passed_levels, without_straddling
from pipeplan.solvers.plan_space import plan_spaces
from pipeplan.solvers.result import Result, Status


def charged_result(task: SearchTask, alone: BestSoFar) -> Result:
    """The result of a task with everything charged; `alone` has the bounds and the best plan without shared resources.

    With `task.near` that plan is probably the best.
    """
    note = f"what workers share is charged exactly where a stage has at most {MOST_PLACEMENTS:,} places"
    exact = charges(task.problem)
    if task.price is None and not exact:
        return replace(alone_result(task, alone), note=note)
    levels = passed_levels(task.problem, task.cuts)
    if alone.finished and alone.regions:
        least_s = max((one.bound_s for one in levels), default=0.0)
        raised = [replace(one, low_s=max(one.low_s, least_s * (one.space.copies == 1))) for one in alone.regions]
        alone = replace(alone, regions=raised, bound=max(alone.bound, min(one.low_s for one in raised)))
    if exact:
        result = _searched(task, alone)
    else:
        assert task.price is not None
        result = _best_of_few(task, alone, levels, task.price)
        result = replace(result, note="" if result.status == Status.OPTIMAL else note)
    return replace(result, charged=True)


def _searched(task: SearchTask, alone: BestSoFar) -> Result:
    """The result of a search that goes on from the bounds without shared resources."""
    assert alone.best is not None
    problem, (pace, space, pipeline) = task.problem, alone.best
    bound = max(alone.bound, task.above_s, contention.least_pace_of_shared_cores_s(problem))
    searches = ChargedPipelines(task, alone.memory_binds)
    known = searches.charge(Region(space, None, bound), pipeline, pace)
    interval = BisectionResult(bound, known.pace_s, known, alone.finished, alone.interrupted, task.gap)
    if alone.finished and not interval.closed:
        regions = alone.regions
        if problem.options.grid:
            regions = [Region(space, shape, low) for shape, low in shape_floors(problem, task.cuts)]
        try:
            interval = searches.best([replace(one, low_s=max(one.low_s, bound)) for one in regions], known)
        except KeyboardInterrupt:
            interval = replace(interval, finished=False, interrupted=True)
    assert interval.best is not None
    best = interval.best
    plan = plan_of(problem, best.region.space, best.pipeline.stages(), best.pace_s)
    ends = BisectionResult(interval.low, interval.high, plan, interval.finished, interval.interrupted)
    return found_result(task, ends)


def _best_of_few(
    task: SearchTask, alone: BestSoFar, levels: list[PassedLevel], price: Callable[[Plan], float]
) -> Result:
    """The best of a few plans with everything charged: the best one without, and those without stages that straddle."""
    assert alone.best is not None
    problem, (pace_s, space, pipeline) = task.problem, alone.best
    plans = [plan_of(problem, space, pipeline.stages(), pace_s)]
    finished, interrupted = alone.finished, alone.interrupted
    single = plan_spaces(problem)[0]
    searches_levels = single.copies == 1 and not problem.options.grid
    for one in levels if searches_levels else []:
        if interrupted or one.bound_s <= pace_s:
            continue
        kept = without_straddling(problem, one.level)
        inner = PipelineSearches(kept, task.cuts, task.deadline, task.gap, above=one.crossing_s, effort=task.effort)
        found = inner.best()
        interrupted = interrupted or found.interrupted
        if found.best is not None:
            plans.append(plan_of(problem, single, found.best.stages(), max(found.high, one.crossing_s)))
    paces = [price(plan) for plan in plans]
    best_s = min(paces)
    best = plans[paces.index(best_s)]
    return found_result(task, BisectionResult(min(alone.bound, best_s), best_s, best, finished, interrupted))
