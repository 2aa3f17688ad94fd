"""Finds the best plan with the DP alone, for callers that solve many problems: no second solver, no baselines."""

from __future__ import annotations

from dataclasses import dataclass

from pipeplan.cost.evaluate import evaluate
from pipeplan.plan.plan import Plan
from pipeplan.planning.charge_results import deepened
from pipeplan.problem.cuts import Cuts
from pipeplan.problem.problem import Problem
from pipeplan.solvers.dp import dynamic_program


@dataclass(frozen=True)
class ScoredPlan:
    """A plan and its pace by the evaluator, in seconds per minibatch."""

    plan: Plan
    pace_s: float


def best_plan(problem: Problem, cuts: Cuts) -> ScoredPlan | None:
    """The best plan of a problem, or None if no plan satisfies the constraints."""
    plan = dynamic_program.solve(problem, cuts).plan
    if plan is None:
        return None
    plan = deepened(plan, problem)
    return ScoredPlan(plan, evaluate(plan, problem).pace_s)
