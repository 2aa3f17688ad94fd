"""The search with everything charged keeps every state that no other one makes superfluous."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from instances import drawn, mixed_instance

from pipeplan.problem.cuts import enumerate_cuts
from pipeplan.solvers.dp.budget import limits_of
from pipeplan.solvers.dp.search.heterogeneous_terms import HeterogeneousTerms
from pipeplan.solvers.dp.search.placement_search import PlacementSearch, SharedLimit
from pipeplan.solvers.dp.search.shared_resources import SharedResources
from pipeplan.solvers.dp.search.states import SearchStates
from pipeplan.solvers.plan_space import plan_spaces


@pytest.fixture(scope="module")
def search() -> PlacementSearch:
    """A search on two servers of two workers, whose states have two loads."""
    _, problem = drawn(5, lambda seed: replace(mixed_instance(seed), levels=[(2, 20.0, 0.0), (2, 8.0, 0.0)]))
    space, cuts = plan_spaces(problem)[0], enumerate_cuts(problem, 1000)
    terms = HeterogeneousTerms(problem, cuts)
    shared = SharedLimit(SharedResources(terms, problem, space), 1e9)
    assert shared.resources.columns == 2
    return PlacementSearch(terms, 1e9, limits_of(problem, memory=True, deadline=None), shared)


def _alike(search: PlacementSearch, rows: list[tuple[float, float, float]]) -> SearchStates:
    """States that begin at worker 1, with these demands and loads."""
    starts = SearchStates.start(1)
    joined = SearchStates.join([replace(starts, loads=np.zeros((1, 2)))] * len(rows))
    table = np.array(rows)
    return replace(joined, demand=table[:, 0], loads=table[:, 1:])


def test_a_state_that_is_the_least_in_nothing_may_still_be_needed(search: PlacementSearch) -> None:
    """Less demand with more load one way, less load that way with more the other: neither replaces a middling state."""
    rows = [(1.0, 1.0, 5.0), (1.5, 5.0, 1.0), (2.0, 3.0, 3.0)]
    assert sorted(search._thinned(_alike(search, rows))) == [0, 1, 2]


def test_of_alike_states_only_those_that_another_is_no_worse_than_are_dropped(search: PlacementSearch) -> None:
    rng = np.random.default_rng(1)
    for number in range(1, 60):
        rows = [tuple(map(float, row)) for row in rng.integers(0, 4, (number % 12 + 1, 3))]
        states = _alike(search, rows)
        kept = [rows[row] for row in search._thinned(states)]
        assert len(kept) == len(set(kept))
        assert all(any(all(a <= b for a, b in zip(one, row, strict=True)) for one in kept) for row in rows)
        if any(len({row[column] for row in rows}) == 1 for column in range(3)):
            # With two criteria nothing superfluous is left.
            for one, other in itertools.permutations(kept, 2):
                assert any(a > b for a, b in zip(one, other, strict=True))
