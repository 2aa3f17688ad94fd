"""With the executor's own work charged, the solvers find what trying every plan finds, and the checker agrees."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from brute_force import best
from brute_machines import Instance
from extents import first_few
from instances import (
    ALL_SCHEDULES,
    burdened,
    crowded_instance,
    drawn,
    mixed_instance,
    random_instance,
    unequal_instance,
)
from solver_contract import check_ilp, solve_by_dp

from pipeplan.checker.verify import check_plan
from pipeplan.cluster_data.executor_costs import ExecutorCosts
from pipeplan.cost.evaluate import evaluate
from pipeplan.errors import InfeasibleError, InputError
from pipeplan.planning.settings import Settings
from pipeplan.planning.solve import solve
from pipeplan.problem.problem import Problem
from pipeplan.rendering import plan_json
from pipeplan.solvers.result import Status
from pipeplan.util.files import Node


def _drawn(seed: int) -> tuple[Instance, Problem]:
    """Uniform clusters and servers that differ, grids, all schedules, with and without what workers share charged."""
    draw = (random_instance, mixed_instance, unequal_instance, crowded_instance)[seed % 4]
    chosen = {} if draw is random_instance else {"schedule": ALL_SCHEDULES[seed // 4 % 5]}

    def made(number: int) -> Instance:
        found = burdened(draw(number, layers=5, **chosen), number)
        return replace(found, contention=seed // 20 % 2 == 0, grid=seed // 40 % 4 == 3)

    return drawn(seed, made)


def _agrees(seed: int) -> bool:
    """Hold the DP to the oracle; whether the executor's work and memory make the best plan slower."""
    instance, problem = _drawn(seed)
    expected_s, result = best(instance), solve_by_dp(problem)
    if math.isinf(expected_s):
        assert result.status == Status.INFEASIBLE, seed
        return False
    assert result.status == Status.OPTIMAL, (seed, result.note)
    assert result.plan is not None
    assert evaluate(result.plan, problem).step_time_s == pytest.approx(expected_s, rel=1e-6), seed
    assert result.objective_s == pytest.approx(expected_s, rel=1e-6), seed
    assert result.bound_s == pytest.approx(expected_s, rel=1e-6), seed
    nothing = dict.fromkeys(("sample", "step", "worker", "share", "kept"), 0.0)
    free = replace(instance, executor=(0.0, 0.0, 0.0, 0.0), **nothing)
    return best(free) < expected_s * (1 - 1e-9)


@pytest.mark.parametrize("seeds", first_few(range(40), 12))
def test_the_dp_finds_what_trying_every_plan_finds(seeds: range) -> None:
    assert sum(_agrees(seed) for seed in seeds) > len(seeds) / 3, "chosen so that the executor's work often matters"


def test_the_memory_of_workers_alone_rules_plans_out() -> None:
    slower = 0
    for seed in (1, 18):
        instance, _ = _drawn(seed)
        slower += best(replace(instance, worker=0.0, share=0.0)) < best(instance) * (1 - 1e-9)
    assert slower == 2


def test_a_worker_that_needs_all_memory_is_refused() -> None:
    _, problem = _drawn(0)
    device = replace(problem.cluster.device, memory_bytes=1000)
    cluster = replace(problem.cluster, device=device, executor=ExecutorCosts(worker_bytes=1000))
    with pytest.raises(InputError, match="before any layer"):
        Problem(problem.profile, cluster, replace(problem.options, memory=True))


@pytest.mark.slow
@pytest.mark.parametrize("start", range(1000, 2000, 100))
def test_the_dp_finds_what_trying_every_plan_finds_at_length(start: int) -> None:
    assert sum(_agrees(seed) for seed in range(start, start + 100)) > 30


def _ilp_agrees(seed: int, layers: int) -> None:
    def made(number: int) -> Instance:
        draw = (mixed_instance, unequal_instance, crowded_instance)[seed % 3]
        found = draw(number, layers=layers, schedule=ALL_SCHEDULES[seed // 3 % 5])
        return replace(burdened(found, number), contention=True)

    check_ilp(*drawn(seed, made), ["bounded"])


@pytest.mark.parametrize("seeds", first_few(range(15), 8))
def test_the_ilp_finds_what_trying_every_plan_finds(seeds: range) -> None:
    for seed in seeds:
        _ilp_agrees(seed, layers=3)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(1000, 1300, 30))
def test_the_ilp_finds_what_trying_every_plan_finds_at_length(start: int) -> None:
    for seed in range(start, start + 30):
        _ilp_agrees(seed, layers=4)


@pytest.mark.parametrize("seeds", first_few(range(4, 44), 6))
def test_the_checker_computes_the_same_and_its_proof_holds(seeds: range) -> None:
    proven = 0
    for seed in seeds:
        _, problem = _drawn(seed)
        try:
            outcome = solve(problem, Settings(solver="dp", simulate=False))
        except InfeasibleError:
            continue
        document = json.loads(json.dumps(plan_json.plan_document(outcome)))
        found = {one.what: one for one in check_plan(Node(document, "plan.json"), problem.profile).results}
        assert not [one.line for one in found.values() if one.holds is False], seed
        proven += found["optimality"].holds is True
        burdened_s = [node.get("executor_s", 0.0) for node in document["prediction"]["stages"]]
        assert any(burdened_s) == any(problem.cluster.executor.times().values()) or not math.fsum(burdened_s), seed
    assert proven > len(seeds) / 4


def test_the_checker_refuses_a_plan_that_hides_the_executors_work() -> None:
    _, problem = _drawn(1)
    cluster = replace(problem.cluster, executor=ExecutorCosts(pass_s=1.0))
    charged = Problem(problem.profile, cluster, problem.options)
    document = json.loads(json.dumps(plan_json.plan_document(solve(charged, Settings(solver="dp", simulate=False)))))
    for node in document["prediction"]["stages"]:
        node["executor_s"] = 0.5
    found = check_plan(Node(document, "plan.json"), charged.profile).results
    assert any(one.holds is False and "executor_s" in one.text for one in found)
