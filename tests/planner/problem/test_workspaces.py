"""The largest workspace between two cuts, against the maximum over the layers between them, one pair at a time."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
from instances import drawn, mixed_instance, roomy
from long_chains import long_chain

from pipeplan.cluster_data.cluster import Cluster, Device, Level
from pipeplan.problem.cuts import Cuts, enumerate_cuts
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.solvers.dp.cut_selection import prune_cuts

CLUSTER = Cluster("c", Device("d", "cuda", 1 << 30), (Level("server", 2, 1e10, 0.0),))


def _is_right(problem: Problem, cuts: Cuts) -> int:
    """Compare all pairs of cuts, with one end for all and with an end for each; returns how many there are."""
    pairs = [(start, end) for end in range(len(cuts.ideals)) for start in cuts.smaller(end).tolist()]
    expected = [max(problem.units[unit].workspace_bytes for unit in cuts.members(*pair)) for pair in pairs]
    starts, ends = np.array(pairs, dtype=np.intp).T
    assert cuts.workspaces.between(ends, starts).tolist() == expected
    for end in range(1, len(cuts.ideals)):
        mine = np.flatnonzero(ends == end)
        assert cuts.workspaces.between(end, starts[mine]).tolist() == [expected[index] for index in mine]
    return len(pairs)


def test_in_a_chain_of_any_length() -> None:
    for count in (1, 2, 3, 8, 33):
        rng, profile = random.Random(count), long_chain(count)
        layers = tuple(replace(layer, workspace_bytes=rng.choice((0, 5, 9, 30))) for layer in profile.layers)
        problem = Problem(replace(profile, layers=layers), CLUSTER, Options())
        cuts = enumerate_cuts(problem, 100)
        assert cuts.chain
        assert _is_right(problem, cuts) == count * (count + 1) / 2
        kept = np.ones(count + 1, dtype=bool)
        kept[2:-1:2] = False
        _is_right(problem, cuts.only(kept))


def test_in_graphs_that_branch() -> None:
    branching = 0
    for seed in range(20):
        _, problem = drawn(seed, lambda one: roomy(mixed_instance(one), one))
        cuts = enumerate_cuts(problem, 1000)
        branching += not cuts.chain
        assert _is_right(problem, cuts) > 0
    assert branching > 5


def test_more_layers_than_bits_of_a_word() -> None:
    profile = long_chain(130)
    layers = tuple(replace(layer, workspace_bytes=index % 7) for index, layer in enumerate(profile.layers))
    problem = Problem(replace(profile, layers=layers), CLUSTER, Options())
    cuts = enumerate_cuts(problem, 1000)
    _is_right(problem, cuts)
    found = replace(cuts.workspaces, ranges=cuts.workspaces.ranges[:0])
    starts = np.arange(130)
    assert found.between(130, starts).tolist() == [max(layer.workspace_bytes for layer in layers[i:]) for i in starts]


def test_a_profile_without_workspaces_needs_no_table_and_inference_none() -> None:
    problem = Problem(long_chain(5), CLUSTER, Options())
    found = enumerate_cuts(problem, 100).workspaces
    assert found.ranges.size == found.masks.size == 0
    assert found.between(5, np.arange(3)).tolist() == [0.0] * 3
    layers = tuple(replace(layer, workspace_bytes=9) for layer in problem.profile.layers)
    forward = Problem(replace(problem.profile, layers=layers), CLUSTER, Options(inference=True))
    assert all(unit.workspace_bytes == 0 for unit in forward.units)


def test_a_layer_that_costs_only_its_workspace_may_not_move_over_a_cut() -> None:
    profile = long_chain(4)
    first, second, *rest = profile.layers
    free = replace(second, forward_s=0.0, backward_s=0.0, update_s=0.0, parameter_bytes=0, saved_bytes=0)
    for size, cuts_left in ((0, 4), (9, 5)):
        layers = (first, replace(free, workspace_bytes=size), *rest)
        problem = Problem(replace(profile, layers=layers), CLUSTER, Options())
        assert len(prune_cuts(problem, enumerate_cuts(problem, 100)).ideals) == cuts_left
