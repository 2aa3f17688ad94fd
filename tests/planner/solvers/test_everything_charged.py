"""The dynamic program with everything charged (shared cards, ports and cores, the wait of plain data parallelism) finds
and proves what trying every plan finds."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from brute_force import best
from brute_machines import Instance
from extents import first_few
from instances import (
    ALL_SCHEDULES,
    crowded_instance,
    drawn,
    mixed_instance,
    random_instance,
    unequal_instance,
)
from solver_contract import solve_by_dp

from pipeplan.cost.evaluate import evaluate
from pipeplan.problem.cuts import enumerate_cuts
from pipeplan.problem.problem import Problem
from pipeplan.solvers.dp import dynamic_program
from pipeplan.solvers.result import Status


def _drawn(seed: int) -> tuple[Instance, Problem]:
    """Uniform clusters and servers that differ, all schedules, more and less traffic."""
    draw = (random_instance, mixed_instance, unequal_instance, crowded_instance)[seed % 4]
    chosen = {} if draw is random_instance else {"schedule": ALL_SCHEDULES[seed // 4 % 5]}
    return drawn(seed, lambda number: replace(draw(number, layers=5, **chosen), contention=True))


def _matters(seed: int) -> bool:
    """Hold the DP to the oracle; whether what is shared makes the best plan slower."""
    instance, problem = _drawn(seed)
    expected_s, result = best(instance), solve_by_dp(problem)
    if math.isinf(expected_s):
        assert result.status == Status.INFEASIBLE, seed
        return False
    assert result.status == Status.OPTIMAL, (seed, result.note)
    assert result.charged
    assert result.plan is not None
    score = evaluate(result.plan, problem)
    assert result.objective_s == pytest.approx(expected_s, rel=1e-6), seed
    assert score.step_time_s == pytest.approx(expected_s, rel=1e-6), seed
    assert result.bound_s == pytest.approx(expected_s, rel=1e-6), seed
    assert score.fits, seed
    return best(replace(instance, contention=False)) < expected_s * (1 - 1e-9)


@pytest.mark.parametrize("seeds", first_few(range(30), 16))
def test_it_finds_what_trying_every_plan_finds(seeds: range) -> None:
    assert sum(_matters(seed) for seed in seeds) > len(seeds) / 20, "chosen so that what is shared often matters"


@pytest.mark.slow
@pytest.mark.parametrize("start", range(1000, 3000, 100))
def test_it_finds_what_trying_every_plan_finds_at_length(start: int) -> None:
    assert sum(_matters(seed) for seed in range(start, start + 100)) > 5


def _ends_early(seed: int) -> bool:
    """Hold the DP with a step time from which plans are of no use to the DP without; whether it ended early."""
    _, problem = _drawn(seed)
    cuts = enumerate_cuts(problem, 1000)
    whole = dynamic_program.solve(problem, cuts)
    if whole.plan is None:
        return False
    barely = dynamic_program.solve(problem, cuts, useful_s=whole.objective_s * (1 + 1e-6))
    assert barely.objective_s == pytest.approx(whole.objective_s, rel=1e-9), seed
    assert barely.bound_s == pytest.approx(whole.objective_s, rel=1e-9), seed
    nothing = dynamic_program.solve(problem, cuts, useful_s=whole.objective_s * 0.95)
    assert nothing.objective_s >= whole.objective_s * (1 - 1e-9), seed
    assert whole.objective_s * 0.95 <= nothing.bound_s * (1 + 1e-9) <= whole.objective_s * (1 + 2e-9), seed
    return nothing.bound_s < whole.objective_s * (1 - 1e-6)


@pytest.mark.parametrize("seeds", first_few(range(400), 12))
def test_a_search_ends_where_only_slower_plans_are_left(seeds: range) -> None:
    assert sum(_ends_early(seed) for seed in seeds) > len(seeds) / 20
