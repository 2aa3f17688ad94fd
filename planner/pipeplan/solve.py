"""From a problem to an answer: solve, cross-check, compare with the baselines."""

from __future__ import annotations

import time
from dataclasses import dataclass

from pipeplan import baselines
from pipeplan.baselines import Baseline
from pipeplan.cuts import Cuts, enumerate_cuts
from pipeplan.diagnose import why_infeasible
from pipeplan.errors import DisagreementError, InfeasibleError, InputError
from pipeplan.evaluate import Evaluation, evaluate
from pipeplan.plan import Plan
from pipeplan.problem import Problem
from pipeplan.solvers import dp, ilp, published
from pipeplan.solvers.result import Result, Status
from pipeplan.verdict import TOLERANCE, Verdict, judge

MAXIMUM_CUTS = 2000
"""Graphs with more cuts are searched along one order of their layers by the DP; the ILP still sees the whole graph."""


@dataclass(frozen=True)
class Settings:
    """Which solvers, and when they stop."""

    solver: str = "both"
    """`dp`, `ilp` or `both`."""
    cost_model: str = "pipeplan"
    """`pipeplan`, or a published variant: `pipedream-code`, `pipedream-paper`."""
    backend: str = "highs"
    time_limit_s: float | None = 60.0
    """For the ILP."""
    maximum_cuts: int = MAXIMUM_CUTS


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
    published: tuple[float, float] | None = None
    """With a published variant: its own pace, and its own figure for data parallelism."""


class Disagreement(DisagreementError):
    """The solvers contradict each other. `results` holds both plans, to be written down."""

    def __init__(self, message: str, results: tuple[Result, ...]) -> None:
        super().__init__(message)
        self.results = results


def solve(problem: Problem, settings: Settings | None = None) -> Outcome:
    """The best plan for a problem, with its proof and what it gains.

    Raises `InfeasibleError` where nothing satisfies the constraints, `Disagreement` where the solvers contradict.
    """
    settings = settings or Settings()
    began = time.perf_counter()
    cuts = enumerate_cuts(problem, settings.maximum_cuts)
    phases = {"cuts": time.perf_counter() - began}
    results = _run(problem, cuts, settings)
    phases.update({result.solver: result.seconds for result in results})
    published_figures = None
    if settings.cost_model in published.NAMES:
        verdict = _published_verdict(problem, results[0], settings.cost_model)
        published_figures = results[0].objective_s, published.data_parallel_time(problem, settings.cost_model)
    else:
        verdict = judge(problem, list(results))
    if not verdict.agree:
        raise Disagreement(f"the solvers disagree, which is a defect of pipeplan: {verdict.text}", results)
    # Plans within the tolerance are equal: then the first solver's, which has the fewest stages among its equals.
    least = min(result.objective_s for result in results)
    best = next(result for result in results if result.objective_s <= least * (1 + TOLERANCE))
    if best.plan is None:
        if all(result.status == Status.TIME_LIMIT for result in results):
            raise InfeasibleError("no plan found within the time limit; give more with --time-limit, or --solver dp")
        raise InfeasibleError(why_infeasible(problem, cuts))
    began = time.perf_counter()
    compared = tuple(baselines.compare(problem, cuts))
    phases["baselines"] = time.perf_counter() - began
    score = evaluate(best.plan, problem)
    return Outcome(problem, best.plan, score, results, verdict, compared, phases, published_figures)


def _published_verdict(problem: Problem, result: Result, name: str) -> Verdict:
    text = f"by the published formulas of {name}, which have no second solver and no limit on memory"
    if result.plan is not None and not evaluate(result.plan, problem).fits:
        text += "; this plan does not fit in memory"
    return Verdict(True, False, text)


def _run(problem: Problem, cuts: Cuts, settings: Settings) -> tuple[Result, ...]:
    if settings.cost_model in published.NAMES:
        options = problem.options
        if options.stages is not None or options.max_replicas is not None:
            raise InputError(
                f"the cost model {settings.cost_model} has no constraints: leave out --stages, --max-replicas"
            )
        return (published.solve(problem, cuts, settings.cost_model),)
    if settings.cost_model != "pipeplan":
        raise InputError(f"there is no cost model {settings.cost_model!r}")
    limits = ilp.Limits(seconds=settings.time_limit_s, solver=settings.backend)
    if settings.solver == "ilp":
        return (ilp.solve(problem, limits),)
    first = dp.solve(problem, cuts)
    if settings.solver == "dp":
        return (first,)
    return first, ilp.solve(problem, limits, first.objective_s if first.plan is not None else None)
