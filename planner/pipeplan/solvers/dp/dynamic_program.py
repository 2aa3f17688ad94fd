"""Exact dynamic programming over cuts: the fastest pipeline on consecutive workers, some of which may stay idle.

A search over cuts decides whether any pipeline keeps within a threshold, and bisection finds the least threshold for
which one does. The first bisection ignores memory, so that depths do not matter and many cuts can be left out. If its
plan fits in memory, it is the best of all. Otherwise a second bisection continues upwards from its pace, with the
memory limit and with recomputation where that is allowed.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from pipeplan.cost import contention, depths
from pipeplan.errors import InputError
from pipeplan.plan.plan import Plan, Stage
from pipeplan.plan.schedules import ACCUMULATING, VERTICAL, VIRTUAL
from pipeplan.problem.cuts import Cuts
from pipeplan.problem.grid_shapes import GridShape, grid_shapes
from pipeplan.problem.problem import Problem
from pipeplan.solvers.dp.budget import SearchEffort
from pipeplan.solvers.dp.charged.charged_pipelines import MOST_PLACEMENTS, ChargedPipelines, Region, charges
from pipeplan.solvers.dp.pipelines.pipeline_searches import FoundPipeline, PipelineSearches
from pipeplan.solvers.dp.spaces.batch_spaces import BatchSpaces
from pipeplan.solvers.dp.spaces.first_plan import (
    FirstPlan,
    MonotoneReport,
    first_plan,
    least_pace_alone_s,
    least_pace_s,
)
from pipeplan.solvers.dp.spaces.grid import UniformGrids, minibatches_of
from pipeplan.solvers.dp.threshold import PRECISION, BisectionResult
from pipeplan.solvers.known_answers import KNOWN, question_of
from pipeplan.solvers.passed_components import PassedLevel, passed_levels, without_straddling
from pipeplan.solvers.plan_space import PlanSpace, plan_spaces
from pipeplan.solvers.result import Result, Status
from pipeplan.util.deadline import Deadline


@dataclass
class _BestSoFar:
    """The best plan and the bound of all searches so far."""

    best: tuple[float, PlanSpace, FoundPipeline] | None = None
    bound: float = float("inf")
    finished: bool = True
    interrupted: bool = False
    regions: list[Region] = field(default_factory=list)
    """The spaces of plans, each with its own bound."""
    report: Callable[[float, float], None] = lambda bound, best: None
    """Is called with the bound and the pace of the best plan as they change; infinite while there is no plan."""
    memory_binds: bool = False
    """Whether the best plan would be faster without the memory limit."""
    useful_s: float = float("inf")
    """Plans with at least this pace are of no use."""
    near: bool = False
    """Whether the best plan is probably just fast enough to be of use, or not quite."""

    @property
    def limit_s(self) -> float:
        """The pace that a plan has to beat, in seconds per minibatch."""
        return self.useful_s if self.best is None else min(self.useful_s, self.best[0] * (1 - PRECISION))

    def watch(self, problem: Problem, space: PlanSpace, others_s: float) -> Callable[[float, float], None]:
        """The function that reports the search of one space; `others_s` bounds the spaces that are still to search."""

        def report(low: float, high: float) -> None:
            best = min(space.pace(problem, high), self.best[0] if self.best else float("inf"))
            self.report(min(space.pace(problem, low), self.bound, others_s), best)

        return report

    def excludes(self, bound_s: float) -> bool:
        """Whether a space of plans with paces of at least so many seconds has none that is of use."""
        return bound_s >= self.useful_s or (self.best is not None and bound_s >= self.best[0])

    def stop(self, bound_s: float) -> None:
        """Leave out a space of plans whose paces are at least so many seconds, because Ctrl-C came."""
        self.finished, self.interrupted = False, True
        self.bound = min(self.bound, bound_s)

    def leave(self, bound_s: float) -> None:
        """Leave a space out for which there is no time, given a bound on its paces."""
        self.finished, self.bound = False, min(self.bound, bound_s)

    def add(
        self, problem: Problem, space: PlanSpace, result: BisectionResult[FoundPipeline], memory_binds: bool = False
    ) -> None:
        """Take in the result of one more search."""
        if result.low < float("inf"):
            self.regions.append(Region(space, None, space.pace(problem, result.low)))
        self.finished, self.interrupted = self.finished and result.finished, self.interrupted or result.interrupted
        if result.best is not None or not result.finished:
            self.bound = min(self.bound, space.pace(problem, result.low))
        if result.best is None:
            return
        if self.best is None or space.pace(problem, result.high) < self.best[0] * (1 - PRECISION):
            self.best = space.pace(problem, result.high), space, result.best
            self.memory_binds = memory_binds


_VERTICAL_SHARE = 0.75
"""The share of the time left that a space of plans may take under vertical sync, if another one follows."""

_ANY_GAP = 1e6
"""A relative gap that every plan has."""

MOST_UNTIMED = 100
"""So many spaces are looked into whatever the time; thousands of servers have as many as there are servers."""


def _search_spaces(
    problem: Problem, cuts: Cuts, deadline: float | None, gap: float, effort: SearchEffort, so_far: _BestSoFar
) -> None:
    """Search all spaces of plans, one after another."""
    spaces, options = plan_spaces(problem), problem.options
    floors = {space: space.floor(problem) for space in spaces}
    # Without a memory limit the number of copies makes no difference to one of them, unless they share something.
    shares = options.max_workers is not None or (problem.training and options.schedule in ACCUMULATING)
    without_memory: dict[PlanSpace, BisectionResult[FoundPipeline]] = {}
    # Of each space, the least floor of those after it.
    others = [*itertools.accumulate(reversed(floors.values()), min, initial=float("inf"))][-2::-1]
    for number, space in enumerate(spaces):
        known = None if shares else without_memory.get(replace(space, copies=1))
        low = floors[space] if known is None else space.pace(problem, known.low)
        if so_far.excludes(low):
            so_far.regions.append(Region(space, None, low))
            continue
        if so_far.interrupted:
            so_far.stop(low)
            continue
        if number >= MOST_UNTIMED and Deadline(deadline).passed:
            so_far.leave(low)
            continue
        one = PipelineSearches(space.inner(problem), cuts, deadline, gap, effort=effort)
        if options.schedule == VERTICAL and number + 1 < len(spaces):
            # Its searches may take long without a plan; copies of a smaller pipeline have one sooner.
            one.deadline = Deadline(deadline).share(_VERTICAL_SHARE).at
        one.report = so_far.watch(problem, space, others[number])
        one.below, one.near = _below(problem, space, so_far), so_far.near and so_far.best is None
        if known is not None and known.best is not None:
            one.without_memory = replace(known)
        elif known is not None:
            one.above = known.low
        try:
            so_far.add(problem, space, one.best(), one.memory_binds)
        except KeyboardInterrupt:
            so_far.stop(low)
        if one.found_without_memory is not None:
            without_memory[replace(space, copies=1)] = one.found_without_memory


def _search_batches(
    problem: Problem, cuts: Cuts, deadline: float | None, gap: float, effort: SearchEffort, so_far: _BestSoFar
) -> None:
    """Search all spaces of plans under a flush schedule, together."""
    batches = BatchSpaces(problem, cuts, deadline, gap, effort, so_far.report, so_far.useful_s, so_far.near)
    found = batches.best()
    so_far.finished, so_far.interrupted = found.finished, found.interrupted
    if found.best is not None:
        space, pipeline = found.best
        so_far.best = found.high, space, pipeline
    if found.best is not None or not found.finished:
        so_far.bound = found.low
    so_far.regions = [Region(space, None, max(found.low, floor)) for space, floor in batches.floors.items()]


def _below(problem: Problem, space: PlanSpace, so_far: _BestSoFar) -> float:
    """The pace of one copy, or with a flush the time between its updates, that a pipeline of a space has to beat."""
    if so_far.limit_s == float("inf"):
        return float("inf")
    return space.inner_pace(problem, so_far.limit_s) or 0.0


def _search_grids(
    problem: Problem, cuts: Cuts, deadline: float | None, gap: float, effort: SearchEffort, so_far: _BestSoFar
) -> None:
    """Search all shapes of a uniform grid, each for plans that are faster than the best before."""
    space = plan_spaces(problem)[0]
    try:
        searches = PipelineSearches(problem, cuts, deadline, gap, near=so_far.near, effort=effort)
        for result in _shape_results(searches, lambda: so_far.limit_s):
            so_far.add(problem, space, result)
            so_far.report(0.0, so_far.best[0] if so_far.best else float("inf"))
    except KeyboardInterrupt:
        so_far.stop(0.0)


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


def is_feasible(problem: Problem, cuts: Cuts, deadline: float | None = None) -> bool:
    """Whether any plan satisfies the constraints, however slow.

    Raises `OutOfTime` where that is not known at the deadline (by `time.perf_counter`).
    """
    spaces = plan_spaces(problem)
    if not problem.options.flushes:
        # Fewer copies need no more memory, and leave each of them no fewer workers and minibatches.
        spaces = [space for space in spaces if space.copies <= 2]
    searches = [PipelineSearches(space.inner(problem), cuts, deadline) for space in spaces]
    if problem.options.grid:
        searches = [searches[0].for_shape(shape) for shape in grid_shapes(problem)]
    return any(search.feasible() for search in searches)


def solve(
    problem: Problem,
    cuts: Cuts,
    seconds: float | None = None,
    gap: float = 0.0,
    report: Callable[[float, float], None] | None = None,
    effort: SearchEffort | None = None,
    useful_s: float = float("inf"),
    *,
    near: bool = False,
    price: Callable[[Plan], float] | None = None,
) -> Result:
    """The best plan over all spaces of plans, proven optimal by a search just below its pace that finds nothing.

    A time limit in `seconds`, a relative `gap`, the `effort`, or Ctrl-C ends the search with the best plan so far and
    the bound reached. Plans with at least the pace `useful_s`, in seconds per minibatch, are not searched for: where no
    plan is faster, there is none in the result, or one that is no faster; `near` says that the best plan is probably
    about as fast as that. With `options.contention` everything is charged, otherwise every link is used alone. `report`
    is called with the bound and the pace of the best plan, in seconds per minibatch, as they improve. `price` is the
    pace of a plan with everything charged, without which no first plan is reported where that is asked for.
    """
    if problem.options.flushes and problem.options.schedule in VIRTUAL:
        raise InputError(f"plans of {problem.options.schedule} are found by `pipeplan solve` alone")
    if 1 in (problem.options.stages, problem.options.max_stages) and not problem.options.pins:
        cuts = cuts.whole
    began, deadline, effort = time.perf_counter(), Deadline.after(seconds).at, effort or SearchEffort()
    # A first plan is for those who watch, and for searches that may end early.
    wants_first = (report is not None or seconds is not None or effort.most < float("inf")) and not near
    told = MonotoneReport(report or (lambda bound, best: None))
    told(least_pace_s(problem), float("inf"))

    def search(limit_s: float, near: bool, above_s: float = 0.0) -> Result:
        return _searched(problem, cuts, deadline, gap, told, effort, limit_s, above_s, near=near, price=price)

    known, first = KNOWN.get(), None
    if known is None:
        first = first_plan(problem, cuts, deadline, price) if wants_first else None
        if first is not None:
            told(0.0, first.pace_s)
        answer = _at_least(first, search(useful_s, near), price)
    else:
        answer = known.use(question_of(problem, cuts, gap, effort.most), problem, search, useful_s, near=near)
    return replace(answer, seconds=time.perf_counter() - began)


def _at_least(first: FirstPlan | None, answer: Result, price: Callable[[Plan], float] | None) -> Result:
    """The answer, with the first plan in place of its own where that is slower or was not found in time."""
    if first is None or answer.status in (Status.INFEASIBLE, Status.OPTIMAL):
        return answer
    pace_s = answer.objective_s
    if answer.plan is not None and first.charged and not answer.charged and price is not None:
        pace_s = price(answer.plan)
    if pace_s <= first.pace_s * (1 + PRECISION):
        return answer
    bound_s = min(answer.bound_s, first.pace_s)
    answer = replace(answer, status=Status.FEASIBLE, plan=first.plan, charged=first.charged)
    return replace(answer, objective_s=first.pace_s, bound_s=bound_s)


def _searched(
    problem: Problem,
    cuts: Cuts,
    deadline: float | None,
    gap: float,
    report: Callable[[float, float], None],
    effort: SearchEffort,
    useful_s: float,
    above_s: float,
    *,
    near: bool,
    price: Callable[[Plan], float] | None,
) -> Result:
    """The results of the searches, first with every shared resource to itself, and then with everything charged.

    All plans have at least the pace `above_s`, in seconds per minibatch.
    """
    # A bound on a selection of the cuts holds for no other cuts.
    told = report if cuts.complete else lambda bound, best: report(0.0, best)
    # A plan of the first searches may be slower once everything is charged, so only their bounds are reported.
    first = told if not problem.options.contention else lambda bound, best: told(bound, float("inf"))
    so_far = _BestSoFar(report=first, useful_s=useful_s, near=near)
    search = _search_batches if problem.options.flushes else _search_spaces
    search = _search_grids if problem.options.grid else search
    hurries = near and above_s > 0 and search is _search_spaces and charges(problem)
    # Where a bound with everything charged is known, that without is hardly of use, and any plan will do.
    search(problem, cuts, deadline, _ANY_GAP if hurries else gap, effort, so_far)
    so_far.report = told
    if problem.options.contention and so_far.best is not None:
        return _charged(problem, cuts, so_far, deadline, gap, effort, useful_s, above_s, near=hurries, price=price)
    return _alone(problem, cuts, so_far)


def _alone(problem: Problem, cuts: Cuts, so_far: _BestSoFar) -> Result:
    """The result of the searches without shared resources, with the proven bound."""
    finished, interrupted = so_far.finished, so_far.interrupted
    if so_far.best is None:
        proven, floor = finished and cuts.complete, least_pace_alone_s(problem)
        status = Status.INFEASIBLE if proven else Status.TIME_LIMIT
        bound = so_far.bound if cuts.complete and so_far.bound < float("inf") else 0.0
        least = so_far.useful_s if proven else max(floor, bound)
        return Result("DP", status, None, float("inf"), least, 0.0, _note(cuts, finished), interrupted=interrupted)
    pace, space, pipeline = so_far.best
    plan = _plan(problem, space, pipeline.stages(), pace)
    result = _result(problem, cuts, BisectionResult(so_far.bound, pace, plan, finished, interrupted))
    return replace(result, alone_bound_s=result.bound_s if cuts.complete else None)


def _charged(
    problem: Problem,
    cuts: Cuts,
    so_far: _BestSoFar,
    deadline: float | None,
    gap: float,
    effort: SearchEffort,
    useful_s: float,
    above_s: float,
    *,
    near: bool,
    price: Callable[[Plan], float] | None,
) -> Result:
    """The result with everything charged: the search goes on from the bounds without shared resources.

    All plans have at least the pace `above_s`, in seconds per minibatch; `near` says that the plan so far is probably
    the best.
    """
    assert so_far.best is not None
    pace, space, pipeline = so_far.best
    note = f"what workers share is charged exactly where a stage has at most {MOST_PLACEMENTS:,} places"
    exact = charges(problem)
    if price is None and not exact:
        return replace(_alone(problem, cuts, so_far), note=note)
    levels, alone_bound_s = passed_levels(problem, cuts), so_far.bound if cuts.complete else None
    if so_far.finished and so_far.regions:
        least_s = max((one.bound_s for one in levels), default=0.0)
        raised = [replace(one, low_s=max(one.low_s, least_s * (one.space.copies == 1))) for one in so_far.regions]
        so_far.regions, so_far.bound = raised, max(so_far.bound, min(one.low_s for one in raised))
    if price is not None and not exact:
        result = _charged_afterwards(problem, cuts, so_far, deadline, gap, effort, levels, price)
        note = "" if result.status == Status.OPTIMAL else note
        return replace(result, charged=True, alone_bound_s=alone_bound_s, note=note)
    bound = max(so_far.bound, above_s, contention.least_pace_of_shared_cores_s(problem))
    searches = ChargedPipelines(
        problem, cuts, deadline, gap, effort, useful_s, so_far.report, near, so_far.memory_binds
    )
    known = searches.charge(Region(space, None, bound), pipeline, pace)
    interval = BisectionResult(bound, known.pace_s, known, so_far.finished, so_far.interrupted, gap)
    if so_far.finished and not interval.closed:
        regions = so_far.regions
        if problem.options.grid:
            regions = [Region(space, shape, low) for shape, low in _shape_floors(problem, cuts)]
        try:
            interval = searches.best([replace(one, low_s=max(one.low_s, bound)) for one in regions], known)
        except KeyboardInterrupt:
            interval = replace(interval, finished=False, interrupted=True)
    assert interval.best is not None
    best = interval.best
    plan = _plan(problem, best.region.space, best.pipeline.stages(), best.pace_s)
    ends = BisectionResult(interval.low, interval.high, plan, interval.finished, interval.interrupted)
    return replace(_result(problem, cuts, ends), charged=True, alone_bound_s=alone_bound_s)


def _charged_afterwards(
    problem: Problem,
    cuts: Cuts,
    so_far: _BestSoFar,
    deadline: float | None,
    gap: float,
    effort: SearchEffort,
    levels: list[PassedLevel],
    price: Callable[[Plan], float],
) -> Result:
    """The best of a few plans with everything charged: the best one without, and those without stages that straddle."""
    assert so_far.best is not None
    pace_s, space, pipeline = so_far.best
    plans = [_plan(problem, space, pipeline.stages(), pace_s)]
    finished, interrupted = so_far.finished, so_far.interrupted
    single = plan_spaces(problem)[0]
    searches_levels = single.copies == 1 and not problem.options.grid
    for one in levels if searches_levels else []:
        if interrupted or one.bound_s <= pace_s:
            continue
        inner = PipelineSearches(without_straddling(problem, one.level), cuts, deadline, gap, above=one.crossing_s)
        inner.effort = effort
        found = inner.best()
        interrupted = interrupted or found.interrupted
        if found.best is not None:
            plans.append(_plan(problem, single, found.best.stages(), max(found.high, one.crossing_s)))
    paces = [price(plan) for plan in plans]
    best_s = min(paces)
    best = plans[paces.index(best_s)]
    return _result(problem, cuts, BisectionResult(min(so_far.bound, best_s), best_s, best, finished, interrupted))


def _shape_floors(problem: Problem, cuts: Cuts) -> Iterator[tuple[GridShape, float]]:
    """The shapes of a uniform grid with lower bounds on their paces, the most promising first."""
    grids = UniformGrids(PipelineSearches(problem, cuts).unlimited)
    floors = [
        (shape, grids.least_pace(shape)[0] if grids.has_few_cuts else grids.floor(shape))
        for shape in grid_shapes(problem)
    ]
    yield from sorted(floors, key=lambda entry: entry[1])


def _note(cuts: Cuts, finished: bool) -> str:
    if not cuts.complete:
        return f"the search covered {len(cuts.ideals)} of the graph's cuts, not all of them"
    return "the requested gap was reached" if finished else "the search ended before it could prove this plan optimal"


def _result(problem: Problem, cuts: Cuts, interval: BisectionResult[Plan]) -> Result:
    """The result of searches that found a plan."""
    plan, pace = interval.best, interval.high
    assert plan is not None
    if interval.finished and cuts.complete and interval.low >= pace * (1 - 4 * PRECISION):
        return Result("DP", Status.OPTIMAL, plan, pace, pace, 0.0)
    floor = least_pace_alone_s(problem)
    bound = min(max(interval.low if cuts.complete else floor, floor), pace)
    note = _note(cuts, interval.finished)
    return Result("DP", Status.FEASIBLE, plan, pace, bound, 0.0, note, interrupted=interval.interrupted)


def _plan(problem: Problem, space: PlanSpace, stages: list[Stage], pace_s: float) -> Plan:
    # The pace may lie just where a depth changes: rounding in another order must not ask for one minibatch more.
    return depths.assign_depths(space.plan(problem, stages), problem, pace_s * (1 + 1e-12))
