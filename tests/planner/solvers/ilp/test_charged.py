"""The integer program with everything charged against brute force: shared cards and cores, and the wait for updates."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import brute_force
import pytest
from brute_machines import Instance
from extents import first_few
from instances import ALL_SCHEDULES, crowded_instance, drawn, mixed_instance, to_problem, unequal_instance
from solver_contract import check_ilp, solve_by_dp, solve_by_ilp

from pipeplan.cluster_data.cluster import Cluster, Device, Level
from pipeplan.cost.evaluate import WAITS_FOR_UPDATE, evaluate
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.layers import Layer
from pipeplan.profile_data.profile import Profile
from pipeplan.solvers.ilp import backend, integer_program
from pipeplan.solvers.result import Status

Draw = Callable[..., Instance]
DRAWS: tuple[Draw, ...] = (mixed_instance, unequal_instance, crowded_instance)
KINDS = [(draw, schedule) for draw in DRAWS for schedule in (None, *ALL_SCHEDULES)]
# Uniform clusters on which a stage can reach beyond both ends of a server.
WIDE = [(2, 4), (4, 2), (2, 3), (3, 2), (2, 2, 2), (1, 6), (2, 3, 1)]
_named = pytest.mark.parametrize(("draw", "schedule"), KINDS, ids=lambda what: getattr(what, "__name__", what))


def _charged(seed: int, draw: Draw, schedule: str | None, layers: int) -> tuple[Instance, Problem]:
    """A random problem with contention; workers of two thirds share their server's cores."""
    return drawn(seed, lambda one: replace(draw(one, layers=layers, schedule=schedule), contention=True, cores=one % 3))


def _wide(seed: int, layers: int) -> tuple[Instance, Problem]:
    """A problem on 6 to 8 workers of equal servers, whose cards are slower than the ports inside."""

    def wide(number: int) -> Instance:
        rng = random.Random(f"wide {number}")
        found = mixed_instance(number, layers=layers, schedule=rng.choice(["1f1b-stashing", *ALL_SCHEDULES]))
        rates = sorted((rng.choice([4.0, 8.0, 20.0, 60.0]) for _ in range(3)), reverse=True)
        shape = rng.choice(WIDE)
        levels = [(count, rate, 0.0) for count, rate in zip(shape, rates, strict=False)]
        free = {"max_workers": None, "max_stages": None, "stages": None, "pins": ()}
        return replace(found, **free, levels=levels, contention=True, cores=number % 3)  # type: ignore[arg-type]

    return drawn(seed, wide)


@_named
def test_it_finds_what_brute_force_finds(draw: Draw, schedule: str | None) -> None:
    check_ilp(*_charged(2, draw, schedule, layers=4), ["bounded"])


@pytest.mark.parametrize("seeds", first_few(range(6), 3))
def test_it_finds_what_brute_force_finds_on_wide_clusters(seeds: range) -> None:
    for seed in seeds:
        check_ilp(*_wide(seed, layers=3), ["bounded"])


def test_a_boundary_inside_a_server_is_charged_by_the_workers_of_both_stages() -> None:
    check_ilp(*_straddling(), ["cold", "bounded"])


def _straddling() -> tuple[Instance, Problem]:
    """The best plan has two stages, on workers 1 to 2 and 3 to 5: they meet inside the middle one of three servers."""
    layers = [
        {"f": 3.0, "b": 3.0, "w": 10.0, "s": 0.0, "u": 0.0},
        {"f": 5.0, "b": 1.0, "w": 0.0, "s": 0.0, "u": 0.0},
    ]
    levels = [(2, 1000.0, 0.0), (3, 6.0, 0.0)]
    instance = Instance(layers, [(0, (1,), 40.0, 19.0)], levels, stages=2, boundary="parallel", contention=True)
    instance = replace(instance, allow_copies=False)
    return instance, to_problem(instance)


@pytest.mark.parametrize("max_replicas", [None, 2])
def test_plain_data_parallelism_waits_for_its_buckets(max_replicas: int | None) -> None:
    """The tensor between the layers is too large for two stages; the gradients fill several buckets."""
    mib = 2.0**20
    layers = [{"f": 1.0, "b": 2.0, "w": 60 * mib, "s": 0.0, "u": 0.0, "t": 0.5} for _ in range(3)]
    tensors = [(0, (1,), 1e10, 1e10), (1, (2,), 1e10, 1e10)]
    levels = [(2, 400 * mib, 0.0), (2, 200 * mib, 0.0)]
    instance = Instance(layers, tensors, levels, max_replicas=max_replicas, contention=True)
    check_ilp(instance, to_problem(instance), ["cold", "bounded"])
    result = solve_by_ilp(to_problem(instance))
    assert result.plan is not None
    assert evaluate(result.plan, to_problem(instance)).bound == WAITS_FOR_UPDATE


def test_without_contention_the_step_time_alone_is_minimised() -> None:
    found = []
    for charged in (True, False):
        instance, _ = _straddling()
        problem = to_problem(replace(instance, contention=charged))
        result = solve_by_ilp(problem)
        assert result.plan is not None
        found.append(result.objective_s)
        assert result.objective_s == pytest.approx(brute_force.best(replace(instance, contention=charged)), rel=1e-6)
    assert found[0] > found[1] * 1.01


def test_too_little_time_for_a_proof_leaves_the_largest_step_time_that_was_refuted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    instance = replace(_straddling()[0], levels=[(4, 6.0, 0.0)])
    problem = to_problem(instance)
    best, honest, asked = brute_force.best(instance), backend.run, []

    def late(*arguments: Any, **named: Any) -> backend.MilpOutcome:
        asked.append(arguments)
        if len(asked) == 1:
            return backend.MilpOutcome(found=False, proven=False, bound=0.0)
        return honest(*arguments, **named)

    monkeypatch.setattr(backend, "run", late)
    result = integer_program.solve(problem, integer_program.IlpLimits(seconds=1000.0), best)
    assert result.status == Status.TIME_LIMIT
    assert result.bound_s == pytest.approx(0.99 * best, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(40_000, 40_040, 20))
@_named
def test_it_finds_what_brute_force_finds_at_length(draw: Draw, schedule: str | None, start: int) -> None:
    for seed in range(start, start + 20):
        check_ilp(*_charged(seed, draw, schedule, layers=5), ("cold", "bounded") if seed % 5 == 0 else ["bounded"])


@pytest.mark.slow
@pytest.mark.parametrize("start", range(50_000, 50_300, 25))
def test_it_finds_what_brute_force_finds_on_wide_clusters_at_length(start: int) -> None:
    for seed in range(start, start + 25):
        check_ilp(*_wide(seed, layers=4), ("cold", "bounded") if seed % 5 == 0 else ["bounded"])


def test_shared_cores_are_not_charged_where_nothing_shared_is() -> None:
    """Three workers on one core, planned as if each had its own: the solvers agree."""
    layer = Layer("a", 0.01, 0.02, 0, 0)
    cluster = Cluster("local", Device("core", "cpu", 1 << 30, cores=1), (Level("server", 3, 1e9),))
    problem = Problem(Profile((layer,), (), 4), cluster, Options(contention=False, stages=1))
    dp, ilp = solve_by_dp(problem), solve_by_ilp(problem)
    assert dp.objective_s == pytest.approx(0.01)
    assert ilp.objective_s == pytest.approx(0.01)
