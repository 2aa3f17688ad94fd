"""The figure of a plan that is too large for a simulation of its steady state: from two short updates."""

from __future__ import annotations

from itertools import pairwise

import pytest

from pipeplan.cluster_data.cluster import Cluster, Device, Level
from pipeplan.cost import depths
from pipeplan.cost.evaluate import evaluate
from pipeplan.cost.virtual_stages import with_depths
from pipeplan.plan.plan import Plan, Stage
from pipeplan.planning.figure import MOST_PASSES_OF_UPDATES, affordable, figure_of, lengths_of_updates
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.layers import Layer, Tensor
from pipeplan.profile_data.profile import Profile
from pipeplan.simulation.from_plan import scenario_of_plan
from pipeplan.simulation.simulate import simulated_update_s
from pipeplan.util.deadline import NO_DEADLINE

TIMES = (1.0, 3.0, 2.0, 2.5)


def _problem(accumulate: int, schedule: str = "1f1b-flush") -> Problem:
    layers = tuple(Layer(f"l{number}", time, 2 * time, 100, 10) for number, time in enumerate(TIMES))
    tensors = tuple(Tensor(f"t{one}", f"l{one}", (f"l{two}",), 50, 50) for one, two in pairwise(range(len(TIMES))))
    levels = (Level("server", 4, 100.0), Level("cluster", 3, 50.0))
    options = Options(schedule=schedule, accumulate=accumulate)
    return Problem(Profile(layers, tensors, 1), Cluster("twelve", Device("chip", "cuda", 10**6), levels), options)


def _plan(problem: Problem, replicas: tuple[int, ...]) -> Plan:
    first, stages = 0, []
    for number, count in enumerate(replicas):
        stages.append(Stage((f"l{number}",), tuple(range(first, first + count)), 1, 1))
        first += count
    plan = Plan(tuple(stages), schedule="1f1b-flush", accumulate=problem.options.accumulate)
    return depths.assign_depths(plan, problem, evaluate(depths.assign_depths(plan, problem, 1e9), problem).step_time_s)


@pytest.mark.parametrize("replicas", [(1, 1, 1, 1), (1, 3, 2, 3), (2, 4, 3, 3)])
def test_two_short_updates_give_the_time_of_a_long_one(replicas: tuple[int, ...]) -> None:
    problem = _problem(1000)
    plan = _plan(problem, replicas)
    score = evaluate(plan, problem)
    scenario = scenario_of_plan(plan, problem, score)
    assert affordable(scenario, plan) is None, "the steady state takes too many passes"
    short, longer = lengths_of_updates(scenario, plan)
    assert short < longer
    assert short + longer < 500
    found = figure_of(plan, score, problem, NO_DEADLINE)
    assert found.step_s == pytest.approx(simulated_update_s(scenario) / 1000, rel=0.01)
    assert found.step_s >= score.step_time_s


def test_a_plan_that_is_too_large_has_the_time_of_the_formulas() -> None:
    problem = _problem(MOST_PASSES_OF_UPDATES, "zb-v")
    workers = ((0,), (1,), (1,), (0,))
    stages = tuple(Stage((f"l{number}",), own, 1, 1) for number, own in enumerate(workers))
    plan = with_depths(Plan(stages, schedule="zb-v", accumulate=MOST_PASSES_OF_UPDATES))
    scenario = scenario_of_plan(plan, problem, evaluate(plan, problem))
    assert sum(lengths_of_updates(scenario, plan)) < 100, "short updates suffice also where workers have several stages"
