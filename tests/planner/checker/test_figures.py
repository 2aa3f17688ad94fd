"""The checker's formulas against the evaluator's, on random plans: both are written from docs/cost-model.md alone."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest
from brute_force import Instance
from checking import QUICK, fault, findings, written
from instances import ALL_SCHEDULES, drawn, mixed_instance, roomy, unequal_instance

from pipeplan.cluster_data.cluster import Cluster, Device, Level
from pipeplan.cluster_data.executor_costs import ExecutorCosts
from pipeplan.cluster_data.links import Links
from pipeplan.cost.evaluate import Evaluation, evaluate
from pipeplan.cost.stage_times import group_allreduce_time
from pipeplan.plan.plan import Plan, Stage
from pipeplan.planning.solve import solve
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.layers import Layer, Tensor
from pipeplan.profile_data.profile import Profile
from pipeplan.solvers.plan_space import plan_spaces


def _at_times_roomy(instance: Instance, seed: int) -> Instance:
    return roomy(instance, seed) if seed % 2 else instance


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
    stages, deepest = [], rng.choice([3, 9, 60])
    for first, last, start, end in zip([0, *ends], [*ends, None], [0, *shares], [*shares, None], strict=True):
        names = tuple(name for unit in problem.units[first:last] for name in unit.layers)
        mine = tuple(places[copy * size + one] for one in workers[start:end] for copy in range(space.copies))
        again = not problem.options.inference and problem.options.recompute and rng.random() < 0.3
        stages.append(
            Stage(names, mine, 1 if problem.options.inference else rng.randint(deepest // 2, deepest), 1, again)
        )
    options = problem.options
    plan = Plan(tuple(stages), space.copies, options.inference, options.schedule, options.accumulate)
    return replace(
        plan, stages=tuple(replace(stage, versions=plan.versions(index)) for index, stage in enumerate(stages))
    )


def _document(problem: Problem, plan: Plan, score: Evaluation) -> dict[str, Any]:
    """plan.json, without what the checker does not read."""
    links = Links.of(problem.cluster)
    costs = [
        {
            "minibatch_s": score.step_time_s,
            "forward_s": stage.forward_s,
            "backward_s": stage.backward_s - stage.update_s,
            "update_s": stage.update_s,
            "sync_s": group_allreduce_time(plan, problem, links, index),
            "receive_bytes": score.stages[index - 1].boundary_bytes if index else 0,
            "send_bytes": stage.boundary_bytes,
            "send_gradient_bytes": score.stages[index - 1].boundary_gradient_bytes if index else 0,
            "receive_gradient_bytes": stage.boundary_gradient_bytes,
            "parameter_bytes": stage.parameter_bytes,
            "minibatch_bytes": round(stage.minibatch_bytes),
            "memory_bytes": round(stage.memory_bytes),
        }
        for index, stage in enumerate(score.stages)
    ]
    document = {
        "profile": {"digest": problem.profile.digest(), "minibatch": 1},
        "cluster": problem.cluster.to_json() | {"digest": problem.cluster.digest()},
        "options": asdict(problem.options),
        "plan": plan.to_json(),
        "prediction": {
            "minibatch_s": score.step_time_s,
            "minibatches_per_s": score.rate,
            "copies_synchronisation_s": score.copies_s,
            "batch": None if score.batch is None else asdict(score.batch),
            "stages": costs,
        },
    }
    return json.loads(json.dumps(document))  # type: ignore[no-any-return]


@pytest.mark.parametrize("schedule", [None, *ALL_SCHEDULES])
@pytest.mark.parametrize("draw", [mixed_instance, unequal_instance])
@pytest.mark.parametrize("seeds", [range(30), pytest.param(range(100), marks=pytest.mark.slow)], ids=len)
def test_checker_and_evaluator_find_the_same_costs(
    draw: Callable[..., Instance], schedule: str | None, seeds: range
) -> None:
    compared = 0
    for seed in seeds:
        rng = random.Random(seed)
        _, problem = drawn(seed, lambda seed: _at_times_roomy(draw(seed, schedule=schedule), seed))
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
        found = findings(_document(problem, plan, score), problem.profile)
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
    layers = tuple(Layer(f"l{index}", 1.0, 2.0, 40, 7 + 4 * index) for index in range(4))
    tensors = tuple(Tensor(f"t{index}", f"l{index}", (f"l{index + 1}",), 8, 8) for index in range(3))
    costs = ExecutorCosts(worker_bytes=1000, allocator_share=0.15, activation_share=0.4)
    cluster = Cluster("one", Device("chip", "cpu", 10**6), (Level("server", 3, 1e9),), executor=costs)
    problem = Problem(Profile(layers, tensors, 4), cluster, Options(schedule="1f1b-flush", accumulate=4))
    outcome = solve(problem, QUICK)
    document = written(outcome)
    assert document["prediction"]["stages"][0]["minibatch_bytes"] != outcome.evaluation.stages[0].minibatch_bytes
    assert fault(document, problem.profile) == ""
