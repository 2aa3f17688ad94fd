"""Cross-checks the results of the two solvers, and states what they prove about a plan.

Every plan that pipeplan recommends has passed this check. The words are those of `pipeplan.checker.verdict_words`,
from which `pipeplan check` derives them again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeplan.checker import verdict_words
from pipeplan.checker.verdict_words import ProofState, SolverAnswer
from pipeplan.cost import contention
from pipeplan.cost.evaluate import Evaluation, evaluate
from pipeplan.problem.problem import Problem
from pipeplan.solvers.result import Result, Status

TOLERANCE = verdict_words.TOLERANCE
"""Relative. Plans this close are equal for the verdict; both solvers work to a thousandth of this tolerance."""


@dataclass(frozen=True)
class Verdict:
    """The statement of what is proven about a plan, with everything charged."""

    agree: bool
    """Whether the solvers' answers are free of contradictions. A plan with contradictions is not written."""
    proven: bool
    """Whether two solvers show the bound on faster plans, or a reason that needs none."""
    text: str
    """One sentence for the user."""
    provers: tuple[str, ...] = ()
    """The solvers that show the bound."""


def state_verdict(problem: Problem, step_s: float, bound_s: float, results: Sequence[Result]) -> Verdict:
    """The verdict on a plan with this step time.

    `bound_s` is a lower bound on the step time of every plan of the searched space, in seconds per minibatch.
    """
    state = ProofState(
        step_s=step_s,
        bound_s=bound_s,
        answers=tuple(_answer(result) for result in results),
        cores_s=contention.least_pace_of_shared_cores_s(problem),
    )
    return Verdict(True, state.proven, state.text, state.provers)


def _answer(result: Result) -> SolverAnswer:
    return SolverAnswer(
        result.solver, str(result.status), result.objective_s, result.bound_s, result.note, result.charged
    )


def contradiction(problem: Problem, results: Sequence[Result]) -> str:
    """A complaint where one or two solvers contradict the evaluator or each other, else an empty text."""
    scores = [None if result.plan is None else evaluate(result.plan, problem) for result in results]
    for result, score in zip(results, scores, strict=True):
        if score is not None and (complaint := _wrong_objective(result, score)):
            return complaint
    for rival in results:
        for result, score in zip(results, scores, strict=True):
            if result is not rival and score is not None and (complaint := _beaten_bound(result, score, rival)):
                return complaint
    return ""


def _wrong_objective(result: Result, score: Evaluation) -> str:
    """A complaint if a solver's objective differs from the evaluator's score of its plan, else an empty text."""
    pace_s = score.pace_s if result.charged else score.alone_s
    if abs(pace_s - result.objective_s) > TOLERANCE * pace_s:
        return f"{result.solver} claims {result.objective_s:.9g} s per minibatch, but its plan takes {pace_s:.9g} s"
    if not score.fits:
        return f"{result.solver} returned a plan that does not fit in memory"
    return ""


def _beaten_bound(result: Result, score: Evaluation, rival: Result) -> str:
    """A complaint if `result` has a plan, with this score, that `rival` proved impossible, else an empty text."""
    if rival.status == Status.INFEASIBLE:
        return (
            f"{rival.solver} claims that there is no plan, but {result.solver} found one of {result.objective_s:.9g} s"
        )
    pace_s = score.pace_s if rival.charged else score.alone_s
    if pace_s < rival.bound_s * (1 - TOLERANCE):
        return (
            f"{result.solver} found a plan of {pace_s:.9g} s per minibatch, faster than the bound that {rival.solver} "
            f"claims, {rival.bound_s:.9g} s"
        )
    return ""
