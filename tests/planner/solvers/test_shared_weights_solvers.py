"""Both solvers and the evaluator on weights that layers in several stages share, against the oracle."""

from __future__ import annotations

from dataclasses import replace

import brute_force
import pytest
from extents import first_few
from instances import drawn, tied_instance, to_plan
from solver_contract import assert_proves, check_solvers, solve_by_dp

from pipeplan.cost.evaluate import evaluate
from pipeplan.cost.stage_times import PlanStage
from pipeplan.planning.settings import Settings
from pipeplan.planning.solve import solve


@pytest.mark.parametrize("seeds", first_few(range(300), 6))
def test_the_dynamic_program_finds_what_brute_force_finds(seeds: range) -> None:
    splits = 0
    for seed in seeds:
        instance, problem = drawn(seed, lambda one: tied_instance(one, layers=5))
        expected = brute_force.best(instance)
        result = solve_by_dp(problem)
        assert_proves(result, expected, problem)
        if (plan := result.plan) is not None:
            splits += any(PlanStage(problem, plan, index).exchange_s for index in range(len(plan.stages)))
    assert splits > len(seeds) / 5, "many of these plans have copies of shared weights"


@pytest.mark.parametrize("seeds", first_few(range(80), 2))
def test_the_integer_program_finds_what_brute_force_finds(seeds: range) -> None:
    for seed in seeds:
        check_solvers(*drawn(seed, lambda one: tied_instance(one, layers=4)), ("cold",))


@pytest.mark.parametrize("seeds", first_few(range(60), 4))
def test_uniform_grids_are_those_of_brute_force(seeds: range) -> None:
    def grid(seed: int):  # type: ignore[no-untyped-def]
        return replace(tied_instance(seed, layers=4), grid=True, allow_copies=False)

    for seed in seeds:
        instance, problem = drawn(1000 + seed, grid)
        assert_proves(solve_by_dp(problem), brute_force.best(instance), problem)


@pytest.mark.parametrize("seeds", first_few(range(60), 5))
def test_the_evaluator_scores_the_oracles_plan_alike(seeds: range) -> None:
    for seed in seeds:
        instance, problem = drawn(2000 + seed, lambda one: tied_instance(one, layers=5))
        found = brute_force.best_plan(instance)
        if found.stages:
            score = evaluate(to_plan(instance, found), problem)
            assert score.step_time_s == pytest.approx(found.step_time, rel=1e-6)
            assert score.fits


@pytest.mark.parametrize("schedule", ["1f1b-stashing", "2bw", "vertical-sync"])
def test_asynchronous_schedules_keep_shared_weights_in_one_stage(schedule: str) -> None:
    for seed in range(4):
        instance, problem = drawn(seed, lambda one: tied_instance(one, layers=4, schedule=schedule))
        assert not problem.shared
        assert_proves(solve_by_dp(problem), brute_force.best(instance), problem)


def test_the_grid_of_a_whole_answer_is_charged_too() -> None:
    instance, problem = drawn(7, lambda one: tied_instance(one, layers=4))
    outcome = solve(problem, Settings(simulate=False))
    expected = brute_force.best(instance)
    assert outcome.evaluation.step_time_s == pytest.approx(expected, rel=1e-6)
