"""Solves a problem: runs the solvers, cross-checks them, improves the plan, and compares it with the baselines."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from pipeplan.checker import verdict_words
from pipeplan.cost import contention
from pipeplan.cost.evaluate import Evaluation, evaluate
from pipeplan.errors import DisagreementError, InfeasibleError
from pipeplan.plan.plan import Plan
from pipeplan.planning import baselines, single_stage
from pipeplan.planning.baselines import Baseline
from pipeplan.planning.infeasibility import why_infeasible
from pipeplan.planning.local_search import improve_plan, satisfies_options
from pipeplan.planning.verdict import TOLERANCE, Verdict, contradiction, state_verdict
from pipeplan.problem.cuts import Cuts, enumerate_cuts
from pipeplan.problem.problem import Problem
from pipeplan.solvers.dp import dynamic_program, threshold
from pipeplan.solvers.dp.certificate import Certificate, make_certificate
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
    """Lower bound on the pace of every plan of the searched space with everything charged, in seconds per minibatch."""
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
    _refuse_contradiction(problem, results)
    with _timed(phases, "contention"):
        answer = _improve_answer(problem, cuts, settings, results)
    if any(
        single_stage.is_bound_by_allreduce(result.plan, evaluate(result.plan, problem))
        for result in results
        if result.plan is not None
    ):
        with _timed(phases, "one stage"):
            answer = _with_single_stage(problem, cuts, settings, answer)
    with _timed(phases, "certificate"):
        certificate = _certificate(cuts, settings, answer)
    with _timed(phases, "baselines"):
        effort = max(result.effort for result in (*results, *answer.results))
        compared = tuple(baselines.compute_baselines(problem, cuts, effort))
    bound = max(answer.bound_s, contention.least_pace_of_shared_cores_s(problem))
    plan, score = _best_with_baselines(compared, problem, answer.plan, answer.score)
    verdict = state_verdict(problem, score, bound, answer.results, answer.scope)
    return Outcome(problem, plan, score, answer.results, verdict, compared, phases, bound, certificate)


@contextmanager
def _timed(phases: dict[str, float], name: str) -> Iterator[None]:
    """Record the wall-clock seconds of the block as a phase."""
    began = time.perf_counter()
    yield
    phases[name] = time.perf_counter() - began


def _refuse_contradiction(problem: Problem, results: tuple[Result, ...]) -> None:
    """Raise `Disagreement` if the solvers' results contradict each other."""
    if complaint := contradiction(problem, results):
        raise Disagreement(f"the solvers disagree, which is a defect of pipeplan: {complaint}", results)


@dataclass(frozen=True)
class _Answer:
    """The best plan so far and what is proven about all others."""

    problem: Problem
    """The problem that the solvers solved, without plans of one stage where those are scored one by one."""
    plan: Plan
    score: Evaluation
    results: tuple[Result, ...]
    bound_s: float
    proven_s: float | None
    """A bound that a certificate can prove, in seconds per minibatch; None where the plan is not proven optimal."""
    scope: str = verdict_words.ALL
    """Plans that the results are about."""


def _certificate(cuts: Cuts, settings: Settings, answer: _Answer) -> Certificate:
    """The certificate of an answer that is proven optimal, or the reason why there is none."""
    if not settings.certify:
        return NO_CERTIFICATE
    if answer.proven_s is None:
        return Certificate(None, "the plan is not proven optimal")
    return make_certificate(answer.problem, cuts, answer.proven_s)


def _improve_answer(problem: Problem, cuts: Cuts, settings: Settings, results: tuple[Result, ...]) -> _Answer:
    """Improve the solvers' best plan where its transfers share network cards or its workers share cores."""
    plan, score = _best_plan(problem, cuts, settings, results)
    bound = max(result.bound_s for result in results)
    proven = bound >= min(result.objective_s for result in results) * (1 - TOLERANCE)
    least = min(bound, score.alone_s, *_objectives(results)) if proven else None
    return _Answer(problem, plan, score, results, bound, least)


