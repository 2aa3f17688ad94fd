"""Exact dynamic programming over cuts: the fastest pipeline on consecutive workers, some of which may stay idle.

A search over cuts decides whether any pipeline keeps within a threshold, and bisection finds the least threshold for
which one does. The first bisection ignores memory, so that depths do not matter and many cuts can be left out. If its
plan fits in memory, it is the best of all. Otherwise a second bisection continues upwards from its pace, with the
memory limit and with recomputation where that is allowed.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from pipeplan.cost import depths
from pipeplan.plan.plan import Plan, Stage
from pipeplan.problem.cuts import Cuts
from pipeplan.problem.grid_shapes import GridShape, grid_shapes
from pipeplan.problem.problem import Problem
from pipeplan.solvers.dp import threshold
from pipeplan.solvers.dp.budget import SearchEffort
from pipeplan.solvers.dp.grid import UniformGrids, fastest_grid_batch, minibatches_of
from pipeplan.solvers.dp.pipeline_searches import FoundPipeline, PipelineSearches
from pipeplan.solvers.dp.threshold import PRECISION, BisectionResult
from pipeplan.solvers.plan_space import PlanSpace, plan_spaces
from pipeplan.solvers.result import Result, Status


@dataclass
class _BestSoFar:
    """The best plan and the bound of all searches so far."""

    best: tuple[float, PlanSpace, list[Stage]] | None = None
    bound: float = float("inf")
    finished: bool = True
    interrupted: bool = False
    report: Callable[[float, float], None] = lambda bound, best: None
    """Is called with the bound and the pace of the best plan as they change; infinite while there is no plan."""

    def watch(self, problem: Problem, space: PlanSpace, others_s: float) -> Callable[[float, float], None]:
        """The function that reports the search of one space; `others_s` bounds the spaces that are still to search."""

        def report(low: float, high: float) -> None:
            best = min(space.pace(problem, high), self.best[0] if self.best else float("inf"))
            self.report(min(space.pace(problem, low), self.bound, others_s), best)

        return report

    def stop(self, bound_s: float) -> None:
        """Leave out a space of plans whose paces are at least so many seconds, because Ctrl-C came."""
        self.finished, self.interrupted = False, True
        self.bound = min(self.bound, bound_s)

    def add(self, problem: Problem, space: PlanSpace, result: BisectionResult[FoundPipeline]) -> None:
        """Take in the result of one more search."""
        self.finished, self.interrupted = self.finished and result.finished, self.interrupted or result.interrupted
        if result.best is not None or not result.finished:
            self.bound = min(self.bound, space.pace(problem, result.low))
        if result.best is None:
            return
        if self.best is None or space.pace(problem, result.high) < self.best[0] * (1 - PRECISION):
            self.best = space.pace(problem, result.high), space, result.best.stages()


def _search_spaces(
    problem: Problem, cuts: Cuts, deadline: float | None, gap: float, effort: SearchEffort, so_far: _BestSoFar
) -> None:
    """Search all spaces of plans, one after another."""
    spaces = plan_spaces(problem)
    floors = [max(problem.work_s / problem.cluster.total_speed, space.synchronisation(problem)) for space in spaces]
    for number, space in enumerate(spaces):
        if so_far.best is not None and space.synchronisation(problem) >= so_far.best[0]:
            continue
        if so_far.interrupted:
            so_far.stop(space.pace(problem, 0.0))
            continue
        report = so_far.watch(problem, space, min(floors[number + 1 :], default=float("inf")))
        try:
            searches = PipelineSearches(space.inner(problem), cuts, deadline, gap, effort=effort, report=report)
            so_far.add(problem, space, searches.best())
        except KeyboardInterrupt:
            so_far.stop(space.pace(problem, 0.0))


def _search_grids(
    problem: Problem, cuts: Cuts, deadline: float | None, gap: float, effort: SearchEffort, so_far: _BestSoFar
) -> None:
    """Search all shapes of a uniform grid, each for plans that are faster than the best before."""
    space = plan_spaces(problem)[0]

    def below() -> float:
        return float("inf") if so_far.best is None else so_far.best[0] * (1 - PRECISION)

    try:
        for result in _shape_results(PipelineSearches(problem, cuts, deadline, gap, effort=effort), below):
            so_far.add(problem, space, result)
            so_far.report(0.0, so_far.best[0] if so_far.best else float("inf"))
    except KeyboardInterrupt:
        so_far.stop(0.0)


def best_uniform_grid(
    problem: Problem,
    cuts: Cuts,
    score: Callable[[Plan], float],
    deadline: float | None = None,
    effort: SearchEffort | None = None,
) -> Plan | None:
    """The plan with the least score among the best plans of every shape of a uniform grid; None if there is none.

    The score must not be less than the pace that the solvers minimise. The search ends with the best so far at the
    deadline (by `time.perf_counter`) or when the effort is spent. Raises `KeyboardInterrupt` on Ctrl-C.
    """
    best, least, space = None, float("inf"), plan_spaces(problem)[0]

    def below() -> float:
        return least * (1 - PRECISION)

    for result in _shape_results(PipelineSearches(problem, cuts, deadline, effort=effort or SearchEffort()), below):
        if result.interrupted:
            raise KeyboardInterrupt
        if result.best is not None:
            plan = _plan(problem, space, result.best.stages(), space.pace(problem, result.high))
            if (value := score(plan)) < least:
                best, least = plan, value
    return best


def _shape_results(searches: PipelineSearches, below: Callable[[], float]) -> Iterator[BisectionResult[FoundPipeline]]:
    """Results for the shapes of a uniform grid in the order of their bounds, until a bound is no longer `below()`."""
    grids, per_update = UniformGrids(searches.unlimited), minibatches_of(searches.problem)
    shapes_of = enumerate(grid_shapes(searches.problem))
    waiting = [(grids.floor(shape), number, shape, _bounds(searches, grids, shape)) for number, shape in shapes_of]
    heapq.heapify(waiting)
    interrupted = False
    while waiting:
        bound, number, shape, tighter = heapq.heappop(waiting)
        limit = below()
        if bound >= limit:
            return
        if interrupted or searches.effort.over or threshold.passed(searches.deadline):
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
    elif grids.exact_batches:
        batch = fastest_grid_batch(grids, shape, searches.deadline, searches.effort)
        yield batch.bound_s / minibatches_of(searches.problem)
        pipeline = None if batch.steps is None else FoundPipeline(grids.terms, batch.steps)
        yield BisectionResult(batch.bound_s, batch.total_s, pipeline, batch.finished, batch.interrupted)
    else:
        yield None


def is_feasible(problem: Problem, cuts: Cuts, deadline: float | None = None) -> bool:
    """Whether any plan satisfies the constraints, however slow.

    Raises `OutOfTime` where that is not known at the deadline (by `time.perf_counter`).
    """
    searches = [PipelineSearches(space.inner(problem), cuts, deadline) for space in plan_spaces(problem)]
    if problem.options.grid:
        searches = [searches[0].for_shape(shape) for shape in grid_shapes(problem)]
    return any(search.feasible() for search in searches)


def solve(
    problem: Problem,
    cuts: Cuts,
    seconds: float | None = None,
    gap: float = 0.0,
    report: Callable[[float, float], None] = lambda bound, best: None,
) -> Result:
    """The best plan over all spaces of plans, proven optimal by a search just below its pace that finds nothing.

    A time limit in `seconds`, a relative `gap`, or Ctrl-C ends the search with the best plan so far and the bound
    reached. `report` is called with the bound and the pace of the best plan, in seconds per minibatch, as they change.
    """
    began, deadline, effort = time.perf_counter(), threshold.deadline(seconds), SearchEffort()
    # A bound on a selection of the cuts holds for no other cuts.
    so_far = _BestSoFar(report=report if cuts.complete else lambda bound, best: report(0.0, best))
    search = _search_grids if problem.options.grid else _search_spaces
    search(problem, cuts, deadline, gap, effort, so_far)
    result = _result(problem, cuts, so_far, began)
    return replace(result, effort=effort.spent)


def _result(problem: Problem, cuts: Cuts, so_far: _BestSoFar, began: float) -> Result:
    """The result of the searches, with the proven bound."""
    best, bound, finished, interrupted = so_far.best, so_far.bound, so_far.finished, so_far.interrupted
    floor = problem.work_s / problem.cluster.total_speed
    note = "the requested gap was reached" if finished else "the search ended before it could prove this plan optimal"
    if not cuts.complete:
        bound, note = floor, f"the search covered {len(cuts.ideals)} of the graph's cuts, not all of them"
    proven = finished and cuts.complete
    seconds = time.perf_counter() - began
    if best is None:
        status = Status.INFEASIBLE if proven else Status.TIME_LIMIT
        least = float("inf") if proven else max(floor, bound if bound < float("inf") else 0.0)
        return Result("DP", status, None, float("inf"), least, seconds, note, interrupted=interrupted)
    pace, space, stages = best
    plan = _plan(problem, space, stages, pace)
    if proven and bound >= pace * (1 - 4 * PRECISION):
        return Result("DP", Status.OPTIMAL, plan, pace, pace, seconds)
    return Result(
        "DP", Status.FEASIBLE, plan, pace, min(max(bound, floor), pace), seconds, note, interrupted=interrupted
    )


def _plan(problem: Problem, space: PlanSpace, stages: list[Stage], pace_s: float) -> Plan:
    # The pace may lie just where a depth changes: rounding in another order must not ask for one minibatch more.
    return depths.assign_depths(space.plan(problem, stages), problem, pace_s * (1 + 1e-12))
