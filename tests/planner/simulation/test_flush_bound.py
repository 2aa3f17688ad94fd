"""The time of a batch that solvers prove is never longer than the simulation of the executor's schedule."""

from __future__ import annotations

import math

import pytest
from extents import first_few
from random_plans import drawn_flush_plans

from pipeplan.cost.evaluate import evaluate
from pipeplan.plan.schedules import FLUSHING
from pipeplan.simulation.engine import simulate_schedule
from pipeplan.simulation.from_plan import scenario_of_plan
from pipeplan.simulation.metrics import enough_minibatches, summarise_simulation
from pipeplan.simulation.simulate import simulated_update_s, steady_step_s

ROUNDING = 1 - 1e-9
AT_ONCE = 25
"""Plans of one case of the test."""


@pytest.mark.parametrize("part", first_few(range(20), 1))
@pytest.mark.parametrize("schedule", FLUSHING)
def test_no_simulation_takes_less_than_the_formulas(schedule: str, part: range) -> None:
    for number in part:
        for seed, plan, problem in drawn_flush_plans(schedule, range(number * AT_ONCE, (number + 1) * AT_ONCE)):
            score = evaluate(plan, problem)
            scenario = scenario_of_plan(plan, problem, score)
            assert simulated_update_s(scenario) / plan.accumulate >= score.step_time_s * ROUNDING, seed


@pytest.mark.parametrize("seeds", first_few(range(200), 8))
@pytest.mark.parametrize("schedule", FLUSHING)
def test_nor_does_the_steady_part_of_a_long_one(schedule: str, seeds: range) -> None:
    given_up = 0
    for seed, plan, problem in drawn_flush_plans(schedule, range(seeds.start + 1000, seeds.stop + 1000)):
        score = evaluate(plan, problem)
        scenario = scenario_of_plan(plan, problem, score)
        count = enough_minibatches(scenario)
        steady = summarise_simulation(scenario, simulate_schedule(scenario, count), count).steady
        assert steady.step_time_s >= score.step_time_s * ROUNDING, seed
        # A round that repeats itself tells the same, and none that is faster is called too slow.
        assert steady_step_s(scenario, count) == pytest.approx(steady.step_time_s, rel=1e-9), seed
        useful_s = steady.step_time_s / ROUNDING
        assert steady_step_s(scenario, count, useful_s=useful_s) == pytest.approx(steady.step_time_s), seed
        # One that is too slow to be useful ends early, if that is seen in time.
        found_s = steady_step_s(scenario, count, useful_s=0.8 * steady.step_time_s)
        assert found_s in (pytest.approx(steady.step_time_s), math.inf)
        given_up += found_s == math.inf
    assert given_up or schedule != "1f1b-flush"
