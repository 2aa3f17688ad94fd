"""From a problem to an answer: solve, cross-check, improve under contention, prove, compare with the baselines."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

from pipeplan import baselines, contention, single
from pipeplan.baselines import Baseline
from pipeplan.cuts import Cuts, enumerate_cuts
from pipeplan.diagnose import why_infeasible
from pipeplan.errors import DisagreementError, InfeasibleError
from pipeplan.evaluate import Evaluation, evaluate
from pipeplan.improve import improve, permitted
from pipeplan.plan import Plan
from pipeplan.problem import Problem
from pipeplan.solvers import dp, ilp, threshold
from pipeplan.solvers.certificate import Certificate, certify
from pipeplan.solvers.result import Result, Status
from pipeplan.verdict import TOLERANCE, Verdict, judge

MAXIMUM_CUTS = 50_000
"""Of graphs with more cuts the DP searches a selection; the ILP still sees the whole graph."""

NO_CERTIFICATE = Certificate(None, "none was asked for")


@dataclass(frozen=True)
class Settings:
    """Which solvers, and when they stop."""

    solver: str = "both"
    """`dp`, `ilp` or `both`."""
    backend: str = "highs"
    time_limit_s: float | None = 60.0
    """For each solver."""
    gap: float = 0.0
    """Solvers may stop this close to the best, relative."""
    maximum_cuts: int = MAXIMUM_CUTS
    certify: bool = True
    """Whether to write down a proof that `pipeplan check` can verify."""


@dataclass(frozen=True)
class Outcome:
    """A solved problem."""

    problem: Problem
    plan: Plan
    evaluation: Evaluation
    results: tuple[Result, ...]
    verdict: Verdict
    baselines: tuple[Baseline, ...]
    phases_s: dict[str, float]
    """Seconds spent, by phase."""
    bound_s: float = 0.0
    """No plan in the searched space is faster; of contention only what cores that workers share take at least."""
    certificate: Certificate = NO_CERTIFICATE

    @property
    def objective_s(self) -> float:
        """Seconds per minibatch of the plan."""
        return self.evaluation.pace_s

    @property
    def gap(self) -> float:
        """How far the plan can be from the best, relative."""
        return max(0.0, 1.0 - self.bound_s / self.objective_s) if self.objective_s > 0 else 0.0

    @property
    def status(self) -> Status:
        """`optimal`, or `feasible` within the gap."""
        return Status.OPTIMAL if self.gap <= TOLERANCE else Status.FEASIBLE


class Disagreement(DisagreementError):
    """The solvers contradict each other. `results` holds both plans, to be written down."""

    def __init__(self, message: str, results: tuple[Result, ...]) -> None:
        super().__init__(message)
        self.results = results


def solve(problem: Problem, settings: Settings | None = None) -> Outcome:
    """The best plan for a problem, with its proof and what it gains.

    Raises `InfeasibleError` where nothing satisfies the constraints, `Disagreement` where the solvers contradict. A
    time limit, or Ctrl-C while a solver runs, ends that solver with the best plan so far.
    """
    settings = settings or Settings()
    phases: dict[str, float] = {}
    began = time.perf_counter()
    cuts = enumerate_cuts(problem, settings.maximum_cuts)
    phases["cuts"] = time.perf_counter() - began
    results = _run(problem, cuts, settings)
    phases.update({result.solver: result.seconds for result in results})
    verdict = judge(problem, list(results))
    if not verdict.agree:
        raise Disagreement(f"the solvers disagree, which is a defect of pipeplan: {verdict.text}", results)
    began = time.perf_counter()
    answer = _improved(problem, cuts, settings, results, verdict)
    phases["contention"] = time.perf_counter() - began
    began = time.perf_counter()
    if any(single.binds(result.plan, evaluate(result.plan, problem)) for result in results if result.plan is not None):
        answer = _with_one_stage(problem, cuts, settings, answer)
        phases["one stage"] = time.perf_counter() - began
    began = time.perf_counter()
    certificate = NO_CERTIFICATE if not settings.certify else Certificate(None, "the plan is not proven optimal")
    if settings.certify and answer.proven_s is not None:
        certificate = certify(answer.problem, cuts, answer.proven_s)
    phases["certificate"] = time.perf_counter() - began
    began = time.perf_counter()
    effort = max(result.effort for result in (*results, *answer.results))
    compared = tuple(baselines.compare(problem, cuts, effort))
    phases["baselines"] = time.perf_counter() - began
    bound = max(answer.bound_s, contention.least_s(problem))
    plan, score = _ahead_of(compared, problem, answer.plan, answer.score)
    return Outcome(problem, plan, score, answer.results, answer.verdict, compared, phases, bound, certificate)


@dataclass(frozen=True)
class _Answer:
    """The best plan, and what is known of all others."""

    problem: Problem
    """That the solvers were asked: without plans of one stage where those were tried one by one."""
    plan: Plan
    score: Evaluation
    results: tuple[Result, ...]
    verdict: Verdict
    bound_s: float
    proven_s: float | None
    """What a certificate can show that no plan takes less than."""


def _improved(
    problem: Problem, cuts: Cuts, settings: Settings, results: tuple[Result, ...], verdict: Verdict
) -> _Answer:
    """What the solvers found, improved where plans share cards or cores."""
    plan, score = _best(problem, cuts, settings, results)
    bound = max(result.bound_s for result in results)
    proven = bound >= min(result.objective_s for result in results) * (1 - TOLERANCE)
    least = min(bound, score.alone_s, *_objectives(results)) if proven else None
    return _Answer(problem, plan, score, results, _shared(problem, score, verdict, _objectives(results)), bound, least)


def _with_one_stage(problem: Problem, cuts: Cuts, settings: Settings, first: _Answer) -> _Answer:
    """The answer where plans of one stage, which wait for their update, are tried one by one (`single`)."""
    one = single.best(problem)
    if one is None:
        return first
    # The search near the solvers' plan may have found something else.
    plan, score = one if one[1].pace_s <= first.score.pace_s else (first.plan, first.score)
    several, left = single.without(problem), _left(settings, first.results)
    results = _run(several, cuts, left) if left is not None and single.allows_several(problem) else ()
    if any(result.plan is not None for result in results):
        verdict = judge(several, list(results))
        if not verdict.agree:
            raise Disagreement(f"the solvers disagree, which is a defect of pipeplan: {verdict.text}", results)
        other = _improved(several, cuts, left or settings, results, verdict)
        bound = min(other.bound_s, score.pace_s)
        proven = None if other.proven_s is None else min(other.proven_s, score.pace_s)
        if other.score.pace_s < score.pace_s * (1 - TOLERANCE):
            return replace(other, bound_s=bound, proven_s=proven)
        text = f"{other.verdict.text}; plans of one stage tried one by one"
        # What binds plans of several stages besides only makes them slower.
        closed = bound >= score.pace_s * (1 - TOLERANCE)
        if closed and verdict.proven:
            text = f"{verdict.text} on plans of several stages; those of one tried one by one"
        return _Answer(several, plan, score, results, Verdict(True, closed and verdict.proven, text), bound, proven)
    certain = left is not None and all(result.status == Status.INFEASIBLE for result in results)
    text = "plans of one stage tried one by one, and there are no others"
    stopped = any(result.interrupted for result in (*first.results, *results))
    late = "Ctrl-C, before plans of several stages were tried" if stopped else "no plan of several stages in time"
    verdict = Verdict(True, certain, f"proven optimal: {text}" if certain else late)
    bound = score.pace_s if certain else first.bound_s
    return _Answer(several, plan, score, results or first.results, verdict, bound, bound if certain else None)


def _left(settings: Settings, results: tuple[Result, ...]) -> Settings | None:
    """What the solvers may still use of their time; None where they were interrupted, or have used it up."""
    if any(result.interrupted for result in results):
        return None
    if settings.time_limit_s is None:
        return settings
    left = settings.time_limit_s - max(result.seconds for result in results)
    return replace(settings, time_limit_s=left) if left > 0 else None


def _shared(problem: Problem, score: Evaluation, verdict: Verdict, objectives: list[float]) -> Verdict:
    """What the verdict of the solvers, who leave out what workers share, is worth for a plan with this score."""
    # What a local search found need not be what the solvers agree on, though it keeps its own bound.
    if score.pace_s <= min(score.alone_s, *objectives) * (1 + TOLERANCE):
        return verdict
    if score.pace_s <= contention.least_s(problem) * (1 + TOLERANCE):
        return Verdict(verdict.agree, True, "proven optimal: the cores that the workers share are never idle")
    what = "cores" if problem.cluster.shared_cores else "network cards"
    return Verdict(verdict.agree, False, f"{verdict.text}; all that without shared {what}")


def _objectives(results: tuple[Result, ...]) -> list[float]:
    return [result.objective_s for result in results if result.plan is not None]


def _best(problem: Problem, cuts: Cuts, settings: Settings, results: tuple[Result, ...]) -> tuple[Plan, Evaluation]:
    """The best of the solvers' plans, network cards shared, and of what can be made of them."""
    plans: list[Plan] = [result.plan for result in results if result.plan is not None]
    if not plans:
        if any(result.interrupted for result in results):
            raise KeyboardInterrupt
        if all(result.status != Status.INFEASIBLE for result in results):
            raise InfeasibleError("no plan found within the time limit; give more with --time-limit, or --solver dp")
        raise InfeasibleError(why_infeasible(problem, cuts))
    if problem.options.grid and (other := _best_shape(problem, cuts, settings, results)):
        plans.append(other)
    # Plans within the tolerance are equal: then the first solver's, which has the fewest stages among its equals.
    scores = [evaluate(plan, problem) for plan in plans]
    least = min(score.pace_s for score in scores)
    plan, score = next(pair for pair in zip(plans, scores, strict=True) if pair[1].pace_s <= least * (1 + TOLERANCE))
    better = improve(plan, problem)
    return (plan, score) if better is plan else (better, evaluate(better, problem))


