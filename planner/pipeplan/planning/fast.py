"""Finds the best plan with the DP alone, for callers that solve many problems: no second solver, no baselines."""

from __future__ import annotations

from dataclasses import dataclass

from pipeplan.plan.plan import Plan
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
        gap = gap_of_many_cuts if len(cuts.ideals) > MANY_CUTS else 0.0
        return best_plan(problem, cuts, deadline, gap), True
    except OutOfTime:
        return None, False


def _solved(problem: Problem, cuts: Cuts, deadline: Deadline, gap: float) -> Plan | None:
    """The plan of the DP, or None if it proves that there is none."""
    result = dynamic_program.solve(problem, cuts, deadline.left_s, gap)
    if result.interrupted:
        raise KeyboardInterrupt
    if result.plan is None and result.status != Status.INFEASIBLE and deadline.passed:
        raise OutOfTime
    return result.plan
