"""The cost of FSDP and HSDP: a recurrence that can be followed by hand, memory, and what makes it larger or smaller."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from long_chains import chain

from pipeplan.cluster_data.cluster import Cluster, Device, Level
from pipeplan.cluster_data.links import Links
from pipeplan.cost.evaluate import evaluate
from pipeplan.cost.sharded_data_parallel import ShardedPasses, sharded_memory, sharded_passes
from pipeplan.cost.stage_times import plain_data_parallel
from pipeplan.explanation.time_breakdown import break_down_time
from pipeplan.plan.plan import Plan
from pipeplan.problem.options import Options, Sharding
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.fsdp_units import LEAST_BYTES, fsdp_units
from pipeplan.profile_data.layers import Layer
from pipeplan.profile_data.profile import Profile
from pipeplan.profile_data.ties import TiedWeights

GB = 10**9
FORWARD, BACKWARD, WEIGHTS = (2.0, 1.0, 3.0), (4.0, 2.0, 6.0), (6 * GB, 12 * GB, 2 * GB)
TWO = Cluster("two", Device("gpu", "cuda", 10**12), (Level("server", 2, 2.0 * GB),))
"""A ring of two workers: half of the bytes in one step at 2 GB/s, so that a gather takes 1 s for each 4 GB."""
SERVERS = replace(TWO, levels=(*TWO.levels, Level("cluster", 2, 1.0 * GB)))
"""Two such servers; a ring of two shards of one weight across them takes 1 s for each GB of the weight."""


def _problem(
    cluster: Cluster = TWO,
    sharding: Sharding = Sharding.FULL,
    accumulate: int = 2,
    weights: tuple[int, ...] = WEIGHTS,
    **options: Any,
) -> Problem:
    """Three layers of 10 GB activations each, of which each is a unit."""
    times = zip("012", FORWARD, BACKWARD, weights, strict=True)
    own = {"update_s": 0.5, "workspace_bytes": GB, "buffer_bytes": 7}
    layers = [Layer(f"l{name}", *figures, 10 * GB, **own) for name, *figures in times]
    profile = chain(layers, 3 * GB, optimizer_state_ratio=2.0)
    chosen = {"schedule": "1f1b-flush", "stages": 1, "accumulate": accumulate, "sharding": sharding} | options
    return Problem(profile, cluster, Options(**chosen))


def _plan(problem: Problem, *, recompute: bool = False) -> Plan:
    plan = plain_data_parallel(problem, problem.cluster.workers)
    return replace(plan, stages=(replace(plan.stages[0], recompute=recompute),))


def _passes(problem: Problem, **changes: Any) -> ShardedPasses:
    return sharded_passes(_plan(problem, **changes), problem, Links.of(problem.cluster))


def test_three_units_on_two_workers() -> None:
    """Gathers take 1.5, 3 and 0.5 s.

    Forward: gather 1.5, then max(2, 3), max(1, 0.5) and 3. Backward: gather 0.5, then max(6, 3), max(2, 0.5 + 1.5),
    max(4, 3), and 1.5 to reduce the gradients of the first unit.
    """
    found = _passes(_problem())
    assert found.forward_s == pytest.approx(1.5 + 3 + 1 + 3)
    assert found.backward_s == pytest.approx(0.5 + 6 + 2 + 4 + 1.5)
    assert found.exposed_s == found.across_s == 0, "nothing is left for the end of an update"


def test_all_reduces_across_servers_follow_the_scatters_of_their_units() -> None:
    """They take 6, 12 and 2 s. The third unit's scatter ends at 0.5 + 6 + 0.5 = 7, its all-reduce at 9.

    The second unit's: at 0.5 + 6 + 2 + 3 = 11.5 and 23.5. The first unit's scatter ends at 0.5 + 6 + 2 + 4 + 1.5 = 14,
    and its all-reduce at 29.5.
    """
    found = _passes(_problem(SERVERS, Sharding.HYBRID, 4))
    inside = _passes(_problem())
    assert (found.forward_s, found.backward_s) == (inside.forward_s, inside.backward_s), "exchanges inside a server"
    assert found.backward_s + found.exposed_s == pytest.approx(29.5)
    assert found.across_s == pytest.approx(20)


def test_memory_of_a_worker() -> None:
    """20 GB of weights: with gradients and Adam 4 × 20 / 2. The peak is in the second unit's backward pass: weights of
    6 + 12 GB, gradients of 12 + 2 GB, and activations of two units.
    """
    problem = _problem()
    (cost,) = evaluate(_plan(problem), problem).stages
    assert cost.memory_bytes == pytest.approx(40 * GB + 18 * GB + 14 * GB + 20 * GB + GB + 3 * 7)
    several = _problem(accumulate=4)
    (more,) = evaluate(_plan(several), several).stages
    assert more.memory_bytes == cost.memory_bytes, "gradients are added up in parts"
    (less,) = evaluate(_plan(problem, recompute=True), problem).stages
    assert less.minibatch_bytes == pytest.approx(2 * 3 * GB + 10 * GB), "the inputs of two units, and one unit whole"
    hybrid = _problem(SERVERS, Sharding.HYBRID, 4)
    (inside,) = evaluate(_plan(hybrid), hybrid).stages
    assert inside.memory_bytes == cost.memory_bytes, "servers are replicas"


def test_gradients_of_the_root_are_whole_from_the_first_of_its_layers_on() -> None:
    """An embedding of 6 GB, two blocks of 2 GB, and a head that may have its own weights or those of the embedding.

    The peak is where the head runs backward: its gradient, the weights of the root and of the last block, and all
    activations.
    """
    problem = _problem(weights=(6 * GB, 2 * GB, 2 * GB))
    for own, tied, gradient in ((4, False, 4), (0, True, 6), (0, False, 0)):
        sizes = {"embed": 6, "h.0": 2, "h.1": 2, "head": own}
        layers = tuple(Layer(name, 1.0, 2.0, size * GB, 10 * GB) for name, size in sizes.items())
        ties = (TiedWeights(("weight",), ("embed", "head"), 6 * GB),) if tied else ()
        other = replace(problem, profile=Profile(layers, (), 1, optimizer_state_ratio=2.0, tied=ties))
        found, _ = sharded_memory(_plan(other), other)
        assert found == pytest.approx((4 * (10 + own) / 2 + (6 + own + 2) + gradient + 40) * GB)


def test_every_minibatch_gathers_weights_twice_and_reduces_gradients_once() -> None:
    """In a server of two that is 3 × 20 GB for two minibatches; across two servers 2 × 20 GB an update of 12."""
    problem = _problem(SERVERS, Sharding.HYBRID, 12)
    found = break_down_time("hsdp", _plan(problem), problem)
    assert found.allreduce_bytes == pytest.approx(30 * GB + 40 / 12 * GB)


def test_units_are_the_repeated_blocks_or_runs_of_layers() -> None:
    def layers(*named: tuple[str, int]) -> list[Layer]:
        return [Layer(name, 1.0, 1.0, size, 0) for name, size in named]

    inner = [(f"h.{block}.{part}", 10) for block in range(3) for part in ("attn", "mlp")]
    blocks = fsdp_units(layers(("wte", 50), *inner[:2], ("add", 0), *inner[2:], ("head", 50)))
    assert [[layer.name for layer in unit.layers] for unit in blocks] == [
        ["wte"],
        ["h.0.attn", "h.0.mlp", "add"],
        ["h.1.attn", "h.1.mlp"],
        ["h.2.attn", "h.2.mlp"],
        ["head"],
    ]
    assert [unit.gathered_bytes for unit in blocks] == [0, 20, 20, 20, 0]
    runs = fsdp_units(layers(("a", 10), ("b", LEAST_BYTES), ("c", 0), ("d", 5)))
    assert [unit.gathered_bytes for unit in runs] == [LEAST_BYTES + 10, 5]
    assert all(unit.wrapped for unit in runs)
    # Of a list of different modules the executor would wrap the whole model: all of its weights are the root's.
    named = layers(("features.0", LEAST_BYTES), ("features.1", 0), ("head.0", LEAST_BYTES), ("head.1", LEAST_BYTES))
    ops = ("Conv2d(3, 64)", "ReLU", "Linear(4, 4)", "BatchNorm1d(4)")
    different = [replace(layer, module=layer.name, op=op) for layer, op in zip(named, ops, strict=True)]
    (whole,) = fsdp_units(different)
    assert not whole.wrapped
    assert len(whole.layers) == 4
    same = [replace(layer, op="Linear(4, 4)") for layer in different]
    assert [unit.gathered_bytes for unit in fsdp_units(same)] == [0, LEAST_BYTES, LEAST_BYTES]


def test_frozen_weights_are_gathered_and_divided_but_have_no_gradients() -> None:
    """Weights of the second unit are frozen: 12 GB in place of 12 GB of parameters.

    Backward: gather 0.5, then max(6, 3), max(2, 0.5 + 1.5), 4 with nothing to reduce, and 1.5 for the first unit. In
    memory the second unit has 12 / 2 GB of weights, and 16 + 6 GB are divided. The peak is in the third unit's backward
    pass: weights of 12 + 2 GB, gradients of 2 GB, and all activations.
    """
    problem = _problem()
    layers = list(problem.profile.layers)
    layers[1] = replace(layers[1], parameter_bytes=0, frozen_bytes=12 * GB, buffer_bytes=12 * GB + 7)
    problem = Problem(replace(problem.profile, layers=tuple(layers)), problem.cluster, problem.options)
    assert _passes(problem).forward_s == pytest.approx(1.5 + 3 + 1 + 3)
    assert _passes(problem).backward_s == pytest.approx(0.5 + 6 + 2 + 4 + 1.5)
    (cost,) = evaluate(_plan(problem), problem).stages
    assert cost.memory_bytes == pytest.approx(16 * GB + 6 * GB + 14 * GB + 2 * GB + 30 * GB + GB + 3 * 7)
    slow = replace(problem, cluster=replace(TWO, levels=(Level("server", 2, 1.0 * GB),)))
    assert _passes(slow).backward_s == pytest.approx(1 + 6 + (1 + 3) + 4 + 3)
