"""Solves a problem: runs the solvers, cross-checks them, improves the plan, and compares it with the baselines."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from pipeplan.cost import contention
from pipeplan.cost.evaluate import Evaluation, evaluate
from pipeplan.errors import DisagreementError, InfeasibleError
from pipeplan.plan.plan import Plan
from pipeplan.planning import baselines
from pipeplan.planning.baselines import Baseline, satisfies_options
from pipeplan.planning.charge_results import charge_result, deepened
from pipeplan.planning.infeasibility import why_infeasible
from pipeplan.planning.verdict import TOLERANCE, Verdict, judge_results
from pipeplan.problem.cuts import Cuts, enumerate_cuts
from pipeplan.problem.problem import Problem
from pipeplan.solvers.dp import dynamic_program
from pipeplan.solvers.dp.certificate import Certificate, covers_alone, make_certificate
from pipeplan.solvers.ilp import integer_program
from pipeplan.solvers.result import Result, Status

MAXIMUM_CUTS = 50_000
"""For a graph with more cuts the DP searches a selection of them; the ILP still sees the whole graph."""

NO_CERTIFICATE = Certificate(None, "no certificate was requested")


@dataclass(frozen=True)
class Settings:
    """The solvers to run and their limits."""

    solver: str = "both"
    """`dp`, `ilp` or `both`."""
    backend: str = "highs"
    """The solver of the integer program: `highs` or `cbc`."""
    time_limit_s: float | None = 60.0
    """Seconds for each solver; None for no limit."""
    gap: float = 0.0
    """Relative gap at which a solver may stop before it has proven its plan optimal."""
    maximum_cuts: int = MAXIMUM_CUTS
    certify: bool = True
    """Whether to record a certificate that `pipeplan check` can verify."""


@dataclass(frozen=True)
class Outcome:
    """A solved problem: its best plan, what is proven about the plan, and the baselines."""

    problem: Problem
    plan: Plan
    evaluation: Evaluation
    results: tuple[Result, ...]
    verdict: Verdict
    baselines: tuple[Baseline, ...]
    phases_s: dict[str, float]
    """Wall-clock seconds by phase."""
    bound_s: float = 0.0
    """Lower bound on the pace of every plan in the searched space, in seconds per minibatch, with everything
    charged."""
    certificate: Certificate = NO_CERTIFICATE

    @property
    def objective_s(self) -> float:
        """The plan's pace, in seconds per minibatch."""
        return self.evaluation.pace_s

    @property
    def gap(self) -> float:
        """Upper bound on how much faster, as a fraction of the pace, a better plan could be."""
        return max(0.0, 1.0 - self.bound_s / self.objective_s) if self.objective_s > 0 else 0.0

    @property
    def status(self) -> Status:
        """`optimal` where the gap is at most 1e-6, else `feasible`."""
        return Status.OPTIMAL if self.gap <= TOLERANCE else Status.FEASIBLE


class Disagreement(DisagreementError):
    """Raised where the solvers contradict each other; `results` holds both plans."""

    def __init__(self, message: str, results: tuple[Result, ...]) -> None:
        super().__init__(message)
        self.results = results


def solve(problem: Problem, settings: Settings | None = None) -> Outcome:
    """Find the best plan for a problem, cross-check the solvers, and compare the plan with the baselines.

    A time limit, or Ctrl-C while a solver runs, ends that solver with the best plan so far. Raises `InfeasibleError`
    where no plan satisfies the constraints, `Disagreement` where the solvers contradict each other, and `InputError`
    for settings that do not fit the problem.
    """
    settings = settings or Settings()
    phases: dict[str, float] = {}
    with _timed(phases, "cuts"):
        cuts = enumerate_cuts(problem, settings.maximum_cuts)
    results = _run_solvers(problem, cuts, settings)
    phases.update({result.solver: result.seconds for result in results})
    verdict = _agreed_verdict(problem, results)
    plan, score = _best_plan(problem, cuts, results)
    if (deeper := deepened(plan, problem)) is not plan:
        plan, score = deeper, evaluate(deeper, problem)
    bound = min(max(result.bound_s for result in results), score.pace_s)
    with _timed(phases, "certificate"):
        certificate = _certificate(problem, cuts, settings, results, score)
    with _timed(phases, "baselines"):
        compared = tuple(baselines.compute_baselines(problem, cuts, max(result.effort for result in results)))
    if bound < score.pace_s * (1 - TOLERANCE):
        plan, score = _best_with_baselines(compared, problem, plan, score)
    bound = max(bound, contention.least_pace_of_shared_cores_s(problem))
    return Outcome(problem, plan, score, results, verdict, compared, phases, bound, certificate)


