"""Bounds of relaxations: no plan is faster, and they are far above the time in which all compute."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from extents import first_few
from long_chains import chain
from random_plans import drawn_flush_plans

from pipeplan.cluster_data.cluster import Cluster, Device, Level
from pipeplan.cost.evaluate import evaluate
from pipeplan.plan.schedules import FLUSH, ZERO_BUBBLE
from pipeplan.planning.choose import choose
from pipeplan.planning.prove import Relaxation
from pipeplan.planning.question import Machines, Question
from pipeplan.problem.cuts import enumerate_cuts
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.layers import Layer, Tensor
from pipeplan.profile_data.profile import Profile
from pipeplan.simulation.from_plan import scenario_of_plan
from pipeplan.simulation.simulate import simulated_update_s
from pipeplan.solvers.cut_groups import MOST_GROUPS, MainUnits
from pipeplan.solvers.dp import charged, dynamic_program
from pipeplan.solvers.passed_components import passed_levels
from pipeplan.solvers.result import Status
from pipeplan.solvers.update_bound import UpdateBound
from pipeplan.util.deadline import NO_DEADLINE

AT_ONCE = 25
SERVERS = Cluster("4x1", Device("d", "cuda", 10**9), (Level("server", 1, 1.0), Level("net", 4, 100.0)))


@pytest.mark.parametrize("part", first_few(range(20), 4))
@pytest.mark.parametrize("schedule", [FLUSH, ZERO_BUBBLE])
def test_no_simulated_update_is_faster_than_the_relaxation_allows(
    schedule: str, part: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where cuts are taken in groups."""
    for number in part:
        monkeypatch.setattr("pipeplan.solvers.cut_groups.MOST_GROUPS", MOST_GROUPS if number % 2 else 3)
        for seed, plan, problem in drawn_flush_plans(schedule, range(number * AT_ONCE, (number + 1) * AT_ONCE)):
            if len(plan.stages) > 1:
                simulated_s = simulated_update_s(scenario_of_plan(plan, problem, evaluate(plan, problem)))
                bound = UpdateBound(problem, enumerate_cuts(problem, 1000), splits=schedule == ZERO_BUBBLE)
                assert bound.may_fit(simulated_s * (1 + 1e-9)), seed


def _chain(parameters: int, crossing: int, memory: int = 10**9, saved: int = 1) -> Machines:
    """Eight equal layers on four servers of one worker."""
    layers = [Layer(f"l{n}", 1.0, 2.0, parameters, saved) for n in range(8)]
    cluster = Cluster("4x1", Device("d", "cuda", memory), SERVERS.levels)
    return Machines(chain(layers, crossing, optimizer_state_ratio=1.0), cluster)


CASES = {
    "filling": (_chain(0, 1), Options(max_replicas=1), 1.03),
    "exchange and messages": (_chain(10_000, 400), Options(), 1.3),
    "memory": (_chain(1_000, 1, memory=7_500, saved=500), Options(), 1.3),
}


@pytest.mark.parametrize(("machines", "options", "least"), CASES.values(), ids=CASES)
def test_the_bound_is_between_the_work_and_the_best_plan(machines: Machines, options: Options, least: float) -> None:
    question = Question(machines, options, batch=16)
    choice = choose(question)
    fastest = min(one.sample_s for one in choice.rivals if len(one.plan.stages) > 1)
    bound = Relaxation(question, splits=True)
    bound.tighten([1], fastest, NO_DEADLINE)
    assert 6.0 * least <= bound.bounds[1] <= fastest
    assert choice.proven.sample_s >= bound.bounds[1]


def test_every_cut_has_a_cut_of_the_main_units_with_no_larger_totals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeplan.solvers.cut_groups.MOST_CUTS", 100)
    names = [f"l{n}" for n in range(10)]
    layers = [*(Layer(name, 1.0, 2.0, 10, 5) for name in names), *(Layer(f"s{n}", 0.01, 0.02, 1, 1) for n in range(9))]
    tensors = [Tensor("in", "l0", ("l1", *(f"s{n}" for n in range(9))), 3, 3)]
    tensors += [Tensor(f"t{n}", f"l{n}", (f"l{n + 1}",), 4, 4) for n in range(1, 9)]
    tensors += [Tensor(f"side{n}", f"s{n}", ("l9",), 2, 2) for n in range(9)]
    problem = Problem(Profile(tuple(layers), tuple(tensors), 1), SERVERS, Options(schedule=FLUSH, accumulate=8))
    every, found = enumerate_cuts(problem, 100_000), MainUnits.of(problem, NO_DEADLINE)
    assert len(found.units) == len(names)
    main = found.cuts(problem)
    assert len(main.ideals) < 100 < len(every.ideals)
    names_of = ("work_s", "forward_s", "parameters", "saved", "sent", "returned")
    smaller = np.all(
        [getattr(main, one)[None] <= getattr(every, one)[:, None] * (1 + 1e-9) for one in names_of], axis=0
    )
    near = main.work_s[None] >= every.work_s[:, None] - 9 * 0.03 - 1e-9
    assert (smaller & near).any(axis=1).all()


# Pipelines that pass through servers or racks, against searches that charge every card without the bound.

CLUSTERS = (2, 5), (2, 6), (2, 7), (2, 2, 3), (2, 3, 2)


def _passing(seed: int, *, schedule: str = "1f1b-stashing") -> Problem:
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
    for problem in (_even(), *map(_passing, range(10))):
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
    assert evaluate(best.plan, problem).step_time_s == pytest.approx(2.0)
