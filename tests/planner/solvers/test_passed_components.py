"""The bound for pipelines that pass through servers or racks, against searches that charge every card without it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from long_chains import chain

from pipeplan.cluster_data.cluster import Cluster, Device, Level
from pipeplan.cost.evaluate import evaluate
from pipeplan.problem.cuts import enumerate_cuts
from pipeplan.problem.problem import Options, Problem
from pipeplan.profile_data.layers import Layer
from pipeplan.solvers.dp import charged, dynamic_program
from pipeplan.solvers.passed_components import passed_levels
from pipeplan.solvers.result import Status

CLUSTERS = (2, 5), (2, 6), (2, 7), (2, 2, 3), (2, 3, 2)


def _problem(seed: int, *, schedule: str = "1f1b-stashing") -> Problem:
    """A chain on servers whose cards are slow, with far more parameters than two servers can train in the time."""
    rng = random.Random(seed)
    count, size = rng.randint(7, 10), 10 ** rng.uniform(0.5, 1.5)
    layers = [
        Layer(f"l{index}", rng.uniform(0.5, 1.5), rng.uniform(1.0, 3.0), int(1e6 * size * rng.uniform(0.5, 1.5)), 1000)
        for index in range(count)
    ]
    sizes = [rng.randint(800_000, 1_000_000) for _ in layers[1:]]
    counts = CLUSTERS[seed % len(CLUSTERS)]
    inside, outside = Level("server", counts[0], 1e9), 10 ** rng.uniform(5.4, 6.1)
    above = [Level(f"level{place}", number, outside / 2**place) for place, number in enumerate(counts[1:])]
    cluster = Cluster("drawn", Device("GPU", "cuda", 10**12), (inside, *above))
    return Problem(chain(layers, sizes), cluster, Options(schedule=schedule, overlap=1.0, allow_copies=False))


def _even() -> Problem:
    """Twelve layers of a second each and much to synchronise, on six servers of two.

    A message keeps a card busy for a second. So a second would be the step time, did the cards of the servers between
    the first and the last not send an activation and a gradient for every minibatch.
    """
    layers = [Layer(f"l{index}", 0.4, 0.6, 10**8, 1000) for index in range(12)]
    cluster = Cluster("even", Device("GPU", "cuda", 10**12), (Level("server", 2, 1e12), Level("cluster", 6, 1e6)))
    return Problem(chain(layers, 10**6), cluster, Options(overlap=1.0, allow_copies=False))


def test_no_pipeline_is_faster_than_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    higher = 0
    for problem in (_even(), *map(_problem, range(10))):
        cuts = enumerate_cuts(problem, 1000)
        bound_s = max((one.bound_s for one in passed_levels(problem, cuts)), default=0.0)
        with monkeypatch.context() as patch:
            patch.setattr(charged, "passed_levels", lambda problem, cuts: [])
            best = dynamic_program.solve(problem, cuts)
        assert best.status == Status.OPTIMAL
        assert best.objective_s >= bound_s * (1 - 1e-9)
        apart = replace(problem, options=replace(problem.options, contention=False))
        higher += bound_s > dynamic_program.solve(apart, cuts).bound_s * (1 + 1e-6)
    assert higher > 1


def test_on_many_workers_it_proves_plans_whose_stages_straddle_no_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(charged, "MOST_PLACEMENTS", 0)
    problem = _even()
    cuts = enumerate_cuts(problem, 1000)
    best = dynamic_program.solve(problem, cuts, price=lambda plan: evaluate(plan, problem).step_time_s)
    assert best.status == Status.OPTIMAL
    assert best.objective_s == pytest.approx(2.0)
    assert best.plan is not None
    assert evaluate(best.plan, problem).step_time_s == pytest.approx(2.0)


def test_it_is_for_schedules_that_synchronise_once_for_a_group() -> None:
    problem = _problem(0, schedule="vertical-sync")
    assert passed_levels(problem, enumerate_cuts(problem, 1000))
    inference = Problem(problem.profile, problem.cluster, Options(inference=True))
    assert not passed_levels(inference, enumerate_cuts(inference, 1000))
