"""The time of a batch that solvers prove is never longer than the simulation of the executor's schedule."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from extents import first_few

from pipeplan.cluster_data.cluster import Cluster, Device, Level
from pipeplan.cluster_data.executor_costs import ExecutorCosts
from pipeplan.cost import depths
from pipeplan.cost.evaluate import evaluate
from pipeplan.cost.virtual_stages import with_depths
from pipeplan.plan.plan import Plan, Stage
from pipeplan.plan.schedules import FLUSHING, VIRTUAL
from pipeplan.problem.options import Options, Sharding
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.layers import Layer, Tensor
from pipeplan.profile_data.profile import Profile
from pipeplan.profile_data.ties import TiedWeights
from pipeplan.simulation.engine import simulate_schedule
from pipeplan.simulation.from_plan import scenario_of_plan
from pipeplan.simulation.metrics import enough_minibatches, summarise_simulation
from pipeplan.simulation.simulate import simulated_update_s, steady_step_s

ROUNDING = 1 - 1e-9
AT_ONCE = 25
"""Plans of one case of the test."""
SHAPES = {1: [(8,)], 2: [(2, 4), (4, 2)], 3: [(2, 2, 2)]}
"""Clusters of one to three levels."""


def _problem(rng: random.Random, schedule: str, stages: int) -> Problem:
    layers = [
        Layer(
            f"l{index}",
            rng.uniform(0.1, 1.0),
            rng.uniform(0.1, 2.0),
            rng.choice((0, 10, 100, 400)),
            1,
            update_s=rng.choice((0.0, 0.0, 0.3)),
        )
        for index in range(stages)
    ]
    tensors = [
        Tensor(f"t{index}", f"l{index}", (f"l{index + 1}",), *(rng.choice((0, 5, 40)) for _ in range(2)))
        for index in range(stages - 1)
    ]
    rates = sorted((rng.choice((20.0, 100.0, 400.0)) for _ in range(3)), reverse=True)
    shape = rng.choice(SHAPES[rng.randint(1, 3)])
    levels = [Level(f"n{k}", count, rates[k], rng.choice((0.0, 0.05))) for k, count in enumerate(shape)]
    costs = ExecutorCosts(*rng.choice(((0.0, 0.0, 0.0, 0.0), (0.05, 0.02, 1e-3, 0.0))))
    tied: tuple[TiedWeights, ...] = ()
    if schedule not in VIRTUAL and stages > 2 and rng.random() < 0.2:
        tied = (TiedWeights(("w",), (layers[0].name, layers[-1].name), 50),)
        layers[0] = replace(layers[0], parameter_bytes=layers[0].parameter_bytes + 50)
    cluster = Cluster("flat", Device("d", "cuda", 10**9, cores=rng.choice((0, 0, 2))), tuple(levels), executor=costs)
    options = Options(
        schedule=schedule,
        accumulate=rng.choice((4, 6, 8, 16)),
        contention=rng.random() < 0.6,
        overlap=rng.choice((1.0, 0.5, 0.0)),
        boundary=rng.choice(("single", "parallel")),
        sharding=Sharding.OPTIMIZER if rng.random() < 0.1 else Sharding.NONE,
    )
    return Problem(Profile(tuple(layers), tuple(tensors), 1, optimizer_state_ratio=1.0, tied=tied), cluster, options)


def _plan(rng: random.Random, problem: Problem, schedule: str) -> Plan:
    """A plan with the planner's depths: of workers with several stages each, or with one, in one or two copies."""
    count = len(problem.profile.layers)
    names = [(layer.name,) for layer in problem.profile.layers]
    accumulate = problem.options.accumulate
    if schedule in VIRTUAL:
        devices, replicas = count // 2, rng.choice((1, 2))
        homes = [*range(devices), *(range(devices) if schedule == "interleaved-1f1b" else reversed(range(devices)))]
        workers = [tuple(range(home * replicas, (home + 1) * replicas)) for home in homes]
        stages = tuple(Stage(name, mine, 1, 1) for name, mine in zip(names, workers, strict=True))
        return with_depths(Plan(stages, schedule=schedule, accumulate=accumulate))
    copies = 2 if rng.random() < 0.2 and count <= 4 and len(problem.cluster.levels) > 1 else 1
    room, first, stages = 8 // copies, 0, ()
    for index, name in enumerate(names):
        replicas = rng.randint(1, min(3, room - first - (count - index - 1)))
        mine = tuple(copy * (8 // copies) + first + one for one in range(replicas) for copy in range(copies))
        stages, first = (*stages, Stage(name, mine, 1, 1, recompute=rng.random() < 0.2)), first + replicas
    plan = Plan(stages, copies, schedule=schedule, accumulate=accumulate)
    return depths.assign_depths(plan, problem, 1.0)


def _drawn(schedule: str, seeds: range) -> Iterator[tuple[int, Plan, Problem]]:
    for seed in seeds:
        rng = random.Random(f"{schedule} {seed}")
        count = 2 * rng.randint(2, 3) if schedule in VIRTUAL else rng.randint(1, 5)
        problem = _problem(rng, schedule, count)
        yield seed, _plan(rng, problem, schedule), problem


@pytest.mark.parametrize("part", first_few(range(20), 1))
@pytest.mark.parametrize("schedule", FLUSHING)
def test_no_simulation_takes_less_than_the_formulas(schedule: str, part: range) -> None:
    for number in part:
        for seed, plan, problem in _drawn(schedule, range(number * AT_ONCE, (number + 1) * AT_ONCE)):
            score = evaluate(plan, problem)
            scenario = scenario_of_plan(plan, problem, score)
            assert plan.accumulate is not None
            assert simulated_update_s(scenario) / plan.accumulate >= score.pace_s * ROUNDING, seed


@pytest.mark.parametrize("seeds", first_few(range(200), 8))
@pytest.mark.parametrize("schedule", FLUSHING)
def test_nor_does_the_steady_part_of_a_long_one(schedule: str, seeds: range) -> None:
    for seed, plan, problem in _drawn(schedule, range(seeds.start + 1000, seeds.stop + 1000)):
        score = evaluate(plan, problem)
        scenario = scenario_of_plan(plan, problem, score)
        count = enough_minibatches(scenario)
        steady = summarise_simulation(scenario, simulate_schedule(scenario, count), count).steady
        assert steady is not None
        assert steady.pace_s >= score.pace_s * ROUNDING, seed
        # A round that repeats itself tells the same, and none that is faster is called too slow.
        assert steady_step_s(scenario, count) == pytest.approx(steady.pace_s, rel=1e-9), seed
        assert steady_step_s(scenario, count, useful_s=steady.pace_s / ROUNDING) == pytest.approx(steady.pace_s), seed


def test_a_simulation_that_is_too_slow_to_be_useful_ends_early() -> None:
    given_up = 0
    for _, plan, problem in _drawn("1f1b-flush", range(20)):
        scenario = scenario_of_plan(plan, problem, evaluate(plan, problem))
        count = enough_minibatches(scenario)
        step_s = steady_step_s(scenario, count)
        assert step_s is not None
        found_s = steady_step_s(scenario, count, useful_s=0.8 * step_s)
        assert found_s in (step_s, math.inf)
        given_up += found_s == math.inf
    assert given_up > 5, "the others end before the first look"
