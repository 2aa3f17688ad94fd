"""Charges what workers share to the results of a solver that left it out, and deepens plans whose cards are shared."""

from __future__ import annotations

from dataclasses import replace

from pipeplan.cost import depths
from pipeplan.cost.evaluate import Evaluation, evaluate
from pipeplan.plan.plan import Plan
from pipeplan.problem.problem import Problem
from pipeplan.solvers.result import Result, Status

TOLERANCE = 1e-9
"""Relative. Paces that differ by less are equal."""


def charge_result(result: Result, problem: Problem) -> Result:
    """The result with its plan's pace, everything charged, as the objective.

    The bound still holds, because nothing that is charged makes a plan faster. A result that a solver has charged
    itself stays as it is.
    """
    if result.charged or result.plan is None or not problem.options.contention:
        return result
    pace = evaluate(result.plan, problem).pace_s
    if pace <= result.objective_s * (1 + TOLERANCE):
        return replace(result, charged=True)
    note = result.note or f"{result.solver} leaves out what the workers share"
    return replace(result, charged=True, objective_s=pace, status=Status.FEASIBLE, note=note)


def deepened(plan: Plan, problem: Problem) -> tuple[Plan, Evaluation]:
    """The plan with the depths that its pace without shared resources needs where memory allows them, and its score.

    Bursts on a shared card need more minibatches in flight than the plan's own pace does (docs/cost-model.md).
    """
    score = evaluate(plan, problem)
    if plan.inference or score.pace_s <= score.alone_s * (1 + TOLERANCE):
        return plan, score
    deeper = depths.assign_depths(plan, problem, score.alone_s * (1 + 1e-12))
    deeper_score = evaluate(deeper, problem)
    fits = deeper_score.fits or not problem.options.memory
    if fits and deeper_score.pace_s <= score.pace_s * (1 + TOLERANCE):
        return deeper, deeper_score
    return plan, score
