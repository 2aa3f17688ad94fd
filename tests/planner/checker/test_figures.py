"""The checker's formulas against the evaluator's, on random plans: both are written from docs/cost-model.md alone."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from brute_force import Instance
from checking import QUICK, fault, findings, written
from instances import ALL_SCHEDULES, drawn, mixed_instance, roomy, unequal_instance
from long_chains import chain

from pipeplan.cluster_data.cluster import Cluster, Device, Level
from pipeplan.cluster_data.executor_costs import ExecutorCosts
from pipeplan.cost.evaluate import evaluate
from pipeplan.plan.plan import Plan, Stage
from pipeplan.planning.outcome import Outcome, Verdict
from pipeplan.planning.solve import solve
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.layers import Layer
from pipeplan.solvers.plan_space import plan_spaces


def _random_plan(problem: Problem, rng: random.Random) -> Plan:
    """Any stages, workers and depths: in one pipeline workers in any order, in copies the same run in each."""
    space = rng.choice(plan_spaces(problem))
    places = space.workers(problem.cluster)
    size = len(places) // space.copies
    count = rng.randint(1, min(len(problem.units), size, 4))
    ends = sorted(rng.sample(range(1, len(problem.units)), count - 1))
    workers = sorted(rng.sample(range(size), rng.randint(count, size)))
    if space.copies == 1 and rng.random() < 0.3:
        rng.shuffle(workers)
    shares = sorted(rng.sample(range(1, len(workers)), count - 1))
    stages, deepest, options = [], rng.choice([3, 9, 60]), problem.options
    for first, last, start, end in zip([0, *ends], [*ends, None], [0, *shares], [*shares, None], strict=True):
        names = tuple(name for unit in problem.units[first:last] for name in unit.layers)
        mine = tuple(places[copy * size + one] for one in workers[start:end] for copy in range(space.copies))
        again = not options.inference and options.recompute and rng.random() < 0.3
        depth = 1 if options.inference else rng.randint(deepest // 2, deepest)
        stages.append(Stage(names, mine, depth, 1, again))
    plan = Plan(tuple(stages), space.copies, options.inference, options.schedule, options.accumulate)
    made = (replace(stage, versions=plan.versions(index)) for index, stage in enumerate(stages))
    return replace(plan, stages=tuple(made))


@pytest.mark.parametrize("schedule", [None, *ALL_SCHEDULES])
@pytest.mark.parametrize("draw", [mixed_instance, unequal_instance])
@pytest.mark.parametrize("seeds", [range(30), pytest.param(range(100), marks=pytest.mark.slow)], ids=len)
def test_checker_and_evaluator_find_the_same_costs(
    draw: Callable[..., Instance], schedule: str | None, seeds: range
) -> None:
    def made(seed: int) -> Instance:
        found = draw(seed, schedule=schedule)
        return roomy(found, seed) if seed % 2 else found

    compared = 0
    for seed in seeds:
        rng, (_, problem) = random.Random(seed), drawn(seed, made)
        # More minibatches to an update than in other tests, so that 2BW has room for many in flight.
        update = problem.options.accumulate and 8 * problem.options.accumulate
        changed = replace(problem.options, contention=rng.random() < 0.5, accumulate=update)
        problem = replace(problem, options=changed)
        plan = _random_plan(problem, rng)
        score = evaluate(plan, problem)
        if 1e6 < score.step_time_s < math.inf:
            # Just enough in flight but for rounding: such a step time is all rounding.
            continue
        endless = math.isinf(score.step_time_s)
        if endless:
            score = replace(score, step_time_s=1.0, batch=score.batch and replace(score.batch, steady_s=1.0))
        document = written(Outcome(problem, plan, score, (), Verdict(True, False, ""), (), {}))
        found = findings(document, problem.profile)
        assert found["structure"].holds, (seed, found)
        if endless:
            assert "to keep any step time" in found["formulas"].text, (seed, found)
            continue
        assert found["formulas"].holds, (seed, plan, found)
        assert found["stages"].holds, (seed, plan, found)
        fits = score.fits or not problem.options.memory
        assert found["memory"].holds == fits, (seed, plan, found)
        assert fits or "a device has" in found["memory"].text, (seed, plan, found)
        compared += 1
    assert compared > (20 if len(seeds) == 100 else 3), compared


def test_an_allocators_share_of_activations_is_no_wrong_figure() -> None:
    """Plans state whole bytes; a share of an odd number of bytes is none."""
    layers = [Layer(f"l{index}", 1.0, 2.0, 40, 7 + 4 * index) for index in range(4)]
    costs = ExecutorCosts(worker_bytes=1000, allocator_share=0.15, activation_share=0.4)
    cluster = Cluster("one", Device("chip", "cpu", 10**6), (Level("server", 3, 1e9),), executor=costs)
    problem = Problem(chain(layers, 8, 4), cluster, Options(schedule="1f1b-flush", accumulate=4))
    outcome = solve(problem, QUICK)
    document = written(outcome)
    assert document["prediction"]["stages"][0]["minibatch_bytes"] != outcome.evaluation.stages[0].minibatch_bytes
    assert fault(document, problem.profile) == ""
