"""Finds the best plan with the DP alone, for callers that solve many problems: no second solver, no baselines."""

from __future__ import annotations

from dataclasses import dataclass

from pipeplan import single
from pipeplan.cuts import Cuts
from pipeplan.evaluate import evaluate
from pipeplan.improve import improve
from pipeplan.plan import Plan
from pipeplan.problem import Problem
from pipeplan.solvers import dp

EFFORT = 200
"""Effort of the local search under contention: less than `solving.solve` spends on its single answer."""


@dataclass(frozen=True)
class Best:
    """A plan and its pace by the evaluator, in seconds per minibatch."""

    plan: Plan
    pace_s: float


def best_plan(problem: Problem, cuts: Cuts, known: Plan | None = None) -> Best | None:
    """The best plan of a problem, or None if no plan satisfies the constraints.

    Without contention the plan is optimal. Where contention binds it is improved by a local search, which proves
    nothing; but if a plan is already `known`, the result is never worse than that plan after the same improvement.
    """
    candidates = []
    solved = dp.solve(problem, cuts).plan
    if solved is not None and single.binds(solved, evaluate(solved, problem)):
        single_stage = single.best(problem)
        candidates = [Best(single_stage[0], single_stage[1].pace_s)] if single_stage else []
        solved = dp.solve(single.without(problem), cuts).plan if single.allows_several(problem) else None
    for plan in (solved, known):
        if plan is not None and (plan is not known or evaluate(plan, problem).fits):
            better = improve(plan, problem, EFFORT)
            candidates.append(Best(better, evaluate(better, problem).pace_s))
    # `min` keeps the first of equal plans.
    return min(candidates, key=lambda best: best.pace_s, default=None)