def _with_single_stage(problem: Problem, cuts: Cuts, settings: Settings, first: _Answer) -> _Answer:
    """Combine the plans of one stage, whose update is exposed, with the solvers' answer for several stages."""
    single_best = single_stage.best_single_stage(problem)
    if single_best is None:
        return first
    # The local search near the solvers' plan may have found a faster plan than the best of one stage.
    plan, score = single_best if single_best[1].pace_s <= first.score.pace_s else (first.plan, first.score)
    several_problem, remaining = single_stage.without_single_stage(problem), _remaining(settings, first.results)
    results: tuple[Result, ...] = ()
    if remaining is not None and single_stage.allows_several(problem):
        results = _run_solvers(several_problem, cuts, remaining)
    if any(result.plan is not None for result in results):
        _refuse_contradiction(several_problem, results)
        several_answer = _improve_answer(several_problem, cuts, remaining or settings, results)
        bound = min(several_answer.bound_s, score.pace_s)
        proven = None if several_answer.proven_s is None else min(several_answer.proven_s, score.pace_s)
        if several_answer.score.pace_s < score.pace_s * (1 - TOLERANCE):
            plan, score = several_answer.plan, several_answer.score
        return _Answer(several_problem, plan, score, results, bound, proven, verdict_words.SEVERAL)
    certain = remaining is not None and all(result.status == Status.INFEASIBLE for result in results)
    bound = score.pace_s if certain else first.bound_s
    scope = verdict_words.SEVERAL if results else verdict_words.ONE
    return _Answer(several_problem, plan, score, results or first.results, bound, bound if certain else None, scope)


def _remaining(settings: Settings, results: tuple[Result, ...]) -> Settings | None:
    """The settings with the time that the solvers have left; None if they were interrupted or have used it up."""
    if any(result.interrupted for result in results):
        return None
    if settings.time_limit_s is None:
        return settings
    left = settings.time_limit_s - max(result.seconds for result in results)
    return replace(settings, time_limit_s=left) if left > 0 else None


def _objectives(results: tuple[Result, ...]) -> list[float]:
    return [result.objective_s for result in results if result.plan is not None]


def _best_plan(
    problem: Problem, cuts: Cuts, settings: Settings, results: tuple[Result, ...]
) -> tuple[Plan, Evaluation]:
    """The best of the solvers' plans under contention, improved by the local search.

    Raises `InfeasibleError` if there is no plan, and `KeyboardInterrupt` if Ctrl-C came before any was found.
    """
    plans: list[Plan] = [result.plan for result in results if result.plan is not None]
    if not plans:
        if any(result.interrupted for result in results):
            raise KeyboardInterrupt
        if all(result.status != Status.INFEASIBLE for result in results):
            raise InfeasibleError("no plan found within the time limit; give more with --time-limit, or --solver dp")
        raise InfeasibleError(why_infeasible(problem, cuts))
    if problem.options.grid and (grid_plan := _best_shape(problem, cuts, settings, results)):
        plans.append(grid_plan)
    # Plans within the tolerance are equal: keep the first solver's, which has the fewest stages among its equals.
    scores = [evaluate(plan, problem) for plan in plans]
    least = min(score.pace_s for score in scores)
    plan, score = next(pair for pair in zip(plans, scores, strict=True) if pair[1].pace_s <= least * (1 + TOLERANCE))
    better = improve_plan(plan, problem)
    return (plan, score) if better is plan else (better, evaluate(better, problem))


def _best_shape(problem: Problem, cuts: Cuts, settings: Settings, results: tuple[Result, ...]) -> Plan | None:
    """The uniform grid that is fastest under contention, over the best grid of every shape; None if it cannot matter.

    The local search does not go from one shape to another. This search takes what is left of the time limit.
    """
    remaining = _remaining(settings, results)
    if remaining is None or not cuts.complete:
        return None
    scores = [evaluate(result.plan, problem) for result in results if result.plan is not None]
    if any(score.pace_s <= score.alone_s * (1 + TOLERANCE) for score in scores):
        return None
    ends = threshold.deadline(remaining.time_limit_s)
    return dynamic_program.best_uniform_grid(problem, cuts, lambda plan: evaluate(plan, problem).pace_s, ends)


def _best_with_baselines(
    compared: Iterable[Baseline], problem: Problem, plan: Plan, score: Evaluation
) -> tuple[Plan, Evaluation]:
    """The plan and its score, or a faster baseline: under contention the local search may miss so simple a plan."""
    if score.pace_s <= score.alone_s * (1 + TOLERANCE):
        return plan, score
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
        return (integer_program.solve(problem, limits),)
    first = dynamic_program.solve(problem, cuts, settings.time_limit_s, settings.gap)
    # If the DP was interrupted, the user does not want to wait for a second solver.
    if settings.solver == "dp" or first.interrupted:
        return (first,)
    return first, integer_program.solve(problem, limits, first.objective_s if first.plan is not None else None)