@contextmanager
def _timed(phases: dict[str, float], name: str) -> Iterator[None]:
    """Record the wall-clock seconds of the block as a phase."""
    began = time.perf_counter()
    yield
    phases[name] = time.perf_counter() - began


def _agreed_verdict(problem: Problem, results: tuple[Result, ...]) -> Verdict:
    """The verdict on the solvers' results. Raises `Disagreement` if they contradict each other."""
    verdict = judge_results(problem, list(results))
    if not verdict.agree:
        raise Disagreement(f"the solvers disagree, which is a defect of pipeplan: {verdict.text}", results)
    return verdict


def _certificate(
    problem: Problem, cuts: Cuts, settings: Settings, results: tuple[Result, ...], score: Evaluation
) -> Certificate:
    """The certificate of an answer that is proven optimal, or the reason why there is none.

    It covers the pace with everything charged where that is longer than the pace without shared resources and the wait
    of plain data parallelism, or where only such a certificate can cover the problem.
    """
    if not settings.certify:
        return NO_CERTIFICATE
    charged = problem.options.contention
    proven = [result.bound_s for result in results if result.status == Status.OPTIMAL and result.charged == charged]
    alone = [result.alone_bound_s for result in results if result.alone_bound_s is not None]
    bound = min([*proven, score.pace_s])
    if proven and not alone and score.pace_s <= score.alone_s * (1 + TOLERANCE):
        alone = proven
    if proven and (not alone or bound > max(alone) * (1 + TOLERANCE) or not covers_alone(problem)):
        return make_certificate(problem, cuts, bound, charged=True)
    if not alone:
        return Certificate(None, "the plan is not proven optimal")
    return make_certificate(problem, cuts, min(max(alone), score.alone_s))


def _best_plan(problem: Problem, cuts: Cuts, results: tuple[Result, ...]) -> tuple[Plan, Evaluation]:
    """The best of the solvers' plans, with its score.

    Raises `InfeasibleError` if there is no plan, and `KeyboardInterrupt` if Ctrl-C came before any was found.
    """
    plans: list[Plan] = [result.plan for result in results if result.plan is not None]
    if not plans:
        if any(result.interrupted for result in results):
            raise KeyboardInterrupt
        if all(result.status != Status.INFEASIBLE for result in results):
            raise InfeasibleError("no plan found within the time limit; give more with --time-limit, or --solver dp")
        raise InfeasibleError(why_infeasible(problem, cuts))
    # Plans within the tolerance are equal: keep the first solver's, which has the fewest stages among its equals.
    scores = [evaluate(plan, problem) for plan in plans]
    least = min(score.pace_s for score in scores)
    return next(pair for pair in zip(plans, scores, strict=True) if pair[1].pace_s <= least * (1 + TOLERANCE))


def _best_with_baselines(
    compared: Iterable[Baseline], problem: Problem, plan: Plan, score: Evaluation
) -> tuple[Plan, Evaluation]:
    """The plan and its score, or a faster baseline, for a search that ended before it was finished."""
    for candidate in (baseline.plan for baseline in compared):
        if candidate is None or not satisfies_options(candidate, problem):
            continue
        candidate_score = evaluate(candidate, problem)
        if candidate_score.pace_s < score.pace_s * (1 - TOLERANCE) and (
            candidate_score.fits or not problem.options.memory
        ):
            plan, score = candidate, candidate_score
    return plan, score


def _run_solvers(problem: Problem, cuts: Cuts, settings: Settings) -> tuple[Result, ...]:
    """The results of the solvers that the settings name, the DP first."""
    limits = integer_program.IlpLimits(seconds=settings.time_limit_s, gap=settings.gap, solver=settings.backend)
    if settings.solver == "ilp":
        return (charge_result(integer_program.solve(problem, limits), problem),)
    first = charge_result(dynamic_program.solve(problem, cuts, settings.time_limit_s, settings.gap), problem)
    # If the DP was interrupted, the user does not want to wait for a second solver.
    if settings.solver == "dp" or first.interrupted:
        return (first,)
    cutoff_s = evaluate(first.plan, problem).pace_s if first.plan is not None else None
    return first, charge_result(integer_program.solve(problem, limits, cutoff_s), problem)
