"""Facts before any program: where stages may be, and which layers must share one."""

from __future__ import annotations

from pipeplan.cluster_data.cluster import Cluster, Device, Level
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.layers import Layer, Tensor
from pipeplan.profile_data.profile import Profile
from pipeplan.solvers.ilp.facts.layers import LayerBlocks
from pipeplan.solvers.ilp.facts.placements import Placement, PlacementSet

DEVICE = Device("d", "cpu", 1 << 40)


def test_idle_workers_are_only_the_last_of_a_server_or_of_the_cluster() -> None:
    cluster = Cluster("c", DEVICE, (Level("inner", 4, 1e9), Level("outer", 3, 1e8)))
    runs = PlacementSet(cluster, most=12)
    assert {run.end for run in runs.all if (run.start, run.replicas) == (1, 2)} == {2, 3, 11}
    assert runs.firsts == (0,)
    assert Placement(1, 2, 3) in runs.all
    assert Placement(1, 2, 7) not in runs.all


def test_layers_are_joined_across_what_no_link_carries_in_time() -> None:
    layers = tuple(Layer(name, 1e-3, 2e-3, 4000, 0) for name in "abcd")
    tensors = tuple(
        Tensor(f"t{source}", source, (target,), size, size)
        for source, target, size in (("a", "b", 1000), ("b", "c", 2000), ("c", "d", 3000))
    )
    problem = Problem(Profile(layers, tensors, minibatch=1), Cluster("c", DEVICE, (Level("inner", 2, 1e6),)))
    assert [block.layers for block in LayerBlocks(problem, largest=2500.0).blocks] == [("a",), ("b",), ("c", "d")]
    assert len(LayerBlocks(problem, largest=1e9)) == 4
