"""Plans of one stage wait for their update; where that makes them worse than the solvers take them for, the answer is
still the best of all plans, and proven."""

from __future__ import annotations

import copy
import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from pipeplan.checker import data_parallel as checker
from pipeplan.checker.verify import CheckResult, check_plan
from pipeplan.cluster_data.cluster import Cluster, Device, Level, Server
from pipeplan.cost import ddp_overlap
from pipeplan.cost.evaluate import WAITS_FOR_UPDATE, evaluate
from pipeplan.plan.plan import Plan, Stage
from pipeplan.planning.settings import Settings
from pipeplan.planning.solve import solve
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.layers import Layer, Tensor
from pipeplan.profile_data.profile import Profile
from pipeplan.rendering import plan_json
from pipeplan.solvers.result import Status
from pipeplan.util.files import Node
from pipeplan_launch.comm import buckets

MIB = 2**20
QUICK = Settings("dp", certify=False, simulate=False, compare=False)
"""The plan and its step time by the formulas, and nothing beside them."""


def _problem(seed: int, overlap: float = 1.0, *, equal: bool = True) -> Problem:
    """A chain whose gradients take about as long as its computing; nothing else is slow."""
    rng = random.Random(seed)
    names = [f"l{index}" for index in range(4)]
    layers = tuple(Layer(name, rng.random(), 2 * rng.random(), rng.randint(1, 60) * MIB, 0) for name in names)
    tensors = tuple(Tensor(f"t{a}", a, (b,), 1000, 1000) for a, b in itertools.pairwise(names))
    device, inside = Device("d", "cuda", 2**40), Level("server", 4, rng.choice([40.0, 80.0, 160.0]) * MIB)
    cluster = Cluster("t", device, (inside,))
    if not equal:
        machines = [Server(replace(device, speed=speed), replace(inside, count=2)) for speed in (1.0, 1.5)]
        cluster = Cluster.of_servers("t", machines, [Level("cluster", 2, 80.0 * MIB)])
    return Problem(Profile(layers, tensors, 1), cluster, Options(overlap=overlap))


def _all_plans(problem: Problem) -> Iterator[Plan]:
    """Every way to cut the chain and to hand consecutive workers to the stages."""
    names, total = problem.layer_names, problem.cluster.workers
    for stages in range(1, total + 1):
        for cuts in itertools.combinations(range(1, len(names)), stages - 1):
            edges = [0, *cuts, len(names)]
            for marks in itertools.combinations(range(total + 1), stages + 1):
                made = tuple(
                    Stage(tuple(names[a:b]), tuple(range(first, last)), 1, 1)
                    for (a, b), (first, last) in zip(itertools.pairwise(edges), itertools.pairwise(marks), strict=True)
                )
                yield Plan(made)


def _least(problem: Problem) -> float:
    """Of all plans, at depths that do not limit."""
    step_times = []
    for plan in _all_plans(problem):
        deep = [100 ** (len(plan.stages) - number) for number in range(1, len(plan.stages) + 1)]
        stages = tuple(replace(stage, depth=depth) for stage, depth in zip(plan.stages, deep, strict=True))
        step_times.append(evaluate(Plan(stages), problem).step_time_s)
    return min(step_times)


def _binds(problem: Problem) -> bool:
    bare = solve(replace(problem, options=replace(problem.options, contention=False)), QUICK)
    score = evaluate(bare.plan, problem)
    return ddp_overlap.waits_for_allreduce(bare.plan) and score.bound == WAITS_FOR_UPDATE


@pytest.mark.parametrize("equal", [True, False])
def test_the_best_of_all_plans_is_found_and_proven(equal: bool) -> None:
    seeds = [seed for seed in range(12 if equal else 23) if _binds(_problem(seed, equal=equal))]
    assert len(seeds) >= 3, "chosen so that waiting matters"
    kinds = set()
    for seed in seeds:
        outcome = solve(_problem(seed, equal=equal), QUICK)
        kinds.add(len(outcome.plan.stages) == 1)
        assert outcome.objective_s == pytest.approx(_least(outcome.problem), rel=1e-9)
        assert outcome.results[0].status == Status.OPTIMAL, outcome.verdict.text
        assert outcome.gap < 1e-9
    assert kinds == {True, False} or not equal, "some stay with one stage, some do not"


def test_the_proof_of_one_stage_is_checked() -> None:
    """Where it is the best: also that no other number of workers does better, and that no state is left out."""
    outcomes = (solve(_problem(seed), Settings("dp", simulate=False)) for seed in range(12))
    outcome = next(one for one in outcomes if one.evaluation.bound == WAITS_FOR_UPDATE)
    document = json.loads(json.dumps(plan_json.plan_document(outcome)))
    profile = outcome.problem.profile

    def said(changed: dict[str, Any]) -> CheckResult:
        return {found.what: found for found in check_plan(Node(changed, "plan.json"), profile).results}["optimality"]

    assert said(document).holds
    greedy = copy.deepcopy(document)
    greedy["certificate"]["bound_s"] *= 1.1
    assert not said(greedy).holds
    wrong = copy.deepcopy(document)
    wrong["prediction"]["stages"][0]["exposed_sync_s"] *= 1.01
    assert not {found.what: found for found in check_plan(Node(wrong, "plan.json"), profile).results}["stages"].holds


def test_buckets_close_where_those_of_the_executor_do() -> None:
    planned = ddp_overlap.FIRST_BUCKET_BYTES, ddp_overlap.BUCKET_BYTES
    checked = checker.FIRST_BUCKET_BYTES, checker.BUCKET_BYTES
    assert planned == checked == (buckets.FIRST_BUCKET_BYTES, buckets.BUCKET_BYTES)


def test_nothing_waits_where_nothing_overlaps() -> None:
    """On CPUs all of the all-reduce is exposed by either formula."""
    for seed in range(6):
        problem = _problem(seed, overlap=0.0)
        plan = Plan((Stage(problem.layer_names, (0, 1, 2, 3), 1, 1),))
        score = evaluate(plan, problem)
        assert score.step_time_s == pytest.approx(score.alone_s)
        assert score.bound != WAITS_FOR_UPDATE


def test_copies_of_one_stage_count_where_replicas_are_limited() -> None:
    """Two replicas at most in a copy: four workers can still be used, as two copies of two."""
    layers = tuple(Layer(f"l{index}", 1.0, 2.0, 60 * MIB, 0) for index in range(2))
    tensors = (Tensor("t", "l0", ("l1",), 10**10, 10**10),)
    levels = (Level("server", 2, 400.0 * MIB), Level("cluster", 2, 200.0 * MIB))
    cluster = Cluster("t", Device("d", "cuda", 2**50), levels)
    problem = Problem(Profile(layers, tensors, 1), cluster, Options(max_replicas=2))
    outcome = solve(problem, Settings("dp", simulate=False))
    assert (outcome.plan.config, len(outcome.plan.stages)) == ("2×(2)", 1)
    assert outcome.evaluation.bound == WAITS_FOR_UPDATE
    assert outcome.bound_s <= outcome.objective_s * (1 + 1e-9)
    document = json.loads(json.dumps(plan_json.plan_document(outcome)))
    found = {one.what: one for one in check_plan(Node(document, "plan.json"), problem.profile).results}
    assert found["optimality"].holds, found["optimality"].text
