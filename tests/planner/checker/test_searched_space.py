"""A proof speaks of the searched space alone: a plan outside is checked for its cost, and its claims are refused."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest
from instances import drawn, random_instance
from reported import branching, small_cluster

from pipeplan.checker.document import PlanDocument
from pipeplan.checker.searched_space import outside_space
from pipeplan.checker.verify import CheckedPlan, check_plan
from pipeplan.cost import depths
from pipeplan.cost.evaluate import evaluate
from pipeplan.errors import InfeasibleError
from pipeplan.plan.plan import Plan, Stage
from pipeplan.planning.figure import figure_of
from pipeplan.planning.outcome import Outcome, state_verdict
from pipeplan.planning.settings import Settings
from pipeplan.planning.solve import solve
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.rendering import plan_json
from pipeplan.solvers.result import Status
from pipeplan.util.deadline import NO_DEADLINE
from pipeplan.util.files import Node


def _stage(*workers: int) -> Stage:
    return Stage(("a",), workers, 1, 1)


def _why(problem: Problem, *stages: Stage, copies: int = 1) -> str:
    """Why a plan with these workers lies outside the space of a problem's cluster."""
    document = {
        "profile": {"digest": "", "minibatch": 1},
        "cluster": problem.cluster.to_json() | {"digest": problem.cluster.digest()},
        "options": {"overlap": 1.0},
        "plan": Plan(tuple(stages), copies).to_json(),
        "prediction": {"minibatch_s": 1.0},
    }
    return outside_space(PlanDocument.of(Node(json.loads(json.dumps(document)), "plan.json")))


@pytest.mark.parametrize(
    ("stages", "copies", "why"),
    [
        ([_stage(0, 1, 2), _stage(3)], 1, ""),
        ([_stage(1), _stage(3)], 1, ""),
        ([_stage(3), _stage(0, 1, 2)], 1, "stage 2 is on workers before those of stage 1"),
        ([_stage(0, 2), _stage(3)], 1, "stage 1 is not on consecutive workers in increasing order"),
        ([_stage(1, 0), _stage(3)], 1, "stage 1 is not on consecutive workers in increasing order"),
        ([_stage(0, 2), _stage(1, 3)], 2, ""),
        ([_stage(0, 3), _stage(1, 2)], 2, "copy 2 of the pipeline|stage 2 is on workers before"),
        ([_stage(0, 1), _stage(2, 3)], 2, "copy 1 of the pipeline|copy 2 of the pipeline"),
        ([_stage(0, 1, 2)], 3, "there are no 3 components in a row"),
    ],
)
def test_stages_follow_the_order_of_the_workers(stages: list[Stage], copies: int, why: str) -> None:
    problem = Problem(branching(4), small_cluster(), Options())
    found = _why(problem, *stages, copies=copies)
    assert any(found.startswith(part) and bool(found) is bool(part) for part in why.split("|")), found


def test_every_plan_that_a_solver_finds_lies_inside() -> None:
    inside = 0
    for seed in range(10):
        _, problem = drawn(seed, lambda number: random_instance(number, layers=4))
        try:
            outcome = solve(problem, Settings(solver="dp", certify=False, simulate=False, compare=False))
        except InfeasibleError:
            continue
        assert _why(problem, *outcome.plan.stages, copies=outcome.plan.copies) == ""
        inside += 1
    assert inside > 6


def _reversed(outcome: Outcome) -> Outcome:
    """The same stages on workers in the opposite order, scored and described anew."""
    last = outcome.problem.cluster.workers - 1
    stages = [replace(stage, workers=tuple(last - worker for worker in stage.workers)) for stage in outcome.plan.stages]
    ordered = [replace(stage, workers=tuple(sorted(stage.workers))) for stage in stages]
    problem = outcome.problem
    plan = depths.assign_depths(replace(outcome.plan, stages=tuple(ordered)), problem, outcome.objective_s)
    score = evaluate(plan, problem)
    figure = figure_of(plan, score, problem, NO_DEADLINE)
    verdict = state_verdict(problem, figure.step_s, outcome.bound_s, outcome.results)
    return replace(outcome, plan=plan, evaluation=score, verdict=verdict, figure=figure)


def _checked(document: dict[str, Any], outcome: Outcome) -> CheckedPlan:
    return check_plan(Node(json.loads(json.dumps(document)), "plan.json"), outcome.problem.profile)


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    """A plan of several stages that is proven, and as fast in the opposite order of its workers."""
    return solve(Problem(branching(4), small_cluster(), Options()))


def test_the_claim_of_a_plan_outside_is_refused_and_its_cost_is_checked(outcome: Outcome) -> None:
    assert _checked(plan_json.plan_document(outcome), outcome).shown is not None
    outside = _reversed(outcome)
    assert outside.objective_s == pytest.approx(outcome.objective_s)
    checked = _checked(plan_json.plan_document(outside), outcome)
    assert [result.what for result in checked.results if result.holds is False] == ["optimality"]
    assert checked.wrong is not None
    assert "the plan lies outside the searched space" in checked.wrong.text
    assert checked.shown is None


@pytest.mark.parametrize("certificate", [True, False])
def test_a_plan_outside_may_state_no_proof(outcome: Outcome, certificate: bool) -> None:
    """Without a certificate a status of its own is a claim as well; a plan that claims neither passes."""
    outside = _reversed(outcome)
    document = plan_json.plan_document(outside)
    if not certificate:
        document["certificate"] = None
        assert _checked(document, outcome).wrong is not None
    results = (replace(outside.results[0], status=Status.FEASIBLE, bound_s=0.0),)
    verdict = state_verdict(outside.problem, outside.predicted_s, 0.0, results)
    modest = replace(outside, bound_s=0.0, results=results, verdict=verdict)
    document = plan_json.plan_document(modest) | {"certificate": outcome.certificate.document if certificate else None}
    checked = _checked(document, outcome)
    assert (checked.wrong is None) is not certificate, checked.wrong
    assert checked.shown is None


def test_placements_out_of_order_are_never_called_inside() -> None:
    """Against the definition itself: consecutive runs, one after the other."""
    problem, rng = Problem(branching(4), small_cluster(3, 2), Options()), random.Random(7)
    found = {True: 0, False: 0}
    for _ in range(500):
        workers = rng.sample(range(6), rng.randint(2, 6))
        cut = rng.randint(1, len(workers) - 1)
        workers = sorted(workers) if rng.random() < 0.6 else workers
        first, second = workers[:cut], workers[cut:]
        runs = all(list(run) == list(range(run[0], run[0] + len(run))) for run in (first, second))
        inside = runs and first[-1] < second[0]
        assert (_why(problem, _stage(*first), _stage(*second)) == "") is inside
        found[inside] += 1
    assert min(found.values()) > 50
