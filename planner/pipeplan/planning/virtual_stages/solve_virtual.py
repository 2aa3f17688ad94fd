"""Solves a problem whose schedule gives every worker several stages, and compares the plan with ordinary plans."""

from __future__ import annotations

import time
from dataclasses import replace

from pipeplan.plan.schedules import FLUSH
from pipeplan.planning import baselines
from pipeplan.planning.baselines import Baseline
from pipeplan.planning.fast import best_in_time
from pipeplan.planning.outcome import NO_CERTIFICATE, Outcome, search_verdict
from pipeplan.planning.settings import Settings
from pipeplan.planning.virtual_stages.virtual_search import search_virtual
from pipeplan.problem.cuts import enumerate_cuts
from pipeplan.problem.problem import Problem
from pipeplan.solvers.dp.certificate import Certificate
from pipeplan.solvers.result import Result, Status
from pipeplan.util.deadline import Deadline, OutOfTime

BEST_FLUSH = "best plan of 1f1b-flush"
NO_PROOF = "plans whose workers run several stages are searched for, not proven"


def solve_with_virtual_stages(problem: Problem, settings: Settings, deadline: Deadline) -> Outcome:
    """The best plan of the problem's schedule that the search finds, with its baselines, but without a certificate.

    Raises `InfeasibleError` if no plan fits.
    """
    began = time.perf_counter()
    found = search_virtual(problem, deadline.share(0.6))
    searched_s = time.perf_counter() - began
    best = found.plans[0]
    step_s, bound_s = best.score.step_time_s, min(found.bound_s, best.score.step_time_s)
    flushing = replace(problem, options=replace(problem.options, schedule=FLUSH, virtual_stages=None, stages=None))
    compared = _baselines(flushing, settings.maximum_cuts, deadline)
    status = Status.FEASIBLE if step_s > found.bound_s * (1 + 1e-6) else Status.OPTIMAL
    return Outcome(
        problem,
        best.plan,
        best.score,
        (Result("search", status, best.plan, step_s, found.bound_s, searched_s, charged=True),),
        search_verdict(best.step_s, bound_s),
        compared,
        {"search": searched_s, "baselines": time.perf_counter() - began - searched_s},
        bound_s,
        Certificate(None, NO_PROOF) if settings.certify else NO_CERTIFICATE,
        best.figure,
    )


def _baselines(flushing: Problem, maximum_cuts: int, deadline: Deadline) -> tuple[Baseline, ...]:
    """The usual baselines, and the best plan of 1f1b-flush, whose workers have one stage each."""
    try:
        cuts = enumerate_cuts(flushing, maximum_cuts, deadline.share(0.2))
    except OutOfTime:
        return tuple(baselines.unsearched_baselines(flushing, baselines.NO_TIME, (BEST_FLUSH,)))
    uniform = baselines.data_parallelism(flushing), baselines.uniform_grid(flushing, cuts, deadline.share(0.3))
    best, in_time = best_in_time(flushing, maximum_cuts, deadline.share(0.8), 0.01)
    if best is None:
        remark = "no plan fits in memory" if in_time else baselines.NO_TIME
        return (*uniform, Baseline(BEST_FLUSH, None, "", remark))
    return (*uniform, Baseline(BEST_FLUSH, best.step_time_s, best.plan.config, "found by the DP alone", best.plan))
