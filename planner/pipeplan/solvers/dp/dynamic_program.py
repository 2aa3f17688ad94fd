"""Exact dynamic programming over cuts: the fastest pipeline on consecutive workers, some of which may stay idle.

A search over cuts decides whether any pipeline stays within a threshold, and bisection finds the smallest such
threshold. The first bisection ignores memory, so that depths do not matter and many cuts can be left out. If its plan
fits in memory, it is the best plan. Otherwise a second bisection continues upwards from its step time, with the memory
limit, and with recomputation if that is allowed.

For a large problem, a first plan and a bound are found within a second. The plan is one pipeline on the whole cluster,
within 10% of the best pipeline on a few of the cuts. The bound is the time of all work on all workers. The search for
the best plan uses neither this plan nor this bound, so its result does not depend on them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from pipeplan.errors import InputError
from pipeplan.plan.plan import Plan
from pipeplan.plan.schedules import VIRTUAL
from pipeplan.problem.cuts import Cuts
from pipeplan.problem.grid_shapes import grid_shapes
from pipeplan.problem.problem import Problem
from pipeplan.solvers.dp.budget import SearchEffort
from pipeplan.solvers.dp.charged import charged_result
from pipeplan.solvers.dp.cut_selection import cheap_cuts
from pipeplan.solvers.dp.grids import search_grids
from pipeplan.solvers.dp.pipeline_searches import PipelineSearches
from pipeplan.solvers.dp.results import SearchTask, alone_result, least_step_time_s, plan_of, tell_nobody
from pipeplan.solvers.dp.spaces import search_batches, search_spaces
from pipeplan.solvers.dp.threshold import PRECISION
from pipeplan.solvers.plan_space import plan_spaces
from pipeplan.solvers.result import Result, Status
from pipeplan.util.deadline import Deadline


def is_feasible(problem: Problem, cuts: Cuts, deadline: float | None = None) -> bool:
    """Whether any plan satisfies the constraints, however slow.

    Raises `OutOfTime` if the answer is not known at the deadline (by `time.perf_counter`).
    """
    spaces = plan_spaces(problem)
    if not problem.options.flushes:
        # With fewer copies, no more memory is needed, and each copy has at least as many workers and minibatches.
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
    """The best plan over all spaces of plans, proven optimal by a search just below its step time that finds nothing.

    A time limit in `seconds`, a relative `gap`, the `effort`, or Ctrl-C ends the search with the best plan and the
    bound so far. Plans with a step time of `useful_s` seconds per minibatch or more are not searched for. If no
    plan is faster, the result has no plan, or one that is not faster; `near` says that the best plan is probably about
    that fast. `options.contention` says whether contention is charged. `report` is called with the bound and the step
    time of the best plan, in seconds per minibatch, as they improve. `price` is a function that gives the step time of
    a plan with contention. Without `price` no first plan is reported if contention is charged.
    """
    if problem.options.flushes and problem.options.schedule in VIRTUAL:
        raise InputError(f"plans of {problem.options.schedule} are found by `pipeplan solve` alone")
    if 1 in (problem.options.stages, problem.options.max_stages) and not problem.options.pins:
        cuts = cuts.whole
    began, deadline, effort = time.perf_counter(), Deadline.after(seconds).at, effort or SearchEffort()
    # A first plan helps if progress is reported, or if the search may end early.
    wants_first = (report is not None or seconds is not None or effort.most < float("inf")) and not near
    told = MonotoneReport(report or tell_nobody)
    told(least_step_time_s(problem), float("inf"))
    first = first_plan(problem, cuts, deadline, price) if wants_first else None
    if first is not None:
        told(0.0, first.objective_s)
    task = SearchTask(problem, cuts, deadline, gap, effort, told, price, useful_s, near)
    answer = _at_least(first, _searched(task), price)
    return replace(answer, seconds=time.perf_counter() - began)


def _at_least(first: Result | None, answer: Result, price: Callable[[Plan], float] | None) -> Result:
    """The answer, or the first plan if the answer's plan is slower or was not found in time."""
    if first is None or answer.status in (Status.INFEASIBLE, Status.OPTIMAL):
        return answer
    step_time_s = answer.objective_s
    if answer.plan is not None and first.charged and not answer.charged and price is not None:
        step_time_s = price(answer.plan)
    if step_time_s <= first.objective_s * (1 + PRECISION):
        return answer
    bound_s = min(answer.bound_s, first.objective_s)
    return replace(first, bound_s=bound_s, note=answer.note, interrupted=answer.interrupted)


def _searched(task: SearchTask) -> Result:
    """The result of the searches, first without contention, and then with contention charged."""
    options, report = task.problem.options, task.report
    if not task.cuts.complete:
        # A bound for a selection of the cuts does not hold for the other cuts.
        task = replace(task, report=lambda bound, best: report(0.0, best))
    search = search_batches if options.flushes else search_spaces
    search = search_grids if options.grid else search
    alone = task
    if options.contention:
        # A plan of the first searches may be slower with contention, so only their bounds are reported.
        alone = replace(task, report=lambda bound, best: task.report(bound, float("inf")))
    so_far = search(alone)
    if options.contention and so_far.best is not None:
        return charged_result(task, so_far)
    return alone_result(task, so_far)


LARGE = 5_000
"""Smallest product of cuts and workers for which a first plan is searched."""
_CUTS, _GAP, _MOST_EFFORT = 12, 0.1, 200_000
# 200,000 rows take half a second.


@dataclass
class MonotoneReport:
    """Reports a bound and the step time of the best plan whenever one of them has improved; neither ever gets worse."""

    tell: Callable[[float, float], None]
    bound_s: float = 0.0
    best_s: float = float("inf")

    def __call__(self, bound_s: float, best_s: float) -> None:
        """Report a bound on all plans (0 if there is none), and the step time of a plan (infinite if there is none)."""
        bound_s = max(self.bound_s, bound_s if bound_s < float("inf") else 0.0)
        best_s = min(self.best_s, best_s)
        if (bound_s, best_s) != (self.bound_s, self.best_s):
            self.bound_s, self.best_s = bound_s, best_s
            self.tell(bound_s, best_s)


def first_plan(
    problem: Problem, cuts: Cuts, deadline: float | None, price: Callable[[Plan], float] | None = None
) -> Result | None:
    """A quickly found plan, without a bound, of a large problem; None if the problem is small or no plan is found.

    `price` is a function that gives the step time of a plan with contention. If contention is charged, there is no
    first plan without `price`.
    """
    if problem.options.contention and price is None:
        return None
    if problem.options.grid or len(cuts.ideals) * problem.cluster.workers < LARGE:
        return None
    space, few = plan_spaces(problem)[0], cuts.only(cheap_cuts(cuts, _CUTS))
    found = PipelineSearches(problem, few, deadline, _GAP, effort=SearchEffort(_MOST_EFFORT)).best()
    if found.interrupted:
        raise KeyboardInterrupt
    if found.best is None:
        return None
    step_time_s = space.step_time(problem, found.high)
    plan = plan_of(problem, space, found.best.stages(), step_time_s)
    if problem.options.contention and price is not None:
        step_time_s = price(plan)
    return Result("DP", Status.FEASIBLE, plan, step_time_s, 0.0, 0.0, charged=problem.options.contention)