def _best_shape(problem: Problem, cuts: Cuts, settings: Settings, results: tuple[Result, ...]) -> Plan | None:
    """Of the best uniform grids of every shape the one that shares cards and cores best, where that matters.

    A local search does not go from one shape to another. It takes what is left of the time.
    """
    left = _left(settings, results)
    if left is None or not cuts.complete:
        return None
    scores = [evaluate(result.plan, problem) for result in results if result.plan is not None]
    if any(score.pace_s <= score.alone_s * (1 + TOLERANCE) for score in scores):
        return None
    ends = threshold.deadline(left.time_limit_s)
    return dp.best_grid(problem, cuts, lambda plan: evaluate(plan, problem).pace_s, ends)


def _ahead_of(compared: Iterable[Baseline], problem: Problem, plan: Plan, score: Evaluation) -> tuple[Plan, Evaluation]:
    """The plan, or a baseline that is better: under shared cards a local search may miss what is plain."""
    if score.pace_s <= score.alone_s * (1 + TOLERANCE):
        return plan, score
    for other in (baseline.plan for baseline in compared):
        if other is None or not permitted(other, problem):
            continue
        better = evaluate(other, problem)
        if better.pace_s < score.pace_s * (1 - TOLERANCE) and (better.fits or not problem.options.memory):
            plan, score = other, better
    return plan, score


def _run(problem: Problem, cuts: Cuts, settings: Settings) -> tuple[Result, ...]:
    limits = ilp.Limits(seconds=settings.time_limit_s, gap=settings.gap, solver=settings.backend)
    if settings.solver == "ilp":
        return (ilp.solve(problem, limits),)
    first = dp.solve(problem, cuts, settings.time_limit_s, settings.gap)
    # Where the DP has proven that there is no plan, or was interrupted, nobody waits for a second opinion at length.
    if settings.solver == "dp" or first.interrupted:
        return (first,)
    return first, ilp.solve(problem, limits, first.objective_s if first.plan is not None else None)
