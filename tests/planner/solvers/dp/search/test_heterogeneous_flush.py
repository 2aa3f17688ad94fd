"""The schedules with a flush, and vertical sync in memory, on servers that differ and over parallel links."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from brute_machines import Instance
from extents import first_few
from instances import drawn, mixed_instance, unequal_instance
from solver_contract import check_solvers, solve_by_dp

from pipeplan.cost.evaluate import evaluate
from pipeplan.plan import schedules
from pipeplan.problem.cuts import enumerate_cuts
from pipeplan.problem.problem import Problem
from pipeplan.solvers.dp.budget import OutOfTime, SearchLimits, Step
from pipeplan.solvers.dp.search.flush_search import FlushSearch, PlacementFlushSearch
from pipeplan.solvers.dp.search.heterogeneous_terms import HeterogeneousTerms
from pipeplan.solvers.dp.search.states import SearchStates
from pipeplan.solvers.result import Status

FLUSHING = ("gpipe", "1f1b-flush", "zb-h1")
SCHEDULES = (*FLUSHING, "vertical-sync")
MACHINES = ("parallel", "unequal", "both")


def _problem(seed: int, schedule: str, machines: str) -> tuple[Instance, Problem]:
    draw = unequal_instance if machines in ("unequal", "both") else mixed_instance
    boundary = "parallel" if machines in ("parallel", "both") else "single"
    return drawn(seed, lambda one: replace(draw(one, layers=4, schedule=schedule), boundary=boundary))


@pytest.mark.parametrize("seeds", first_few(range(10), 1))
@pytest.mark.parametrize("machines", MACHINES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_dynamic_program_finds_what_brute_force_finds(schedule: str, machines: str, seeds: range) -> None:
    for seed in seeds:
        check_solvers(*_problem(seed, schedule, machines))


@pytest.mark.slow
@pytest.mark.parametrize("start", range(20_000, 20_250, 50))
@pytest.mark.parametrize("machines", MACHINES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_dynamic_program_finds_what_brute_force_finds_at_length(schedule: str, machines: str, start: int) -> None:
    for seed in range(start, start + 50):
        check_solvers(*_problem(seed, schedule, machines))


@pytest.mark.parametrize("copies", [1, 2])
def test_vertical_sync_keeps_no_fewer_versions_than_stashing(copies: int) -> None:
    """So a search with stashing may rule out vertical sync: at the input stage, and at one behind it that it covers."""
    for first, delay in itertools.product(range(1, 9), range(1, 20)):
        for replicas, depth in itertools.product(range(1, 9), range(1, 12)):
            behind = first + depth * replicas
            if (first, delay) != (replicas, depth) and delay * first < behind:
                continue
            lags = [int(schedules.update_lag(count * copies, False)) for count in (first, replicas)]
            assert schedules.vertical_versions(delay + lags[0], first, replicas) >= depth + lags[1]


def _stop_after(searches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the searches run out of time after so many of them."""
    done = itertools.count()
    for kind in (FlushSearch, PlacementFlushSearch):

        def run(self: FlushSearch, whole: Callable[[FlushSearch], list[Step] | None] = kind.run) -> list[Step] | None:
            if next(done) >= searches:
                raise OutOfTime
            return whole(self)

        monkeypatch.setattr(kind, "run", run)


@pytest.mark.parametrize("seeds", first_few(range(8), 2))
@pytest.mark.parametrize("machines", ["equal", *MACHINES])
@pytest.mark.parametrize("searches", [0, 10, 40])
def test_a_search_that_is_stopped_returns_only_plans_that_fit(
    searches: int, machines: str, seeds: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a limit on memory the search finds plans that do not fit; its bound holds all the same."""
    found = 0
    for seed in seeds:
        for schedule in FLUSHING:
            _, problem = _problem(seed, schedule, machines)
            best = solve_by_dp(problem)
            with monkeypatch.context() as patch:
                _stop_after(searches, patch)
                result = solve_by_dp(problem)
            if result.status == Status.INFEASIBLE:
                assert best.status == Status.INFEASIBLE
                continue
            assert result.bound_s <= best.objective_s * (1 + 1e-9)
            if result.plan is not None:
                found += 1
                score = evaluate(result.plan, problem)
                assert score.fits
                assert score.alone_s == pytest.approx(result.objective_s, rel=1e-6)
                assert result.objective_s >= best.objective_s * (1 - 1e-9)
    assert found > 0 if searches == 40 else found == 0 or searches


def test_of_one_place_only_states_that_no_other_beats_are_compared() -> None:
    """`_thinned` against its definition, on random states with many ties: it may keep more, but never loses one."""
    _, problem = _problem(3, "1f1b-flush", "both")
    terms = HeterogeneousTerms(problem, enumerate_cuts(problem, 10_000))
    search = PlacementFlushSearch(terms, 1.0, SearchLimits(memory=True))
    rng = np.random.default_rng(0)
    thinned = 0
    for _ in range(50):
        count = int(rng.integers(1, 60))
        numbers = rng.integers(0, 2, (10, count)).astype(np.intp)
        criteria = rng.integers(0, 4, (4, count)).astype(float)
        states = SearchStates(numbers, criteria[0], criteria[1:].T)
        place = [tuple(column) for column in search._keys(states).T]
        kept = {(place[row], tuple(criteria[:, row])) for row in search._thinned(states)}
        every = {(place[row], tuple(criteria[:, row])) for row in range(count)}
        front = {
            one
            for one in every
            if not any(
                other != one and other[0] == one[0] and all(a <= b for a, b in zip(other[1], one[1], strict=True))
                for other in every
            )
        }
        assert front <= kept
        thinned += len(kept) < len(every)
    assert thinned > 25
