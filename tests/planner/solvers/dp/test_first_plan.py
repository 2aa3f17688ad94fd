"""Large problems have a plan and a bound at once, and what is reported of a search never gets worse."""

from __future__ import annotations

import pytest
from long_chains import long_chain

from pipeplan.cluster_data.cluster import Cluster, Device, Level
from pipeplan.cost.evaluate import evaluate
from pipeplan.problem.cuts import enumerate_cuts
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.solvers.dp import dynamic_program
from pipeplan.solvers.dp.budget import SearchEffort
from pipeplan.solvers.dp.dynamic_program import LARGE, MonotoneReport, first_plan
from pipeplan.solvers.dp.results import least_step_time_s
from pipeplan.solvers.result import Status

SCHEDULES = ("1f1b-stashing", "vertical-sync", "2bw", "gpipe", "1f1b-flush")


def _problem(schedule: str, *, layers: int = 320, servers: int = 8, memory_mib: int = 500, charged: bool) -> Problem:
    levels = (Level("server", 2, 1e10, 1e-6), Level("cluster", servers, 1e9, 1e-5))
    cluster = Cluster("lab", Device("chip", "cuda", memory_mib << 20), levels)
    accumulate = 32 if schedule in ("2bw", "gpipe", "1f1b-flush") else None
    options = Options(schedule=schedule, accumulate=accumulate, contention=charged, allow_copies=charged)
    return Problem(long_chain(layers), cluster, options)


@pytest.mark.parametrize(
    ("schedule", "charged"), [(schedule, number % 2 == 0) for number, schedule in enumerate(SCHEDULES)]
)
def test_bounds_never_fall_and_plans_never_get_slower(schedule: str, charged: bool) -> None:
    problem = _problem(schedule, charged=charged)
    cuts = enumerate_cuts(problem, 10_000)
    told: list[tuple[float, float]] = []
    effort = SearchEffort(300_000)
    result = dynamic_program.solve(
        problem,
        cuts,
        None,
        0.0,
        lambda *state: told.append(state),
        effort,
        price=lambda plan: evaluate(plan, problem).step_time_s,
    )
    assert told[0] == (least_step_time_s(problem), float("inf"))
    assert told[1][1] < float("inf"), "the first plan is the second thing that is known"
    bounds, step_times = [bound for bound, _ in told], [step_time for _, step_time in told]
    assert bounds == sorted(bounds)
    assert step_times == sorted(step_times, reverse=True)
    assert result.plan is not None
    assert all(bound <= result.objective_s * (1 + 1e-9) for bound in bounds)
    assert step_times[-1] >= result.objective_s * (1 - 1e-9), "the best step time that was told is that of a plan"


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_first_plan_is_one_and_the_answer_where_nothing_else_is_found(schedule: str) -> None:
    problem = _problem(schedule, charged=False)
    cuts = enumerate_cuts(problem, 10_000)
    first = first_plan(problem, cuts, None)
    assert first is not None
    score = evaluate(first.plan, problem)
    assert score.fits
    assert score.step_time_s == pytest.approx(first.step_time_s)
    stopped = dynamic_program.solve(problem, cuts, None, effort=SearchEffort(0))
    assert stopped.status == Status.FEASIBLE
    assert stopped.plan == first.plan
    assert 0 < stopped.bound_s <= stopped.objective_s == first.step_time_s


def test_small_problems_are_not_searched_twice() -> None:
    problem = _problem("1f1b-stashing", layers=20, servers=4, memory_mib=500, charged=True)
    cuts = enumerate_cuts(problem, 10_000)
    assert len(cuts.ideals) * problem.cluster.workers < LARGE
    assert first_plan(problem, cuts, None) is None


def test_a_report_passes_on_only_what_is_better() -> None:
    told: list[tuple[float, float]] = []
    report = MonotoneReport(lambda *state: told.append(state))
    inf = float("inf")
    for state in [(1.0, inf), (0.5, inf), (0.5, 4.0), (2.0, 5.0), (inf, inf), (2.0, 4.0), (3.0, 3.0)]:
        report(*state)
    assert told == [(1.0, inf), (1.0, 4.0), (2.0, 4.0), (3.0, 3.0)]
