"""Cross-checks the results of the two solvers, and states what they prove about a plan.

Every plan that pipeplan recommends has passed this check.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pipeplan.cost import contention
from pipeplan.cost.evaluate import Evaluation, evaluate
from pipeplan.problem.problem import Problem
from pipeplan.solvers.result import Result, Status
from pipeplan.util.units import show_time

TOLERANCE = 1e-6
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
    return verdict_of(step_s, bound_s, results, contention.least_pace_of_shared_cores_s(problem))


def verdict_of(step_s: float, bound_s: float, results: Sequence[Result], cores_s: float = 0.0) -> Verdict:
    """The verdict, given the step time that keeps all cores that workers share busy; 0 where none are shared.

    The bound is proven if two solvers show it, or if the shared cores are never idle at it.
    """
    reaches = bound_s * (1 - TOLERANCE)
    provers = tuple(result.solver for result in results if result.bound_s >= reaches)
    if not bound_s > 0:
        return Verdict(True, False, "not proven: how much faster another plan could be is not known", provers)
    others = [result for result in results if result.solver not in provers]
    if len(provers) > 1:
        reason = f"{' and '.join(provers)} agree on the bound"
    elif cores_s >= reaches:
        reason = "the cores that the workers share are never idle at the bound"
    else:
        reason = f"{provers[0]} shows the bound" if provers else "the bound is weaker than a solver's"
        reason += f", and {_unconfirmed(others[0])}" if others else ", and no second solver was asked"
    proven, gap = len(provers) > 1 or cores_s >= reaches, gap_of(step_s, bound_s)
    faster = "faster" if gap <= TOLERANCE else f"more than {percent(gap)} faster"
    text = f"{'proven' if proven else 'not confirmed'}: no plan of the searched space is {faster}; {reason}"
    return Verdict(True, proven, text, provers)


def _unconfirmed(result: Result) -> str:
    """A clause that says why a solver does not confirm the bound."""
    bound = f"its bound is {show_time(result.bound_s)}" if 0 < result.bound_s < math.inf else ""
    if math.isfinite(result.objective_s):
        why = ", and ".join(filter(None, [bound or f"its bound is {show_time(result.bound_s)}", result.note]))
    else:
        why = "; ".join(filter(None, [result.note or "it found no plan within the time limit", bound]))
    return f"{result.solver} does not confirm it: {why}"


def search_verdict(step_s: float, bound_s: float) -> Verdict:
    """The verdict on a plan that a search has found, whose workers run several stages each.

    `bound_s` holds for all plans of its schedule.
    """
    longer = gap_of(step_s, bound_s) if bound_s else 0.0
    text = (
        f"not proven: a search found the plan; it takes {longer:.1%} longer than a bound on all plans of this "
        "schedule, in which nobody waits"
    )
    return Verdict(True, False, text)


def gap_of(step_s: float, bound_s: float) -> float:
    """How much longer than the bound a step takes, relative, so that no plan is faster by more; at least 0."""
    return max(0.0, step_s / bound_s - 1.0) if bound_s > 0 else math.inf


def percent(share: float) -> str:
    """A share in percent, with the digits that tell it from 0."""
    return f"{share:.1%}" if share >= 1e-3 or share == 0 else f"{share * 100:.1g}%"


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
