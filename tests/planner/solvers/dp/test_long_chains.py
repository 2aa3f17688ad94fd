"""Chains too long for brute force: the search over undominated states against the one that tries all runs."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from extents import slow_but_for

from pipeplan.cluster_data.cluster import Cluster, Device, Level
from pipeplan.problem.cuts import enumerate_cuts
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.layers import Layer, Tensor
from pipeplan.profile_data.profile import Profile
from pipeplan.solvers.dp.budget import SearchLimits
from pipeplan.solvers.dp.search.cost_terms import CostTerms
from pipeplan.solvers.dp.search.heterogeneous_terms import HeterogeneousTerms
from pipeplan.solvers.dp.search.placement_search import PlacementSearch
from pipeplan.solvers.dp.search.uniform_search import UniformSearch

SHAPES = ((24,), (4, 6), (8, 3), (2, 3, 4), (3, 2, 2, 2))


def _problem(seed: int) -> Problem:
    """A chain of 8 to 16 layers on 24 workers, with memory for a part of it."""
    rng = random.Random(seed)
    count = rng.randint(8, 16)
    layers = tuple(
        Layer(f"l{i}", rng.uniform(1, 9), rng.uniform(1, 20), rng.randint(0, 80), rng.randint(0, 60))
        for i in range(count)
    )
    tensors = tuple(
        Tensor(f"t{i}", f"l{i}", (f"l{i + 1}",), rng.randint(1, 20), rng.randint(1, 20)) for i in range(count - 1)
    )
    whole = sum(layer.parameter_bytes * 4 + layer.saved_bytes for layer in layers)
    levels = tuple(
        Level(f"n{i}", n, rng.choice([5.0, 20.0, 100.0]), rng.choice([0.0, 0.3]))
        for i, n in enumerate(rng.choice(SHAPES))
    )
    device = Device("d", "cuda", int(whole * rng.uniform(0.3, 1.2)))
    options = Options(overlap=rng.choice([1.0, 1.0, 0.5]), contention=False)
    profile = Profile(layers=layers, tensors=tensors, minibatch=1, optimizer_state_ratio=1.0)
    return Problem(profile, Cluster("c", device, levels), options)


@pytest.mark.parametrize("seed", slow_but_for(range(4), range(12)))
def test_both_searches_answer_alike_at_every_threshold(seed: int) -> None:
    problem = _problem(seed)
    cuts = enumerate_cuts(problem, 1000)
    one, other = CostTerms(problem, cuts), HeterogeneousTerms(problem, cuts)
    limits = SearchLimits(memory=True, recompute=seed % 2 == 0)
    rng, answers = random.Random(seed), []
    for _ in range(8):
        threshold = one.floor * rng.uniform(1.0, 8.0) ** rng.choice([0.5, 1, 2])
        found = UniformSearch(one, threshold, limits).run() is not None
        assert found == (PlacementSearch(other, threshold, limits).run() is not None), threshold
        answers.append(found)
    # Without a limit on memory, whatever was found is found as well.
    free = CostTerms(replace(problem, options=replace(problem.options, memory=False)), cuts)
    assert all(
        UniformSearch(free, one.floor * 64, SearchLimits(memory=False)).run() is not None for found in answers if found
    )
