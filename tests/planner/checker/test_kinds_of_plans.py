"""`pipeplan check` of plans with virtual stages, divided state or shared weights: honest files hold, others do not."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from checking import Document, changed, fault, places, solved, written
from extents import first_few, slow_but_for
from instances import divided_instance, drawn, tied_instance
from long_chains import chain

from pipeplan.cluster_data.cluster import Cluster, Device, Level
from pipeplan.cluster_data.executor_costs import ExecutorCosts
from pipeplan.cost.stage_times import PlanStage
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.layers import Layer
from pipeplan.profile_data.profile import Profile

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
