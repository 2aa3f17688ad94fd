"""Solves a problem whose schedule gives every worker several stages, and compares the plan with ordinary ones."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from pipeplan.cost.evaluate import Evaluation
from pipeplan.plan.plan import Plan
from pipeplan.plan.schedules import FLUSH
from pipeplan.planning import baselines
from pipeplan.planning.baselines import Baseline
from pipeplan.planning.fast import best_in_time
from pipeplan.planning.figure import Figure
from pipeplan.planning.outcome import Verdict, search_verdict
from pipeplan.planning.virtual_stages.virtual_search import search_virtual
from pipeplan.problem.cuts import enumerate_cuts
from pipeplan.problem.problem import Problem
from pipeplan.solvers.result import Result, Status
from pipeplan.util.deadline import Deadline, OutOfTime

BEST_FLUSH = "best plan of 1f1b-flush"
NO_PROOF = "plans whose workers run several stages are searched for, not proven"


@dataclass(frozen=True)
class VirtualSolution:
    """The parts of an outcome."""

    plan: Plan
    score: Evaluation
    results: tuple[Result, ...]
    verdict: Verdict
    compared: tuple[Baseline, ...]
    figure: Figure
    bound_s: float
    phases_s: dict[str, float]


def solve_with_virtual_stages(problem: Problem, maximum_cuts: int, deadline: Deadline) -> VirtualSolution:
    """The best plan of the problem's schedule that the search finds, and what it is compared with.

    Raises `InfeasibleError` where none fits.
    """
    began = time.perf_counter()
    found = search_virtual(problem, deadline.share(0.6))
    searched_s = time.perf_counter() - began
    best = found.plans[0]
    note = "" if best.simulated_s is not None else "no time was left to simulate it"
    figure = Figure(best.score.step_time_s, best.simulated_s, best.minibatches, note)
    flushing = replace(problem, options=replace(problem.options, schedule=FLUSH, virtual_stages=None, stages=None))
    compared = _baselines(flushing, maximum_cuts, deadline)
    status = Status.FEASIBLE if best.score.step_time_s > found.bound_s * (1 + 1e-6) else Status.OPTIMAL
    result = Result("search", status, best.plan, best.score.step_time_s, found.bound_s, searched_s, charged=True)
    return VirtualSolution(
        best.plan,
        best.score,
        (result,),
        search_verdict(figure.step_s, min(found.bound_s, best.score.step_time_s)),
        compared,
        figure,
        min(found.bound_s, best.score.step_time_s),
        {"search": searched_s, "baselines": time.perf_counter() - began - searched_s},
    )


def _baselines(flushing: Problem, maximum_cuts: int, deadline: Deadline) -> tuple[Baseline, ...]:
    """Data parallelism and grids as ever, and the best plan of 1f1b-flush, whose workers have one stage each."""
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
