"""Finds the best plan with the DP alone, for callers that solve many problems: no second solver, no baselines."""

from __future__ import annotations

from dataclasses import dataclass

from pipeplan.plan.plan import Plan
from pipeplan.planning.baselines import satisfies_options, uniform_grid
from pipeplan.planning.charge_results import deepened
from pipeplan.problem.cuts import Cuts, enumerate_cuts
from pipeplan.problem.problem import Problem
from pipeplan.solvers.dp import dynamic_program
from pipeplan.solvers.result import Status
from pipeplan.util.deadline import NO_DEADLINE, Deadline, OutOfTime

MANY_CUTS = 96
"""With more cuts than this, the proof of a best plan takes much longer than finding one that is nearly as fast."""


@dataclass(frozen=True)
class ScoredPlan:
    """A plan and its pace by the evaluator, in seconds per minibatch."""

    plan: Plan
    pace_s: float


def best_plan(problem: Problem, cuts: Cuts, deadline: Deadline = NO_DEADLINE, gap: float = 0.0) -> ScoredPlan | None:
    """The best plan of a problem, or the best that is found in time; None if no plan satisfies the constraints.

    The search may stop at a plan that is within the relative `gap` of the best.

    Raises `OutOfTime` where no plan is found before the deadline.
    """
    plan = _solved(problem, cuts, deadline, gap)
    if plan is None:
        return None
    plan, score = deepened(plan, problem)
    return ScoredPlan(plan, score.pace_s)


def best_in_time(
    problem: Problem, maximum_cuts: int, deadline: Deadline, gap_of_many_cuts: float = 0.0
) -> tuple[ScoredPlan | None, bool]:
    """`best_plan` of a problem whose cuts are still to be listed, and whether there was time to know it.

    With more than `MANY_CUTS` cuts the search may stop at a plan within the relative `gap_of_many_cuts` of the best.
    """
    try:
        cuts = enumerate_cuts(problem, maximum_cuts, deadline.share(0.5))
        if len(cuts.ideals) <= MANY_CUTS:
            return best_plan(problem, cuts, deadline), True
        return _or_grid(problem, cuts, gap_of_many_cuts, deadline), True
    except OutOfTime:
        return None, False


def _or_grid(problem: Problem, cuts: Cuts, gap: float, deadline: Deadline) -> ScoredPlan | None:
    """The best plan that is found in time, or the best uniform grid if that is faster, which takes less time to find.

    Raises `OutOfTime` where neither is found.
    """
    grid = None
    if not problem.options.grid and problem.options.stages is None and not problem.options.pins:
        found = uniform_grid(problem, cuts, deadline.share(0.3))
        if found.plan is not None and found.pace_s is not None and satisfies_options(found.plan, problem):
            grid = ScoredPlan(found.plan, found.pace_s)
    try:
        best = best_plan(problem, cuts, deadline, gap)
    except OutOfTime:
        if grid is None:
            raise
        return grid
    if best is None or grid is None:
        return best
    return min(best, grid, key=lambda one: one.pace_s)


def _solved(problem: Problem, cuts: Cuts, deadline: Deadline, gap: float) -> Plan | None:
    """The plan of the DP, or None if it proves that there is none."""
    result = dynamic_program.solve(problem, cuts, deadline.left_s, gap)
    if result.interrupted:
        raise KeyboardInterrupt
    if result.plan is None and result.status != Status.INFEASIBLE and deadline.passed:
        raise OutOfTime
    return result.plan
