"""Solvers and evaluator on servers that differ, against the oracle."""

from __future__ import annotations

import random
from dataclasses import replace

import brute_force
import pytest
from brute_machines import Instance, Machine
from extents import first_few
from instances import drawn, mixed_instance, unequal_instance
from solver_contract import assert_proves, solve_by_dp, solve_by_ilp

from pipeplan.cluster_data.cluster import Cluster, Device, Level, Server
from pipeplan.errors import InputError
from pipeplan.problem.cuts import enumerate_cuts
from pipeplan.problem.problem import Problem
from pipeplan.solvers.dp import dynamic_program, find_pipeline
from pipeplan.solvers.dp.search import placement_search, states
from pipeplan.solvers.plan_space import plan_spaces
from pipeplan.solvers.result import Status

SCHEDULES = ("1f1b-stashing", "2bw", "gpipe", "1f1b-flush", "vertical-sync")


def _drawn(seed: int) -> tuple[float, Problem]:
    """What the oracle says of a random problem, and the problem."""
    instance, problem = drawn(seed, lambda one: unequal_instance(one, schedule=SCHEDULES[seed % len(SCHEDULES)]))
    return brute_force.best(instance), problem


def _dp(seed: int) -> None:
    expected, problem = _drawn(seed)
    assert_proves(solve_by_dp(problem), expected, problem)


def _ilp(seed: int) -> None:
    expected, problem = _drawn(seed)
    if problem.options.boundary == "single" and problem.options.schedule in SCHEDULES[:2]:
        assert_proves(solve_by_ilp(problem), expected, problem)


@pytest.mark.parametrize("seeds", first_few(range(60), 5))
def test_the_dynamic_program_finds_what_brute_force_finds(seeds: range) -> None:
    for seed in seeds:
        _dp(seed)


@pytest.mark.parametrize("seeds", first_few(range(20), 10))
def test_the_integer_program_finds_what_brute_force_finds(seeds: range) -> None:
    for seed in seeds:
        _ilp(seed)


def _racks(seed: int) -> Instance:
    """Equal racks of two servers that differ, so that copies may keep to the servers with the faster cards."""
    rng = random.Random(f"racks {seed}")
    found = mixed_instance(seed, layers=4, schedule=SCHEDULES[seed % len(SCHEDULES)])
    rack = [Machine(1, rng.choice([1.0, 1.0, 2.0]), 1.0, (100.0, 0.0), rng.choice([0.0, 1.0, 5.0])) for _ in range(2)]
    count = rng.choice([2, 3])
    levels = [(0, 0.0, 0.0), (2, 20.0, 0.0), (count, rng.choice([4.0, 50.0]), 0.0)]
    free = {"stages": None, "max_workers": None, "contention": seed % 2 == 0}
    return replace(found, levels=levels, servers=tuple(rack) * count, **free)


@pytest.mark.parametrize("seeds", first_few(range(30), 12))
def test_copies_keep_to_servers_with_fast_cards(seeds: range) -> None:
    spared = 0
    for seed in seeds:
        instance, problem = drawn(seed, _racks)
        assert_proves(solve_by_dp(problem), brute_force.best(instance), problem)
        spared += any(space.unused for space in plan_spaces(problem))
    assert spared > len(seeds) / 10


@pytest.mark.slow
@pytest.mark.parametrize("start", [60, *range(10_000, 11_000, 50)])
def test_the_dynamic_program_finds_what_brute_force_finds_at_length(start: int) -> None:
    for seed in range(start, start + 50):
        _dp(seed)


@pytest.mark.slow
@pytest.mark.parametrize("start", [20, *range(10_000, 10_200, 20)])
def test_the_integer_program_finds_what_brute_force_finds_at_length(start: int) -> None:
    for seed in range(start, start + 20):
        _ilp(seed)


@pytest.mark.parametrize("seeds", first_few(range(300, 320), 2))
def test_few_stages_at_a_time_give_the_same_answer(seeds: range, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in seeds:
        expected, problem = _drawn(seed)
        monkeypatch.setattr(placement_search, "AT_ONCE", 5)
        monkeypatch.setattr(states, "_KEPT_PIECE", 3)
        assert_proves(solve_by_dp(problem), expected, problem)


def test_more_workers_than_can_be_searched_are_refused() -> None:
    _, problem = _drawn(1)
    servers = [
        Server(Device("d", "cpu", 10**9), Level("server", size, 1e9)) for size in (find_pipeline.MOST_WORKERS, 1)
    ]
    large = problem.within(Cluster.of_servers("large", servers, [Level("cluster", 2, 1e9)]))
    with pytest.raises(InputError, match=r"large has 1025 workers; with servers that differ .* at most 1024"):
        dynamic_program.solve(large, enumerate_cuts(large, 10_000))


def test_a_deadline_ends_the_search() -> None:
    _, problem = _drawn(2)
    result = dynamic_program.solve(problem, enumerate_cuts(problem, 10_000), seconds=0.0)
    assert result.status == Status.TIME_LIMIT
    assert result.plan is None
