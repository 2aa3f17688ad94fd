"""The stages that a plan within an upper bound may have: those of the best plan are among them, and few others."""

from __future__ import annotations

from dataclasses import replace

import brute_force
import numpy as np
import pytest
from extents import first_few
from instances import ALL_SCHEDULES, Instance, crowded_instance, drawn, mixed_instance, to_plan
from long_chains import long_chain
from solver_contract import solve_by_dp, solve_by_ilp

from pipeplan.cluster_data.cluster import Cluster, Device, Level
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.solvers.ilp.constraints.charged import Charges
from pipeplan.solvers.ilp.enumeration.choices import Choices, choices_within
from pipeplan.solvers.ilp.enumeration.place_table import PlaceTable
from pipeplan.solvers.ilp.facts.placement_facts import PlacementFacts
from pipeplan.solvers.ilp.space_search import CUTOFF_SLACK
from pipeplan.solvers.plan_space import plan_spaces


def chain_problem(layers: int = 24, **options: object) -> Problem:
    """A chain on two servers of four workers, each with a quarter of the memory that a single one would need."""
    profile = long_chain(layers, scale=10.0)
    needed = sum(4 * layer.parameter_bytes + layer.saved_bytes for layer in profile.layers)
    cluster = Cluster("c", Device("d", "cuda", needed // 4), (Level("server", 4, 1e10), Level("cluster", 2, 1e9)))
    return Problem(profile, cluster, Options(overlap=1.0, **options))  # type: ignore[arg-type]


def _choices(problem: Problem, pace_s: float, copies: int = 1) -> tuple[Choices, PlacementFacts]:
    """The choices within a pace, in the first space of plans with so many copies."""
    charges = Charges(problem, next(space for space in plan_spaces(problem) if space.copies == copies))
    facts = PlacementFacts(charges.inner, pace_s * charges.scale)
    found = choices_within(facts, PlaceTable(facts, charges.factors() if problem.options.contention else None))
    assert found is not None
    return found, facts


@pytest.mark.parametrize("seeds", first_few(range(60), 12))
@pytest.mark.parametrize("schedule", ALL_SCHEDULES)
def test_the_stages_of_the_best_plan_are_among_them(schedule: str, seeds: range) -> None:
    compared = 0
    for seed in seeds:
        draw = (mixed_instance, crowded_instance)[seed % 2]

        def made(one: int, draw: object = draw) -> Instance:
            return replace(draw(one, layers=5, schedule=schedule), contention=True)  # type: ignore[operator]

        instance, problem = drawn(seed, made)
        best = brute_force.best_plan(instance)
        # Candidate placements have idle workers behind stages where brute force has them in front.
        busy = [worker for stage in best.stages for worker in range(stage.start, stage.end)]
        if not best.stages or best.copies > 1 or busy != list(range(len(busy))):
            continue
        choices, facts = _choices(problem, best.pace * (1 + CUTOFF_SLACK))
        compared += 1
        blocks = [set(block.layers) for block in facts.layers.blocks]
        found = set()
        for place, begin, end in zip(*choices.stages, strict=True):
            inside = choices.sets.has[end] & ~choices.sets.has[begin]
            layers = frozenset().union(*(blocks[index] for index in np.flatnonzero(inside)))
            found.add((layers, choices.places[place]))
        for stage in to_plan(instance, best).stages:
            assert (frozenset(stage.layers), (stage.workers[0], len(stage.workers))) in found, seed
    assert compared


def test_none_are_left_below_the_best_pace_of_a_chain_whose_memory_binds() -> None:
    problem = chain_problem()
    best = solve_by_dp(problem)
    assert not len(_choices(problem, best.objective_s * (1 - 1e-6))[0])
    assert 0 < len(_choices(problem, best.objective_s * (1 + 1e-6))[0]) < 2_000


def test_a_chain_is_confirmed_that_has_many_layers_for_its_workers() -> None:
    problem = chain_problem()
    best = solve_by_dp(problem)
    confirmed = solve_by_ilp(problem, best.objective_s)
    assert confirmed.bound_s == pytest.approx(best.objective_s, rel=1e-6)
    assert confirmed.plan is not None


def test_under_2bw_none_are_left_that_have_more_in_flight_than_an_update() -> None:
    problem = chain_problem(schedule="2bw", accumulate=4, memory=False)
    best = solve_by_dp(problem)
    # At most four minibatches are in flight, so no more than four workers are busy.
    assert best.objective_s > problem.work_s / 4 * (1 - 1e-6)
    assert not len(_choices(problem, best.objective_s * (1 - 1e-3))[0])


def test_under_vertical_sync_few_are_left_below_the_best_pace() -> None:
    problem = chain_problem(10, schedule="vertical-sync")
    best = solve_by_dp(problem)
    assert not len(_choices(problem, best.objective_s * 0.98)[0])


@pytest.mark.parametrize("seeds", first_few(range(8), 4))
@pytest.mark.parametrize("schedule", ALL_SCHEDULES)
def test_those_of_a_pace_are_found_among_those_of_a_slower_one(schedule: str, seeds: range) -> None:
    for seed in seeds:
        _, problem = drawn(seed, lambda one: mixed_instance(one, layers=5, schedule=schedule))
        best = solve_by_dp(problem)
        if best.plan is None or best.plan.copies > 1:
            continue
        wide, _ = _choices(problem, best.objective_s * 1.5)
        alone, facts = _choices(problem, best.objective_s * 1.01)
        among = choices_within(facts, wide.table, among=wide)
        assert among is not None
        assert [part.tolist() for part in among.stages] == [part.tolist() for part in alone.stages]
        assert len(alone) <= len(wide)
