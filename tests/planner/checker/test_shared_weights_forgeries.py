"""A check refuses forged figures of the exchange of gradients of shared weights."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import pytest
from instances import drawn, tied_instance

from pipeplan.checker.verify import check_plan
from pipeplan.cost.evaluate import evaluate
from pipeplan.cost.stage_times import shared_exchange_s
from pipeplan.errors import InfeasibleError
from pipeplan.planning.outcome import Outcome
from pipeplan.planning.settings import Settings
from pipeplan.planning.solve import solve
from pipeplan.rendering.plan_json import plan_document
from pipeplan.util.files import Node

FORGERIES = {"none": 0.0, "less": 0.5, "more": 2.0}
"""The stated exchange, as a multiple of the true one."""


def _holds(document: dict[str, Any], outcome: Outcome) -> bool:
    results = check_plan(Node(document, "plan.json"), outcome.problem.profile).results
    return all(result.holds is not False for result in results)


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    """The first random answer whose stages share weights."""
    for seed in range(40):
        _, problem = drawn(seed, lambda one: tied_instance(one, layers=5, schedule="1f1b-flush"))
        try:
            found = solve(problem, Settings(solver="dp", simulate=False))
        except InfeasibleError:
            continue
        batch, stages = found.evaluation.batch, found.plan.stages
        if batch is not None and batch.exposed_s and any(shared_exchange_s(problem, stage) for stage in stages):
            return found
    raise AssertionError("no random answer has stages that share weights")


def test_an_honest_exchange_passes(outcome: Outcome) -> None:
    document = json.loads(json.dumps(plan_document(outcome)))
    assert document["prediction"]["batch"]["exposed_s"] > 0
    assert _holds(document, outcome)


@pytest.mark.parametrize("share", FORGERIES.values(), ids=FORGERIES)
def test_a_forged_exchange_is_refused(outcome: Outcome, share: float) -> None:
    document = json.loads(json.dumps(plan_document(outcome)))
    forged = copy.deepcopy(document)
    forged["prediction"]["batch"]["exposed_s"] *= share
    assert not _holds(forged, outcome)
    # Nor where the pace follows from the forged figure.
    batch = document["prediction"]["batch"]["exposed_s"] * (share - 1)
    forged["prediction"]["minibatch_s"] += batch / outcome.plan.accumulate
    assert not _holds(forged, outcome)


def test_an_exchange_that_is_not_stated_is_refused(outcome: Outcome) -> None:
    document = json.loads(json.dumps(plan_document(outcome)))
    del document["prediction"]["batch"]["exposed_s"]
    assert not _holds(document, outcome)


def test_an_all_reduce_is_hidden_where_one_stage_has_all_copies() -> None:
    """Then nothing is exchanged between stages, so that buckets leave during the backward pass."""
    hidden = 0
    for seed in range(12):
        _, several = drawn(seed, lambda one: tied_instance(one, layers=4, schedule="1f1b-flush"))
        alone = replace(several, options=replace(several.options, stages=1, pins=()))
        try:
            found = solve(alone, Settings(solver="dp", simulate=False))
        except InfeasibleError:
            continue
        assert _holds(json.loads(json.dumps(plan_document(found))), found)
        batch, other = found.evaluation.batch, evaluate(found.plan, several).batch
        assert batch is not None
        assert other is not None
        assert batch.exposed_s <= other.exposed_s
        hidden += batch.exposed_s < other.exposed_s
    assert hidden
