"""Repeated blocks: where they begin and end, which cuts lie between them, and what a search of these finds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeplan.cluster_data.cluster import Cluster, Device, Level
from pipeplan.planning.fast import MANY_CUTS, best_in_time, best_plan
from pipeplan.problem.blocks import block_cuts, repeated_regions
from pipeplan.problem.cuts import enumerate_cuts
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.layers import Layer, Tensor
from pipeplan.profile_data.profile import Profile
from pipeplan.util.deadline import NO_DEADLINE

INSIDE = 6
"""Layers of a block: a norm, two branches of two layers that an addition joins, with a bypass."""


def _transformer(blocks: int, *, spread: float = 0.0) -> Profile:
    """An embedding, equal blocks whose measured times differ by up to `spread`, and a head."""
    layers, tensors, last = [Layer("embedding", 0.5, 1.0, 5000, 10)], list[Tensor](), "embedding"
    for block in range(blocks):
        names = [f"layers.{block}.{part}" for part in ("norm", "q", "k", "mix", "out", "add")]
        late = 1 + spread * ((block * 7) % 5) / 4
        times = (0.1, 1.0, 1.0, 0.5, 2.0, 0.1)
        layers += [
            Layer(name, time * late, 2 * time * late, 100 * part, 20 + part)
            for part, (name, time) in enumerate(zip(names, times, strict=True))
        ]
        norm, query, key, mix, out, add = names
        arrows = [
            (last, (norm, add)),
            (norm, (query, key)),
            (query, (mix,)),
            (key, (mix,)),
            (mix, (out,)),
            (out, (add,)),
        ]
        tensors += [Tensor(f"of {source}", source, targets, 100, 100) for source, targets in arrows]
        last = add
    layers.append(Layer("head", 1.0, 2.0, 5000, 10))
    return Profile(tuple(layers), (*tensors, Tensor(f"of {last}", last, ("head",), 100, 100)), 1)


def _problem(blocks: int, *, spread: float = 0.0, memory: int = 10**9) -> Problem:
    levels = (Level("server", 4, 1e4), Level("cluster", 2, 1e3))
    options = Options(schedule="1f1b-flush", accumulate=64)
    return Problem(
        _transformer(blocks, spread=spread), Cluster("eight", Device("chip", "cuda", memory), levels), options
    )


def test_blocks_are_found_whatever_their_measured_times() -> None:
    for spread in (0.0, 0.2):
        problem = _problem(20, spread=spread)
        (region,) = repeated_regions(problem.units)
        start, stop, period = region
        assert period == INSIDE
        assert stop - start >= 19 * INSIDE


def test_the_cuts_between_blocks_are_crossed_by_one_tensor_and_contain_each_other() -> None:
    problem = _problem(20)
    cuts = enumerate_cuts(problem, 10_000)
    mask = block_cuts(problem, cuts)
    assert mask is not None
    between = cuts.only(mask)
    assert between.chain
    assert not cuts.chain
    assert 20 <= len(between.ideals) <= 2 * 20 + 4
    assert set(between.sent[1:-1].tolist()) == {100.0}


def test_a_model_without_blocks_has_none() -> None:
    layers = tuple(Layer(f"l{i}", 1.0, 2.0, 10 + i * i, i) for i in range(40))
    tensors = tuple(Tensor(f"t{i}", f"l{i}", (f"l{i + 1}",), 10, 10) for i in range(39))
    problem = replace(_problem(3), profile=Profile(layers, tensors, 1))
    assert block_cuts(problem, enumerate_cuts(problem, 1000)) is None


@pytest.mark.parametrize("memory", [10**9, 25_000])
def test_a_search_between_blocks_is_near_the_best_plan(memory: int) -> None:
    problem = _problem(16, spread=0.1, memory=memory)
    cuts = enumerate_cuts(problem, 10_000)
    assert len(cuts.ideals) > MANY_CUTS
    exact = best_plan(problem, cuts)
    found, searched_all = best_in_time(problem, 10_000, NO_DEADLINE, 0.01)
    assert exact is not None
    assert found is not None
    assert not searched_all, "the plans between blocks stand for all"
    assert exact.step_time_s <= found.step_time_s * (1 + 1e-9)
    assert found.step_time_s <= exact.step_time_s * 1.02
    assert found.bound_s <= exact.step_time_s * (1 + 1e-9), "the bound holds for all plans"
