"""With the largest workspace of a stage's layers charged, the solvers find what trying every plan finds."""

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
    corrected_instance,
    crowded_instance,
    divided_instance,
    drawn,
    mixed_instance,
    random_instance,
    roomy,
    tied_instance,
    unequal_instance,
)
from solver_contract import check_ilp, solve_by_dp

from pipeplan.checker.verify import check_plan
from pipeplan.cost.evaluate import evaluate
from pipeplan.errors import InfeasibleError
from pipeplan.planning.settings import Settings
from pipeplan.planning.solve import solve
from pipeplan.problem.problem import Problem
from pipeplan.rendering import plan_json
from pipeplan.solvers.result import Status
from pipeplan.util.files import Node

DRAWS = (mixed_instance, unequal_instance, crowded_instance, random_instance)
SPECIAL = (corrected_instance, divided_instance, tied_instance)


def _drawn(seed: int) -> tuple[Instance, Problem]:
    """Uniform clusters and servers that differ, all schedules, in part with the executor's memory or shared weights."""
    special = seed % 8 == 7
    draw = SPECIAL[seed // 8 % 3] if special else DRAWS[seed % 4]
    chosen = {} if special or draw is random_instance else {"schedule": ALL_SCHEDULES[seed // 4 % 5]}

    def made(number: int) -> Instance:
        found = draw(number, layers=5, **chosen)
        found = roomy(burdened(found, number) if seed % 3 == 0 else found, number)
        return replace(found, grid=seed // 40 % 4 == 3)

    return drawn(seed, made)


def _without(instance: Instance) -> Instance:
    return replace(instance, layers=[layer | {"x": 0.0} for layer in instance.layers])


def _agrees(seed: int) -> bool:
    """Hold the DP to the oracle; whether workspaces make the best plan slower, or leave none."""
    instance, problem = _drawn(seed)
    expected_s, result = best(instance), solve_by_dp(problem)
    matters = best(_without(instance)) < expected_s * (1 - 1e-9)
    if math.isinf(expected_s):
        assert result.status == Status.INFEASIBLE, seed
        return matters
    assert result.status == Status.OPTIMAL, (seed, result.note)
    assert result.plan is not None
    score = evaluate(result.plan, problem)
    assert score.fits, seed
    assert score.step_time_s == pytest.approx(expected_s, rel=1e-6), seed
    assert result.objective_s == pytest.approx(expected_s, rel=1e-6), seed
    assert result.bound_s == pytest.approx(expected_s, rel=1e-6), seed
    return matters


def test_the_dp_finds_what_trying_every_plan_finds() -> None:
    assert sum(_agrees(seed) for seed in range(40)) >= 5, "chosen so that workspaces often matter"


@pytest.mark.slow
@pytest.mark.parametrize("start", range(1000, 2000, 100))
def test_the_dp_finds_what_trying_every_plan_finds_at_length(start: int) -> None:
    assert sum(_agrees(seed) for seed in range(start, start + 100)) > 15


def _ilp_agrees(seed: int, layers: int) -> bool:
    def made(number: int) -> Instance:
        found = DRAWS[seed % 3](number, layers=layers, schedule=ALL_SCHEDULES[seed // 3 % 5])
        return replace(roomy(found, number), contention=seed % 2 == 0)

    instance, problem = drawn(seed, made)
    check_ilp(instance, problem, ["bounded"])
    return best(_without(instance)) < best(instance) * (1 - 1e-9)


def test_the_ilp_finds_what_trying_every_plan_finds() -> None:
    assert sum(_ilp_agrees(seed, layers=3) for seed in range(18)) >= 3


@pytest.mark.slow
@pytest.mark.parametrize("start", range(1000, 1300, 30))
def test_the_ilp_finds_what_trying_every_plan_finds_at_length(start: int) -> None:
    assert sum(_ilp_agrees(seed, layers=4) for seed in range(start, start + 30)) > 3


@pytest.mark.parametrize("seeds", first_few(range(44), 4))
def test_the_checker_computes_the_same_and_its_proof_holds(seeds: range) -> None:
    proven = 0
    for seed in seeds:
        _, problem = _drawn(seed)
        try:
            outcome = solve(problem, Settings(solver="dp"))
        except InfeasibleError:
            continue
        document = json.loads(json.dumps(plan_json.plan_document(outcome)))
        found = {one.what: one for one in check_plan(Node(document, "plan.json"), problem.profile).results}
        assert not [one.line for one in found.values() if one.holds is False], seed
        proven += found["optimality"].holds is True
    assert proven > len(seeds) / 4
