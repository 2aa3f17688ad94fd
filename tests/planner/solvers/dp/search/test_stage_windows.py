"""The stages that searches leave out before they size them, against searches that size all of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from instances import crowded_instance, drawn, mixed_instance, unequal_instance

from pipeplan.problem.cuts import Floats, Ints, enumerate_cuts
from pipeplan.problem.problem import Problem
from pipeplan.solvers.dp import dynamic_program
from pipeplan.solvers.dp.budget import limits_of
from pipeplan.solvers.dp.search.heterogeneous_terms import HeterogeneousTerms
from pipeplan.solvers.dp.search.placement_search import PlacementSearch, SharedLimit
from pipeplan.solvers.dp.search.shared_resources import SharedResources
from pipeplan.solvers.dp.search.stage_terms import StageTerms
from pipeplan.solvers.plan_space import plan_spaces


class _Thorough(PlacementSearch):
    """The search that sizes every stage on every placement."""

    def _windows(self, stage: StageTerms, behind: Floats, runs: Ints, transfer: Floats) -> tuple[Ints, Ints, Ints]:
        count = len(stage.begin)
        return np.arange(count), np.zeros(len(runs), dtype=np.intp), np.full(len(runs), count)


class _Unaware(PlacementSearch):
    """The search that counts the minibatches of an update only where they are in flight."""

    def _most_demand(self) -> Floats:
        return np.full(self.last + 1, np.inf)


def _drawn(seed: int, schedule: str) -> Problem:
    draw = (mixed_instance, unequal_instance, crowded_instance)[seed % 3]
    return drawn(seed, lambda number: replace(draw(number, layers=6, schedule=schedule), contention=True))[1]


def _search(kind: type[PlacementSearch], problem: Problem, step_time_s: float, *, memory: bool) -> PlacementSearch:
    """A search for a plan within a step time, once it has run."""
    space = plan_spaces(problem)[0]
    resources = SharedResources.of(problem, space, enumerate_cuts(problem, 1000), memory=memory)
    assert isinstance(resources.terms, HeterogeneousTerms)
    limits = limits_of(resources.problem, memory=memory, deadline=None)
    search = kind(resources.terms, step_time_s, limits, SharedLimit(resources, step_time_s))
    search.run()
    return search


@pytest.mark.parametrize("schedule", ["1f1b-stashing", "2bw"])
def test_stages_that_are_not_sized_lead_to_no_states(schedule: str) -> None:
    found = 0
    for seed in range(24):
        problem = _drawn(seed, schedule)
        best = dynamic_program.solve(problem, enumerate_cuts(problem, 1000))
        for factor in (0.95, 1.0, 1.5) if best.plan is not None else ():
            for memory in (False, True):
                step_time_s = best.objective_s * factor
                kinds = PlacementSearch, _Thorough
                quick, thorough = (_search(kind, problem, step_time_s, memory=memory) for kind in kinds)
                assert quick.kept.keys() == thorough.kept.keys(), seed
                for cut, states in quick.kept.items():
                    assert np.array_equal(states.numbers, thorough.kept[cut].numbers), (seed, cut)
                    assert np.array_equal(states.demand, thorough.kept[cut].demand), (seed, cut)
                    found += len(states)
    assert found > 500


def test_states_that_leave_an_update_too_few_minibatches_become_no_plan() -> None:
    fewer = 0
    for seed in range(24):
        problem = _drawn(seed, "2bw")
        best = dynamic_program.solve(problem, enumerate_cuts(problem, 1000))
        for factor in (0.95, 1.0, 1.5) if best.plan is not None else ():
            step_time_s = best.objective_s * factor
            aware, unaware = (_search(kind, problem, step_time_s, memory=True) for kind in (PlacementSearch, _Unaware))
            assert (0 in aware.kept) == (0 in unaware.kept), (seed, factor)
            counts = [sum(map(len, search.kept.values())) for search in (aware, unaware)]
            assert counts[0] <= counts[1], (seed, factor)
            fewer += counts[0] < counts[1]
    assert fewer > 2
