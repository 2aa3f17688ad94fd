"""Turns what the searches of a task have found into a result: the plan, its pace, and what is proven of it."""

from __future__ import annotations

from collections.abc import Sequence

from pipeplan.cost import contention, depths
from pipeplan.plan.plan import Plan, Stage
from pipeplan.problem.cuts import Cuts
from pipeplan.problem.problem import Problem
from pipeplan.solvers.dp.spaces.best_so_far import BestSoFar
from pipeplan.solvers.dp.spaces.search_task import SearchTask
from pipeplan.solvers.dp.threshold import PRECISION, BisectionResult
from pipeplan.solvers.plan_space import PlanSpace
from pipeplan.solvers.result import Result, Status


def least_pace_alone_s(problem: Problem) -> float:
    """A lower bound on the pace of every plan with every shared resource to itself: all work on all workers in use."""
    return problem.work_s / problem.speed_in_use


def least_pace_s(problem: Problem) -> float:
    """A lower bound on the pace of every plan, also where workers share cores."""
    return max(least_pace_alone_s(problem), contention.least_pace_of_shared_cores_s(problem))


def plan_of(problem: Problem, space: PlanSpace, stages: Sequence[Stage], pace_s: float) -> Plan:
    """The plan of a pipeline of one space, with the depths that sustain a pace in seconds per minibatch."""
    # The pace may lie just where a depth changes: rounding in another order must not ask for one minibatch more.
    return depths.assign_depths(space.plan(problem, stages), problem, pace_s * (1 + 1e-12))


def alone_result(task: SearchTask, so_far: BestSoFar) -> Result:
    """The result of the searches without shared resources, with the proven bound."""
    cuts, finished, interrupted = task.cuts, so_far.finished, so_far.interrupted
    if so_far.best is None:
        proven, floor = finished and cuts.complete, least_pace_alone_s(task.problem)
        status = Status.INFEASIBLE if proven else Status.TIME_LIMIT
        bound = so_far.bound if cuts.complete and so_far.bound < float("inf") else 0.0
        least = task.useful_s if proven else max(floor, bound)
        return Result("DP", status, None, float("inf"), least, 0.0, _note(cuts, finished), interrupted=interrupted)
    pace, space, pipeline = so_far.best
    plan = plan_of(task.problem, space, pipeline.stages(), pace)
    return found_result(task, BisectionResult(so_far.bound, pace, plan, finished, interrupted))


def found_result(task: SearchTask, interval: BisectionResult[Plan]) -> Result:
    """The result of searches that found a plan."""
    plan, pace, cuts = interval.best, interval.high, task.cuts
    assert plan is not None
    if interval.finished and cuts.complete and interval.low >= pace * (1 - 4 * PRECISION):
        return Result("DP", Status.OPTIMAL, plan, pace, pace, 0.0)
    floor = least_pace_alone_s(task.problem)
    bound = min(max(interval.low if cuts.complete else floor, floor), pace)
    note = _note(cuts, interval.finished)
    return Result("DP", Status.FEASIBLE, plan, pace, bound, 0.0, note, interrupted=interval.interrupted)


def _note(cuts: Cuts, finished: bool) -> str:
    if not cuts.complete:
        return f"the search covered {len(cuts.ideals)} of the graph's cuts, not all of them"
    return "the requested gap was reached" if finished else "the search ended before it could prove this plan optimal"
