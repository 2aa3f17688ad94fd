"""zb-h1 against the paper's formula, against 1f1b-flush, and within memory."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import pytest
from extents import slow_but_for
from instances import drawn, mixed_instance
from solver_contract import solve_by_dp

from pipeplan.cost.evaluate import evaluate
from pipeplan.simulation.engine import simulate_schedule
from pipeplan.simulation.from_plan import scenario_of_plan, stage_figures
from pipeplan.simulation.memory import memory_over_time, peak_memory
from pipeplan.simulation.scenario import Scenario, StageBoundary, StageLoad
from pipeplan_launch.plan.schedule import SCHEDULES


class Times(NamedTuple):
    """Seconds of a stage's passes."""

    forward: float
    inputs: float
    weights: float


def batch(stages: Sequence[Times], minibatches: int, schedule: str, transfer: float = 0.0) -> float:
    """Simulated seconds of one update, each stage on one worker; deferred as docs/cost-model.md says."""
    loads, drain, count = [], 0.0, len(stages)
    for index, (forward, inputs, weights) in enumerate(stages):
        depth, deferred = min(count - index, minibatches), 0
        if schedule == "zb-h1" and weights:
            deferred = max(0, min(min(count, minibatches) - depth, int(drain / weights + 1e-9)))
        whole = inputs + weights
        loads.append(
            StageLoad((index,), depth, forward, whole, 0.0, deferred=deferred, weights_s=weights if deferred else 0.0)
        )
        drain += (inputs if deferred else whole) + transfer
    hops = tuple((StageBoundary(transfer, 0.0),) for _ in range(count - 1))
    scenario = Scenario("", tuple(loads), hops, SCHEDULES[schedule], 0.0, 1.0, accumulate=minibatches)
    return simulate_schedule(scenario, minibatches).end_s


@pytest.mark.parametrize("times", [Times(1, 1, 1), Times(1, 1.2, 0.8), Times(1, 1, 0.5), Times(2, 2, 1)], ids=str)
def test_equal_stages_take_the_time_of_the_paper(times: Times) -> None:
    forward, inputs, weights = times
    for count in (1, 2, 3, 4, 8):
        for minibatches in (count, 2 * count, 3 * count + 1):
            expected = minibatches * sum(times) + (count - 1) * (forward + inputs - weights)
            assert batch([times] * count, minibatches, "zb-h1") == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("samples", slow_but_for([100], [100, 3000]))
def test_no_straight_pipeline_is_slower_than_with_whole_backward_passes(samples: int) -> None:
    chance, gains = random.Random(samples), 0
    for _ in range(samples):
        stages = []
        for _ in range(chance.randint(1, 8)):
            forward = chance.uniform(0.3, 1.5)
            backward = forward * chance.uniform(1.5, 2.5)
            weights = backward * chance.choice([0.0, 0.2, 0.4, 0.5, 0.6])
            stages.append(Times(forward, backward - weights, weights))
        minibatches, transfer = chance.randint(1, 4 * len(stages)), chance.choice([0.0, 0.1, 0.3])
        ours, whole = (batch(stages, minibatches, name, transfer) for name in ("zb-h1", "1f1b-flush"))
        assert ours <= whole * (1 + 1e-12)
        gains += ours < whole * 0.99
    assert gains > samples / 2


@pytest.mark.parametrize("seeds", slow_but_for([range(12)], [range(12), range(12, 300)]), ids=str)
def test_plans_fit_and_their_simulation_keeps_the_predicted_memory(seeds: range) -> None:
    deferring = 0
    for seed in seeds:
        _, problem = drawn(seed, lambda one: replace(mixed_instance(one, schedule="zb-h1"), inference=False))
        plan = solve_by_dp(problem).plan
        if plan is None:
            continue
        score = evaluate(plan, problem)
        assert score.fits or not problem.options.memory
        without = replace(plan, stages=tuple(replace(stage, deferred=0) for stage in plan.stages))
        assert evaluate(without, problem).step_time_s == score.step_time_s
        scenario = scenario_of_plan(plan, problem, score)
        count = 3 * (plan.accumulate or 1)
        steps = memory_over_time(scenario, simulate_schedule(scenario, count), count)
        for peak, cost in zip(peak_memory(scenario, steps), score.stages, strict=True):
            assert peak <= cost.memory_bytes + len(plan.stages) * 4
        deferring += any(stage.deferred for stage in plan.stages)
        assert all(not (stage.deferred and stage.recompute) for stage in plan.stages)
        assert plan.stages[0].deferred == 0
    assert deferring > 0


def test_only_the_simulation_charges_what_a_pass_in_two_parts_adds() -> None:
    share, charged = 0.3, 0
    for seed in range(12):
        _, problem = drawn(seed, lambda one: replace(mixed_instance(one, schedule="zb-h1"), inference=False))
        plan = solve_by_dp(problem).plan
        if plan is None:
            continue
        whole = {"whole_forward_s": 1.0, "whole_backward_s": 2.0, "whole_split_s": 2.0 * (1 + share)}
        dear = replace(problem, profile=replace(problem.profile, **whole))
        score = evaluate(plan, dear)
        assert score.step_time_s == evaluate(plan, problem).step_time_s
        added = [figures.split_s for figures in stage_figures(plan, dear, score)]
        expected = [
            share * cost.layers_backward_s * (stage.deferred > 0)
            for stage, cost in zip(plan.stages, score.stages, strict=True)
        ]
        assert added == pytest.approx(expected)
        count = plan.accumulate or 1
        before, after = (
            simulate_schedule(scenario_of_plan(plan, one, evaluate(plan, one)), count).end_s for one in (problem, dear)
        )
        assert before <= after <= (before + count * sum(added)) * (1 + 1e-9)
        charged += after > before
    assert charged > 0
