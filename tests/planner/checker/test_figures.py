"""The checker's figures against the planner's, on random plans of all kinds; other figures are refused."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from brute_force import Instance
from checking import QUICK, Document, changed, fault, findings, places, solved, written
from extents import first_few, slow_but_for
from instances import ALL_SCHEDULES, divided_instance, drawn, mixed_instance, roomy, tied_instance, unequal_instance
from long_chains import chain

from pipeplan.cluster_data.cluster import Cluster, Device, Level
from pipeplan.cluster_data.executor_costs import ExecutorCosts
from pipeplan.cost.evaluate import evaluate
from pipeplan.cost.stage_times import PlanStage
from pipeplan.plan.plan import Plan, Stage
from pipeplan.planning.outcome import Outcome, Verdict
from pipeplan.planning.solve import solve
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.layers import Layer
from pipeplan.profile_data.profile import Profile
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


# Virtual stages, divided state and shared weights.

COSTS = ExecutorCosts(pass_s=1e-3, message_s=2e-3, message_byte_s=1e-9, worker_bytes=50.0, allocator_share=1.0)


def _virtual(seed: int) -> Problem:
    """A random chain on a random cluster, in a half of the cases with so little memory that some stages recompute."""
    rng = random.Random(seed)
    schedule, count = rng.choice(("interleaved-1f1b", "zb-v")), rng.randint(6, 12)
    layers = [
        Layer(f"l{i}", *(rng.uniform(0.5, 2.0) for _ in range(2)), rng.choice((0, 100)), rng.randint(1, 50))
        for i in range(count)
    ]
    # Another generator, so that the rest of what is drawn does not depend on it.
    workspaces = random.Random(f"workspace {seed}")
    layers = [replace(layer, workspace_bytes=workspaces.choice((0, 10, 40))) for layer in layers]
    sizes = [rng.randint(0, 40) for _ in range(count)]
    costs = COSTS if rng.random() < 0.5 else ExecutorCosts()
    memory = 10**6 if rng.random() < 0.3 else rng.choice((1000, 1500)) * (2 if costs else 1)
    levels = (Level("server", 2, 1e3, 1e-3), Level("cluster", rng.randint(1, 3), rng.choice((30.0, 1e3)), 1e-2))
    cluster = Cluster("drawn", Device("chip", "cuda", memory), levels, executor=costs)
    accumulate = rng.choice((3, 4, 8, 9))
    return Problem(chain(layers, sizes[1:], 2), cluster, Options(schedule=schedule, accumulate=accumulate))


def _divided(seed: int) -> Problem:
    return drawn(seed, lambda number: divided_instance(number, layers=5))[1]


def _tied(seed: int, layers: int = 5) -> Problem:
    return drawn(seed, lambda number: tied_instance(number, layers=layers, schedule="1f1b-flush"))[1]


def _honest(seed: int) -> tuple[Profile, Document]:
    """The profile and the plan.json of a problem with virtual stages."""
    ((problem, outcome),) = solved([_virtual(seed)])
    return problem.profile, written(outcome)


@pytest.mark.parametrize("draw", [_virtual, _divided])
@pytest.mark.parametrize("seeds", first_few(range(400), 6))
def test_the_planners_figures_hold(draw: Any, seeds: range) -> None:
    found = replicated = 0
    for problem, outcome in solved(map(draw, seeds)):
        document = written(outcome)
        assert fault(document, problem.profile) == ""
        assert document["certificate"] is None
        found += 1
        replicated += any(stage.replicas > 1 for stage in outcome.plan.stages)
    assert found > len(seeds) / 3
    assert replicated > 1 or draw is _virtual


@pytest.mark.parametrize("step", slow_but_for([3], [3, 1]))
def test_no_changed_figure_of_virtual_stages_holds(step: int) -> None:
    """One figure in so many."""
    assert _virtual(11).cluster.executor
    profile, document = _honest(11)
    prediction = document["prediction"]
    leaves = [(holder, key) for holder, key in places(prediction) if isinstance(holder[key], int | float | str)]
    assert set(prediction) == {
        *("minibatch_s", "batch", "stages", "copies_synchronisation_s", "minibatches_per_s", "bound_by")
    }
    for holder, key in leaves[::step]:
        value = holder[key]
        # A size is stated in whole bytes, and a time up to rounding.
        holder[key] = value + "x" if isinstance(value, str) else value * 1.01 + 2
        assert fault(document, profile), key
        holder[key] = value
    assert fault(document, profile) == ""


def test_forgeries_of_virtual_stages_are_named() -> None:
    profile, document = _honest(1)
    first, second = document["plan"]["stages"][:2]
    step_time = document["prediction"]["minibatch_s"]
    for change, words in (
        (lambda d: d["plan"]["stages"][0].update(workers=second["workers"]), "belongs on other workers"),
        (lambda d: d["plan"]["stages"][0].update(workers=[0, 1, 2]), "2 times"),
        (lambda d: d["plan"]["stages"][0].update(depth=99), "minibatches in flight"),
        (lambda d: d["plan"]["stages"][0].update(deferred=7), "minibatches in flight"),
        (lambda d: d.update(bound_s=step_time, gap=0.0, status="optimal"), "the work alone allows"),
        (lambda d: d["verdict"].update(proven=True), "proven"),
        (lambda d: d.update(certificate={"pace": 1.0}), "no certificate speaks"),
    ):
        assert words in fault(changed(document, change), profile), words
    assert first["workers"] != second["workers"]


def test_forgeries_of_divided_state_are_refused() -> None:
    refused = 0
    for problem, outcome in solved(map(_divided, range(8))):
        document = written(outcome)
        if any(stage.replicas > 1 for stage in outcome.plan.stages):
            refused += bool(fault(changed(document, lambda d: d["options"].pop("sharding")), problem.profile))
        claimed = fault(changed(document, lambda d: d.update(certificate={})), problem.profile)
        assert "no certificate speaks of plans whose replicas divide" in claimed
    assert refused > 1


def test_a_forged_exchange_of_shared_weights_is_refused() -> None:
    """In the first random answer whose stages share weights."""
    outcome, exposed_s = next(
        (outcome, batch.exposed_s)
        for problem, outcome in solved(map(_tied, range(40)))
        if (batch := outcome.evaluation.batch) is not None
        and batch.exposed_s
        and any(PlanStage(problem, outcome.plan, index).exchange_s for index in range(len(outcome.plan.stages)))
    )
    document, profile = written(outcome), outcome.problem.profile
    assert fault(document, profile) == ""
    for share in (0.0, 0.5, 2.0):
        forged = changed(document, lambda d: d["prediction"]["batch"].update(exposed_s=exposed_s * share))  # noqa: B023
        assert fault(forged, profile)
        # Nor where the step time follows from the forged figure.
        forged["prediction"]["minibatch_s"] += exposed_s * (share - 1) / (outcome.plan.accumulate or 1)
        assert fault(forged, profile)
    assert fault(changed(document, lambda d: d["prediction"]["batch"].pop("exposed_s")), profile)
