"""Runs the solvers, refuses results that contradict each other, takes the better plan, and certifies the bound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipeplan.cost.evaluate import Evaluation, evaluate
from pipeplan.errors import DisagreementError, InfeasibleError, NotFoundInTimeError
from pipeplan.plan.plan import Plan
from pipeplan.planning import fast
from pipeplan.planning.fast import USEFUL, best_of_known, deepened
from pipeplan.planning.infeasibility import why_infeasible
from pipeplan.planning.outcome import TOLERANCE, contradiction
from pipeplan.planning.settings import SHARES, ProgressTracker, Settings
from pipeplan.problem.cuts import Cuts
from pipeplan.problem.problem import Problem
from pipeplan.solvers.dp import dynamic_program
from pipeplan.solvers.dp.certificate import Certificate, make_certificate
from pipeplan.solvers.ilp import integer_program
from pipeplan.solvers.result import Result, Status
from pipeplan.util.deadline import Deadline


@dataclass(frozen=True)
class Means:
    """The settings and the deadline of a solve, and the tracker that it reports to."""

    settings: Settings
    deadline: Deadline
    tracker: ProgressTracker

    def share(self, phase: str) -> Deadline:
        """The deadline of a phase that begins now."""
        return self.deadline.share(SHARES[phase])


class Disagreement(DisagreementError):
    """Raised if the solvers contradict each other; `results` has both plans."""

    def __init__(self, message: str, results: tuple[Result, ...]) -> None:
        super().__init__(message)
        self.results = results


def run_solvers(problem: Problem, cuts: Cuts, means: Means, known: Sequence[Plan]) -> tuple[Result, ...]:
    """The results of the solvers that the settings name, the DP's first.

    The DP ignores plans slower than the best of `known`.
    """
    settings, tracker = means.settings, means.tracker
    results: list[Result] = []
    if settings.solver != "ilp":
        tracker.phase("DP")
        ends = means.share("last" if settings.solver == "dp" else "first")
        best_known = best_of_known(known, problem)
        useful_s = float("inf")
        if best_known is not None:
            useful_s = best_known.step_time_s * USEFUL
            tracker.narrowed(0.0, best_known.step_time_s)
        found = dynamic_program.solve(
            problem,
            cuts,
            ends.left_s,
            settings.gap,
            tracker.narrowed,
            useful_s=useful_s,
            near=best_known is not None,
            price=lambda plan: evaluate(plan, problem).step_time_s,
        )
        results.append(charge_result(found, problem))
        # After Ctrl-C in the DP, the user does not want to wait for a second solver.
        if settings.solver == "dp" or found.interrupted:
            return tuple(results)
        tracker.narrowed(results[0].bound_s if cuts.complete else 0.0, results[0].objective_s)
    tracker.phase("ILP")
    cutoff = results[0].objective_s if results and results[0].plan is not None else None
    proven = bool(results) and results[0].status == Status.OPTIMAL
    ends = means.deadline.share(SHARES["last"], settings.confirm_s if proven else None)
    limits = integer_program.IlpLimits(ends.left_s, settings.gap)
    results.append(charge_result(integer_program.solve(problem, limits, cutoff), problem))
    return tuple(results)


def charge_result(result: Result, problem: Problem) -> Result:
    """The result with its plan's full step time as the objective, contention included.

    The bound still holds, because contention makes no plan faster. A result whose solver has already charged contention
    is returned unchanged.
    """
    if result.charged or result.plan is None or not problem.options.contention:
        return result
    step_time = evaluate(result.plan, problem).step_time_s
    if step_time <= result.objective_s * (1 + fast.TOLERANCE):
        return replace(result, charged=True)
    note = result.note or f"{result.solver} leaves out the contention for shared resources"
    return replace(result, charged=True, objective_s=step_time, status=Status.FEASIBLE, note=note)


def refuse_contradiction(problem: Problem, results: tuple[Result, ...]) -> None:
    """Raise `Disagreement` if the solvers' results contradict each other."""
    if complaint := contradiction(problem, results):
        raise Disagreement(f"the solvers disagree, which is a defect of pipeplan: {complaint}", results)


def best_plan(
    problem: Problem,
    cuts: Cuts,
    means: Means,
    results: tuple[Result, ...],
    known: Sequence[Plan],
    *,
    deepen: bool = True,
) -> tuple[Plan, Evaluation]:
    """The best of the solvers' plans, with its score; `deepen` gives it the depths that bursts need.

    If the solvers found no plan in time, the result is one of the `known` plans.

    Raises `InfeasibleError` if there is no plan, `NotFoundInTimeError` if none was found in time, and
    `KeyboardInterrupt` if Ctrl-C came before any plan was found.
    """
    plans: list[Plan] = [result.plan for result in results if result.plan is not None]
    if all(result.status != Status.INFEASIBLE for result in results):
        plans = plans or list(known)
    if not plans:
        if any(result.interrupted for result in results):
            raise KeyboardInterrupt("no plan was found until then")
        if all(result.status != Status.INFEASIBLE for result in results):
            raise NotFoundInTimeError(
                "no plan was found within the time limit; give more with --time-limit, or --solver dp"
            )
        means.tracker.phase("why no plan fits")
        raise InfeasibleError(why_infeasible(problem, cuts, means.share("diagnosis")))
    # Plans within the tolerance are equal: keep the first solver's plan, which has the fewest stages among equals.
    scores = [evaluate(plan, problem) for plan in plans]
    least = min(score.step_time_s for score in scores)
    plan, score = next(
        pair for pair in zip(plans, scores, strict=True) if pair[1].step_time_s <= least * (1 + TOLERANCE)
    )
    return deepened(plan, problem) if deepen else (plan, score)


def certificate_of(
    problem: Problem, cuts: Cuts, results: Sequence[Result], score: Evaluation, deadline: Deadline
) -> Certificate:
    """The certificate of the bound that the solvers have proven, or the reason why there is none.

    If several results are proven optimal, the smallest of their bounds is certified, because a larger one may be too
    large by a rounding error.
    """
    proven = [result.bound_s for result in results if result.status == Status.OPTIMAL]
    bound_s = min(proven) if proven else max(result.bound_s for result in results)
    if bound_s <= 0:
        return Certificate(None, "no bound is proven")
    return make_certificate(problem, cuts, min(bound_s, score.step_time_s), deadline)
