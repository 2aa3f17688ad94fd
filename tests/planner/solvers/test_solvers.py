"""DP, ILP and evaluator against brute force, which shares no code with them, and against each other's proofs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import brute_force
import pytest
from brute_force import Cards
from brute_formulas import Costs
from extents import first_few
from instances import (
    ALL_SCHEDULES,
    Instance,
    corrected_instance,
    crowded_instance,
    divided_instance,
    drawn,
    hasty_instance,
    mixed_instance,
    random_instance,
    to_plan,
    to_problem,
    unequal_instance,
)
from solver_contract import assert_proves, check_solvers, solve_by_dp, solve_by_ilp

from pipeplan.cluster_data.links import Links
from pipeplan.cost import contention
from pipeplan.cost.evaluate import evaluate
from pipeplan.planning.settings import Settings
from pipeplan.planning.solve import solve
from pipeplan.problem.cuts import enumerate_cuts
from pipeplan.problem.problem import Problem
from pipeplan.solvers.dp import dynamic_program
from pipeplan.solvers.result import Status

Draw = Callable[..., Instance]
# What is drawn: all that there is on equal or on unequal servers, of one schedule, or of any with inference among them.
KINDS = [(draw, schedule) for draw in (mixed_instance, unequal_instance) for schedule in (None, *ALL_SCHEDULES)]
KINDS += [(corrected_instance, None), (divided_instance, None)]
_named = pytest.mark.parametrize(("draw", "schedule"), KINDS, ids=lambda what: getattr(what, "__name__", what))


def _drawn(seed: int, draw: Draw, schedule: str | None, layers: int) -> tuple[Instance, Problem]:
    return drawn(seed, lambda number: draw(number, layers=layers, schedule=schedule))


def _problem(seed: int, layers: int) -> tuple[Instance, Problem]:
    return drawn(seed, lambda number: random_instance(number, layers=layers))


@pytest.mark.parametrize("seeds", first_few(range(30), 2))
@_named
def test_the_evaluator_scores_as_the_oracle_does(draw: Draw, schedule: str | None, seeds: range) -> None:
    for seed in seeds:
        instance, problem = _drawn(seed, draw, schedule, layers=6)
        best = brute_force.best_plan(instance)
        if best.stages:
            score = evaluate(to_plan(instance, best), problem)
            assert score.fits, seed
            assert score.alone_s == pytest.approx(best.step_time, rel=1e-8), seed


@pytest.mark.parametrize("seeds", first_few(range(20), 8))
@pytest.mark.parametrize("schedule", ALL_SCHEDULES)
def test_the_evaluator_charges_cards_as_the_oracle_does(schedule: str, seeds: range) -> None:
    bound = 0
    for seed in seeds:
        instance, problem = _drawn(seed, crowded_instance, schedule, layers=6)
        best = brute_force.best_plan(replace(instance, contention=False))
        if best.stages:
            busiest = Cards(Costs(instance, best.copies), best.size).busiest(best.stages)
            plan = to_plan(instance, best)
            loads = contention.card_loads(plan, problem, Links.of(problem.cluster))
            assert loads.busiest()[0] == pytest.approx(busiest, rel=1e-8), seed
            assert evaluate(plan, problem).step_time_s == pytest.approx(max(best.step_time, busiest), rel=1e-8), seed
            bound += busiest > best.step_time / 4
    assert bound > len(seeds) / 5


@pytest.mark.parametrize("seeds", first_few(range(40), 4))
def test_dp_and_ilp_find_what_brute_force_finds(seeds: range) -> None:
    for seed in seeds:
        check_solvers(*_problem(seed, layers=5), ilp=("cold", "bounded"))


@pytest.mark.parametrize("seeds", first_few(range(15), 2))
@_named
def test_dp_finds_what_brute_force_finds(draw: Draw, schedule: str | None, seeds: range) -> None:
    for seed in seeds:
        check_solvers(*_drawn(seed, draw, schedule, layers=5))


def test_copies_of_a_pipeline_divide_the_optimisers_state_too() -> None:
    """Three straight copies, none of which would hold the whole state of its layers."""
    check_solvers(*_drawn(8038, divided_instance, None, layers=5))


@pytest.mark.parametrize("seeds", first_few(range(100, 105), 1))
@_named
def test_ilp_finds_what_brute_force_finds(draw: Draw, schedule: str | None, seeds: range) -> None:
    for seed in seeds:
        check_solvers(*_drawn(seed, draw, schedule, layers=4), ilp=["bounded"])


@pytest.mark.parametrize("seeds", [range(4, 6), pytest.param(range(6, 60), marks=pytest.mark.slow)])
@pytest.mark.parametrize("schedule", ["1f1b-flush", "gpipe", "zb-h1"])
def test_a_batch_of_one_minibatch_passes_through_several_stages(schedule: str, seeds: range) -> None:
    for seed in seeds:
        check_solvers(*_drawn(seed, hasty_instance, schedule, layers=4), ilp=("cold", "bounded"))


@pytest.mark.slow
@pytest.mark.parametrize("start", range(10_000, 10_400, 50))
def test_dp_and_ilp_find_what_brute_force_finds_at_length(start: int) -> None:
    for seed in range(start, start + 50):
        check_solvers(*_problem(seed, layers=7), ilp=("cold", "bounded"))


@pytest.mark.slow
@pytest.mark.parametrize("start", range(20_000, 20_200, 50))
@_named
def test_dp_finds_what_brute_force_finds_at_length(draw: Draw, schedule: str | None, start: int) -> None:
    for seed in range(start, start + 50):
        check_solvers(*_drawn(seed, draw, schedule, layers=7))


@pytest.mark.slow
@pytest.mark.parametrize("start", range(30_000, 30_050, 25))
@_named
def test_ilp_finds_what_brute_force_finds_at_length(draw: Draw, schedule: str | None, start: int) -> None:
    for seed in range(start, start + 25):
        check_solvers(
            *_drawn(seed, draw, schedule, layers=5), ilp=("cold", "bounded") if seed % 5 == 0 else ["bounded"]
        )


def test_an_infeasible_verdict_of_presolve_is_checked() -> None:
    # HiGHS 1.15 with presolve calls this program infeasible below the cut-off, and finds a plan without.
    instance, problem = _problem(20611, 5)
    found = solve_by_ilp(problem, solve_by_dp(problem).objective_s)
    assert_proves(found, brute_force.best(instance), problem)


def test_a_cutoff_that_is_too_low_is_noticed() -> None:
    _, problem = _problem(1, 5)
    best = solve_by_dp(problem)
    result = solve_by_ilp(problem, best.objective_s * 0.9)
    assert result.status == Status.INFEASIBLE


def test_a_cutoff_that_is_too_high_is_beaten() -> None:
    _, problem = _problem(1, 5)
    best = solve_by_dp(problem)
    result = solve_by_ilp(problem, best.objective_s * 3)
    assert result.objective_s == pytest.approx(best.objective_s, rel=1e-6)


def test_a_graph_with_too_many_cuts_is_still_proven_by_the_ilp() -> None:
    for seed in range(500, 504):
        instance, problem = _problem(seed, 5)
        expected = brute_force.best(instance)
        if math.isinf(expected):
            continue
        outcome = solve(problem, Settings(maximum_cuts=1, simulate=False))
        assert outcome.evaluation.alone_s == pytest.approx(expected, rel=1e-6)


def test_a_step_time_within_the_rounding_of_depths_ends_the_search() -> None:
    # Three stages of one worker have 5 minibatches in flight, or 4 where 2 x / T of the first boundary is less than
    # 1e-9, which 2bw needs here: the optimum lies where the slack of the rounding begins.
    tensors = [(0, (1,), 8.0, 8.0), (1, (2,), 4096.0, 4.0)]
    sizes = ((1.0, 100.0), (0.5, 0.0), (0.25, 4e6))
    layers = [{"f": time, "b": 2 * time, "w": weights, "s": 10.0, "u": 0.0} for time, weights in sizes]
    instance = Instance(layers, tensors, [(4, 5e9, 0.0)], stages=3, max_replicas=1, schedule="2bw", accumulate=4)
    problem = to_problem(replace(instance, overlap=0.0))
    result = dynamic_program.solve(problem, enumerate_cuts(problem, 100))
    assert result.status == Status.OPTIMAL
    assert result.plan is not None
    assert evaluate(result.plan, problem).alone_s == pytest.approx(result.objective_s, rel=1e-8)
