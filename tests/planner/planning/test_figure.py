"""The figure by which plans are compared, also where a simulation is too long, and the simplest plan within 3%."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from long_chains import chain

import pipeplan
from pipeplan.cluster_data.cluster import Cluster, Device, Level, Server
from pipeplan.cost import depths
from pipeplan.cost.evaluate import evaluate
from pipeplan.cost.virtual_stages import with_depths
from pipeplan.plan.plan import Plan, Stage
from pipeplan.planning.figure import (
    MOST_PASSES_OF_UPDATES,
    TOLERANCE,
    affordable,
    figure_of,
    lengths_of_updates,
    simplest_of,
)
from pipeplan.problem.options import Options, Sharding
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.layers import Layer
from pipeplan.simulation.from_plan import scenario_of_plan
from pipeplan.simulation.simulate import simulated_update_s
from pipeplan.util.deadline import NO_DEADLINE


def _plan(*counts: int, first: int = 0, accumulate: int = 4) -> Plan:
    """Stages of one layer on so many workers each."""
    stages = []
    for number, count in enumerate(counts):
        stages.append(Stage((f"l{number}",), tuple(range(first, first + count)), 1, 1))
        first += count
    return Plan(tuple(stages), schedule="1f1b-flush", accumulate=accumulate)


def _problem(accumulate: int, schedule: str = "1f1b-flush") -> Problem:
    layers = [Layer(f"l{number}", time, 2 * time, 100, 10) for number, time in enumerate((1.0, 3.0, 2.0, 2.5))]
    levels = (Level("server", 4, 100.0), Level("cluster", 3, 50.0))
    options = Options(schedule=schedule, accumulate=accumulate)
    return Problem(chain(layers, 50), Cluster("twelve", Device("chip", "cuda", 10**6), levels), options)


@pytest.mark.parametrize("replicas", [(1, 1, 1, 1), (1, 3, 2, 3), (2, 4, 3, 3)])
def test_two_short_updates_give_the_time_of_a_long_one(replicas: tuple[int, ...]) -> None:
    problem = _problem(1000)
    least = depths.assign_depths(_plan(*replicas, accumulate=1000), problem, 1e9)
    plan = depths.assign_depths(least, problem, evaluate(least, problem).step_time_s)
    score = evaluate(plan, problem)
    scenario = scenario_of_plan(plan, problem, score)
    assert affordable(scenario, plan) is None, "the steady state takes too many passes"
    short, longer = lengths_of_updates(scenario, plan)
    assert short < longer
    assert short + longer < 500
    found = figure_of(plan, score, problem, NO_DEADLINE)
    assert found.step_s == pytest.approx(simulated_update_s(scenario) / 1000, rel=0.01)
    assert found.step_s >= score.step_time_s


def test_short_updates_suffice_also_where_workers_have_several_stages() -> None:
    problem = _problem(MOST_PASSES_OF_UPDATES, "zb-v")
    stages = tuple(Stage((f"l{number}",), (worker,), 1, 1) for number, worker in enumerate((0, 1, 1, 0)))
    plan = with_depths(Plan(stages, schedule="zb-v", accumulate=MOST_PASSES_OF_UPDATES))
    scenario = scenario_of_plan(plan, problem, evaluate(plan, problem))
    assert sum(lengths_of_updates(scenario, plan)) < 100


@dataclass(frozen=True)
class _One:
    plan: Plan
    sample_s: float
    sharding: Sharding = Sharding.NONE
    cluster: Cluster = field(default_factory=lambda: pipeplan.cluster("C"))


def test_the_simplest_plan_within_the_tolerance_is_taken() -> None:
    parallel, uniform, unequal = _plan(4), _plan(2, 2), _plan(3, 1)
    divided = [_One(parallel, 1.021, kind) for kind in (Sharding.FULL, Sharding.OPTIMIZER)]
    found = [_One(unequal, 1.0), _One(uniform, 1.02), *divided, _One(parallel, 1.029)]
    for number in range(len(found), 0, -1):
        assert simplest_of(found[:number]) is found[number - 1], "the order of the kinds"
    fast, slow = _One(unequal, 1.0), _One(parallel, 1.0 + TOLERANCE + 1e-6)
    assert simplest_of([slow, fast]) is fast
    # Fewer workers, fewer stages, and idle workers at the end.
    assert simplest_of([_One(parallel, 1.0), _One(_plan(2), 1.01)]).plan.busy == 2
    assert len(simplest_of([_One(_plan(1, 1, 2), 1.0), _One(unequal, 1.01)]).plan.stages) == 2
    assert simplest_of([_One(_plan(2, first=2), 1.0), _One(_plan(2), 1.001)]).plan.stages[0].workers == (0, 1)


def test_replicas_that_are_equal_on_each_kind_of_device_are_uniform() -> None:
    fast, slow = (Device(name, "cuda", 10**9, speed=speed) for name, speed in (("fast", 1.0), ("slow", 0.5)))
    servers = [Server(device, Level("server", 4, 1e9)) for device in (slow, fast)]
    mixed = Cluster.of_servers("mixed", servers, (Level("cluster", 2, 1e9),))
    uniform, unequal = _One(_plan(2, 2, 4), 1.02, cluster=mixed), _One(_plan(1, 3, 4), 1.0, cluster=mixed)
    assert simplest_of([unequal, uniform]) is uniform
    across = _One(_plan(2, 4, 2), 1.02, cluster=mixed)
    assert simplest_of([unequal, across]) is unequal, "a stage on two kinds of device"
