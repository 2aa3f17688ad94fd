"""A proof speaks of the searched space alone: a plan outside is checked for its cost, and its claims are refused."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from checking import QUICK, Document, fault, findings, written
from reported import branching, small_cluster

from pipeplan.checker.document import PlanDocument
from pipeplan.checker.structure import outside_space
from pipeplan.cost import depths
from pipeplan.cost.evaluate import evaluate
from pipeplan.planning.figure import figure_of
from pipeplan.planning.outcome import Outcome, state_verdict
from pipeplan.planning.solve import solve
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.solvers.result import Status
from pipeplan.util.deadline import NO_DEADLINE
from pipeplan.util.files import Node


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    """A plan of several stages that is proven, and as fast in the opposite order of its workers."""
    return solve(Problem(branching(4), small_cluster(), Options()))


@pytest.fixture(scope="module")
def document(outcome: Outcome) -> Document:
    return written(outcome)


def _why(document: Document, *workers: Any, copies: int = 1) -> str:
    """Why stages on these workers of the cluster lie outside the searched space."""
    stages = [document["plan"]["stages"][0] | {"layers": ["a"], "workers": list(one)} for one in workers]
    other = document | {"plan": document["plan"] | {"copies": copies, "stages": stages}}
    other["prediction"] = {"minibatch_s": 1.0}
    return outside_space(PlanDocument.of(Node(other, "plan.json")))


def test_stages_follow_the_order_of_the_workers(document: Document) -> None:
    for workers, copies, why in (
        ([(0, 1, 2), (3,)], 1, ""),
        ([(1,), (3,)], 1, ""),
        ([(3,), (0, 1, 2)], 1, "stage 2 is on workers before those of stage 1"),
        ([(0, 2), (3,)], 1, "stage 1 is not on consecutive workers in increasing order"),
        ([(1, 0), (3,)], 1, "stage 1 is not on consecutive workers in increasing order"),
        ([(0, 2), (1, 3)], 2, ""),
        ([(0, 3), (1, 2)], 2, "stage 2 is on workers before"),
        ([(0, 1), (2, 3)], 2, "copy 1 of the pipeline|copy 2 of the pipeline"),
        ([(0, 1, 2)], 3, "there are no 3 components in a row"),
    ):
        found = _why(document, *workers, copies=copies)
        assert any(found.startswith(part) and bool(found) is bool(part) for part in why.split("|")), (workers, found)


def test_placements_out_of_order_are_never_called_inside() -> None:
    """Against the definition itself: consecutive runs, one after the other."""
    six, rng = written(solve(Problem(branching(4), small_cluster(3, 2), Options()), QUICK)), random.Random(7)
    found = {True: 0, False: 0}
    for _ in range(500):
        workers = rng.sample(range(6), rng.randint(2, 6))
        cut = rng.randint(1, len(workers) - 1)
        workers = sorted(workers) if rng.random() < 0.6 else workers
        first, second = workers[:cut], workers[cut:]
        runs = all(list(run) == list(range(run[0], run[0] + len(run))) for run in (first, second))
        inside = runs and first[-1] < second[0]
        assert (_why(six, first, second) == "") is inside
        found[inside] += 1
    assert min(found.values()) > 50


def _reversed(outcome: Outcome) -> Outcome:
    """The same stages on workers in the opposite order, scored and described anew."""
    problem, last = outcome.problem, outcome.problem.cluster.workers - 1
    stages = tuple(
        replace(stage, workers=tuple(sorted(last - worker for worker in stage.workers)))
        for stage in outcome.plan.stages
    )
    plan = depths.assign_depths(replace(outcome.plan, stages=stages), problem, outcome.objective_s)
    score = evaluate(plan, problem)
    figure = figure_of(plan, score, problem, NO_DEADLINE)
    verdict = state_verdict(problem, figure.step_s, outcome.bound_s, outcome.results)
    return replace(outcome, plan=plan, evaluation=score, verdict=verdict, figure=figure)


def test_the_claim_of_a_plan_outside_is_refused_and_its_cost_is_checked(outcome: Outcome, document: Document) -> None:
    profile, outside = outcome.problem.profile, _reversed(outcome)
    assert outside.objective_s == pytest.approx(outcome.objective_s)
    assert findings(document, profile)["optimality"].holds
    claimed = written(outside)
    assert [one.what for one in findings(claimed, profile).values() if one.holds is False] == ["optimality"]
    assert "the plan lies outside the searched space" in fault(claimed, profile)
    # Without a certificate a status of its own is a claim as well; a plan that claims neither passes.
    assert fault(claimed | {"certificate": None}, profile)
    results = (replace(outside.results[0], status=Status.FEASIBLE, bound_s=0.0),)
    verdict = state_verdict(outside.problem, outside.predicted_s, 0.0, results)
    modest = written(replace(outside, bound_s=0.0, results=results, verdict=verdict))
    assert fault(modest, profile)
    assert fault(modest | {"certificate": None}, profile) == ""
