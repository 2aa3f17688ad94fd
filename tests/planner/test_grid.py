"""Uniform grids against brute force, which tries them all, by both solvers; and what they are restricted to."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import brute_force
import pytest
from instances import ALL_SCHEDULES, Instance, drawn, mixed_instance, unequal_instance

from pipeplan.cuts import enumerate_cuts
from pipeplan.evaluate import evaluate
from pipeplan.grid import shape_of
from pipeplan.problem import Problem
from pipeplan.solvers import dp, ilp
from pipeplan.solvers.result import Result, Status

Draw = Callable[..., Instance]


def _grid(seed: int, draw: Draw, schedule: str | None, layers: int = 5) -> tuple[Instance, Problem]:
    return drawn(seed, lambda number: replace(draw(number, layers=layers, schedule=schedule), grid=True))


def _check(instance: Instance, problem: Problem, *, cold: bool) -> None:
    """Both solvers find what brute force finds; the integer program by itself, or with the bound of the other."""
    expected = brute_force.best(instance)
    first = dp.solve(problem, enumerate_cuts(problem, 10_000))
    _agrees(first, expected, problem)
    cutoff = None if cold or first.plan is None else first.objective_s
    second = ilp.solve(problem, ilp.Limits(), cutoff_s=cutoff)
    if "not expressed" in second.note:
        assert instance.schedule == "vertical-sync"
        assert second.bound_s <= expected * (1 + 1e-6)
        return
    _agrees(second, expected, problem)


def _agrees(result: Result, expected: float, problem: Problem) -> None:
    if math.isinf(expected):
        assert result.status == Status.INFEASIBLE
        return
    assert result.status == Status.OPTIMAL
    assert result.plan is not None
    assert result.objective_s == pytest.approx(expected, rel=1e-6)
    score = evaluate(result.plan, problem)
    assert score.fits
    assert score.alone_s == pytest.approx(expected, rel=1e-6)
    assert shape_of(result.plan, problem.cluster) is not None


@pytest.mark.parametrize("draw", [mixed_instance, unequal_instance], ids=["equal", "unequal"])
@pytest.mark.parametrize("schedule", [None, *ALL_SCHEDULES])
def test_both_solvers_find_the_best_uniform_grid(schedule: str | None, draw: Draw) -> None:
    for seed in range(3):
        _check(*_grid(seed, draw, schedule), cold=seed % 2 == 0)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(30_000, 30_200, 50))
@pytest.mark.parametrize("draw", [mixed_instance, unequal_instance], ids=["equal", "unequal"])
@pytest.mark.parametrize("schedule", [None, *ALL_SCHEDULES])
def test_both_solvers_find_the_best_uniform_grid_at_length(schedule: str | None, draw: Draw, start: int) -> None:
    for seed in range(start, start + 50):
        _check(*_grid(seed, draw, schedule, layers=6), cold=seed % 2 == 0)
