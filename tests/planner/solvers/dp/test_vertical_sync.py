"""What the searches under vertical sync assume about the input stage."""

from __future__ import annotations

import itertools

import brute_force
import pytest
from extents import first_few
from instances import drawn, mixed_instance
from solver_contract import assert_proves, solve_by_dp

from pipeplan.plan.schedules import update_lag, vertical_versions
from pipeplan.solvers.dp import find_pipeline
from pipeplan.solvers.dp.search.cost_terms import AnyInputStage


def test_any_input_stage_asks_for_no_more_versions_than_a_real_one() -> None:
    for copies, depth, first, replicas in itertools.product((1, 2, 3), range(1, 8), range(1, 7), range(1, 7)):
        bound = AnyInputStage.of(copies, depth, first)
        least = vertical_versions(bound.delay, bound.replicas, replicas)
        real = vertical_versions(depth + update_lag(first * copies, False), first, replicas)
        assert least <= real, (copies, depth, first, replicas)


def test_a_bound_on_the_versions_is_one_on_the_delay_for_every_number_of_replicas() -> None:
    for copies, depth, first in itertools.product((1, 2, 3), range(1, 8), range(1, 7)):
        delay = depth + int(update_lag(first * copies, False))
        bound = AnyInputStage.of(copies, depth, first)
        assert bound.delay_with(first, copies) == delay, "as much as this stage asks for"
        fewer = AnyInputStage(1, bound.delay - 1)
        assert fewer.delay_with(first, copies) <= delay


@pytest.mark.parametrize("seeds", first_few(range(700, 760), 12))
def test_the_search_with_any_input_stage_loses_no_plan(seeds: range, monkeypatch: pytest.MonkeyPatch) -> None:
    searched = []
    inner = find_pipeline._with_any_input_stage

    def counted(*arguments: object) -> object:
        searched.append(arguments)
        return inner(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(find_pipeline, "_with_any_input_stage", counted)
    for seed in seeds:
        instance, problem = drawn(seed, lambda one: mixed_instance(one, layers=5, schedule="vertical-sync"))
        assert_proves(solve_by_dp(problem), brute_force.best(instance), problem)
    assert searched, "chosen so that memory limits bind"
