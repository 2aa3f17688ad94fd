"""Cross-checks the results of the two solvers. Every plan that pipeplan recommends has passed this check."""

from __future__ import annotations

from dataclasses import dataclass

from pipeplan.cost.evaluate import evaluate
from pipeplan.problem.problem import Problem
from pipeplan.solvers.result import Result, Status
from pipeplan.util.units import show_time

TOLERANCE = 1e-6
"""Relative. Plans this close are equal for the verdict; both solvers work to a thousandth of this tolerance."""


@dataclass(frozen=True)
class Verdict:
    """The result of comparing the solvers' answers."""

    agree: bool
    """False only if the answers contradict each other, which means that one of the solvers is wrong."""
    proven: bool
    """Whether two solvers agree that the plan is optimal."""
    text: str
    """One line for the user."""


def judge_results(problem: Problem, results: list[Result]) -> Verdict:
    """Compare the results of one or two solvers with each other, and each with the evaluator's score of its plan."""
    for result in results:
        if complaint := _wrong_objective(problem, result):
            return Verdict(False, False, complaint)
    if len(results) == 1:
        return _single_verdict(results[0])
    first, second = results
    for result, rival in ((first, second), (second, first)):
        if complaint := _contradiction(problem, result, rival):
            return Verdict(False, False, complaint)
    if first.status == Status.INFEASIBLE and second.status == Status.INFEASIBLE:
        return Verdict(True, True, "DP and ILP agree: no plan satisfies the constraints")
    names = f"{first.solver} and {second.solver}"
    if first.status == second.status == Status.OPTIMAL:
        difference = abs(first.objective_s - second.objective_s) / first.objective_s
        if difference > TOLERANCE:
            return Verdict(True, False, _alone_verdict(*sorted(results, key=lambda result: result.charged)))
        return Verdict(True, True, f"proven optimal: {names} agree to {max(difference, 1e-12):.0e} relative")
    best = min(first.objective_s, second.objective_s)
    bound = max(first.bound_s, second.bound_s)
    gap = max(0.0, 1 - bound / best) if best < float("inf") else 1.0
    limited = first if first.status != Status.OPTIMAL else second
    rival = second if limited is first else first
    if rival.status == Status.OPTIMAL:
        reason = _why_unproven(limited)
        text = f"{rival.solver} proved its plan optimal, but {limited.solver} did not confirm it: {reason}"
        return Verdict(True, False, text)
    return Verdict(True, gap <= TOLERANCE, f"no plan in the searched space is more than {gap:.2%} faster ({names})")


def _alone_verdict(alone: Result, charged: Result) -> str:
    """The verdict on two proven plans of which one was found as if every resource were used alone."""
    return f"{charged.solver} proved its plan optimal; {alone.solver}, which ignores contention, proved a lower bound"


def _single_verdict(result: Result) -> Verdict:
    """The verdict on the result of a single solver, which no other confirms."""
    if result.status == Status.OPTIMAL:
        return Verdict(True, False, f"{result.solver} proved its plan optimal; no second solver was asked")
    return Verdict(
        True,
        False,
        f"{result.solver} did not prove its plan optimal: {_why_unproven(result)}; no second solver was asked",
    )


def _why_unproven(result: Result) -> str:
    """A clause that says why a solver did not prove its plan optimal."""
    if result.plan is None:
        reason = result.note or "it found no plan within the time limit"
        return f"{reason}; its bound is {show_time(result.bound_s)}" if result.bound_s > 0 else reason
    return f"it stopped at a gap of {result.gap:.2%}" + (f", and {result.note}" if result.note else "")


def _wrong_objective(problem: Problem, result: Result) -> str:
    """An error message if a solver's objective differs from the evaluator's score of its plan, else an empty text."""
    if result.plan is None:
        return ""
    score = evaluate(result.plan, problem)
    pace_s = score.pace_s if result.charged else score.alone_s
    if abs(pace_s - result.objective_s) > TOLERANCE * pace_s:
        return f"{result.solver} claims {result.objective_s:.9g} s per minibatch, but its plan takes {pace_s:.9g} s"
    if not score.fits:
        return f"{result.solver} returned a plan that does not fit in memory"
    return ""


def _contradiction(problem: Problem, result: Result, rival: Result) -> str:
    """An error message if `result` found a plan that `rival` proved impossible, else an empty text.

    The plan's pace is that which the rival minimises.
    """
    if result.plan is None:
        return ""
    pace_s = result.objective_s
    if result.charged != rival.charged:
        score = evaluate(result.plan, problem)
        pace_s = score.pace_s if rival.charged else score.alone_s
    if rival.status == Status.INFEASIBLE:
        return f"{rival.solver} claims that there is no plan, but {result.solver} found one of {pace_s:.9g} s"
    if pace_s < rival.bound_s * (1 - TOLERANCE):
        return (
            f"{result.solver} found a plan of {pace_s:.9g} s per minibatch, faster than the bound that "
            f"{rival.solver} claims, {rival.bound_s:.9g} s"
        )
    return ""
