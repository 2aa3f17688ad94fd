"""Finds the best plan with the DP alone, for callers that solve many problems: no second solver, no baselines."""

from __future__ import annotations

from dataclasses import dataclass

from pipeplan.cost.evaluate import evaluate
from pipeplan.plan.plan import Plan
from pipeplan.planning import single_stage
from pipeplan.planning.local_search import improve_plan
from pipeplan.problem.cuts import Cuts
from pipeplan.problem.problem import Problem
from pipeplan.solvers.dp import dynamic_program
from pipeplan.solvers.result import Status
from pipeplan.util.deadline import NO_DEADLINE, Deadline, OutOfTime

EFFORT = 200
"""Effort of the local search under contention: less than `planning.solve` spends on its single answer."""


@dataclass(frozen=True)
class ScoredPlan:
    """A plan and its pace by the evaluator, in seconds per minibatch."""

    plan: Plan
    pace_s: float


def best_plan(
    problem: Problem, cuts: Cuts, known: Plan | None = None, deadline: Deadline = NO_DEADLINE
) -> ScoredPlan | None:
    """The best plan of a problem, or the best that is found in time; None if no plan satisfies the constraints.

    Raises `OutOfTime` where no plan is found before the deadline.

    Without contention the plan is optimal. Where contention binds it is improved by a local search, which proves
    nothing; but if a plan is already `known`, the result is never worse than that plan after the same improvement.
    """
    candidates = []
    solved = _solved(problem, cuts, deadline)
    if solved is not None and single_stage.is_bound_by_allreduce(solved, evaluate(solved, problem)):
        best_single = single_stage.best_single_stage(problem)
        candidates = [ScoredPlan(best_single[0], best_single[1].pace_s)] if best_single else []
        solved = (
            _solved(single_stage.without_single_stage(problem), cuts, deadline)
            if single_stage.allows_several(problem) and not deadline.passed
            else None
        )
    for plan in (solved, known):
        if plan is not None and (plan is not known or evaluate(plan, problem).fits):
            better = improve_plan(plan, problem, EFFORT)
            candidates.append(ScoredPlan(better, evaluate(better, problem).pace_s))
    # `min` keeps the first of equal plans.
    return min(candidates, key=lambda best: best.pace_s, default=None)


def _solved(problem: Problem, cuts: Cuts, deadline: Deadline) -> Plan | None:
    """The plan of the DP, or None if it proves that there is none."""
    result = dynamic_program.solve(problem, cuts, deadline.left_s)
    if result.interrupted:
        raise KeyboardInterrupt
    if result.plan is None and result.status != Status.INFEASIBLE and deadline.passed:
        raise OutOfTime
    return result.plan
