"""The best plan by the dynamic program alone, for those who ask many times: no second solver, no baselines."""

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
"""Of the search for a better plan under contention: less than `solve` takes for its one answer."""


@dataclass(frozen=True)
class Best:
    """A plan and the pace that the evaluator gives it."""

    plan: Plan
    pace_s: float


def best_plan(problem: Problem, cuts: Cuts, known: Plan | None = None) -> Best | None:
    """The best plan, None where there is none: optimal without contention, and improved where that binds.

    Under contention nothing is certain: where a plan is `known`, the answer is never worse than that one, improved.
    """
    found = []
    first = dp.solve(problem, cuts).plan
    if first is not None and single.binds(first, evaluate(first, problem)):
        one = single.best(problem)
        found = [Best(one[0], one[1].pace_s)] if one else []
        first = dp.solve(single.without(problem), cuts).plan if single.allows_several(problem) else None
    for plan in (first, known):
        if plan is not None and (plan is not known or evaluate(plan, problem).fits):
            better = improve(plan, problem, EFFORT)
            found.append(Best(better, evaluate(better, problem).pace_s))
    # Among equals the first.
    return min(found, key=lambda best: best.pace_s, default=None)
