"""Where stages may be, and which workers may stay idle between them."""

from __future__ import annotations

from pipeplan.cluster_data.cluster import Cluster, Device, Level
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.layers import Layer, Tensor
from pipeplan.profile_data.profile import Profile
from pipeplan.solvers.ilp.places import Places


def places(*levels: Level, contention: bool = False) -> Places:
    """The places of a model of two layers."""
    layers = tuple(Layer(name, 1e-3, 2e-3, 4000, 0) for name in "ab")
    profile = Profile(layers, (Tensor("t", "a", ("b",), 1000, 1000),), minibatch=1)
    cluster = Cluster("c", Device("d", "cpu", 1 << 40), levels)
    return Places(Problem(profile, cluster, Options(contention=contention)), None)


def test_idle_workers_are_only_the_last_of_a_server_or_of_the_cluster() -> None:
    found = places(Level("inner", 4, 1e9), Level("outer", 3, 1e8))
    assert list(found.firsts) == [0]
    assert list(found.starts_behind(3)) == [3, 4]
    assert list(found.starts_behind(4)) == [4]
    assert list(found.starts_behind(9)) == [9]


def test_whole_servers_may_be_idle_between_stages_where_there_are_racks() -> None:
    found = places(Level("inner", 2, 1e9), Level("rack", 2, 1e8), Level("outer", 2, 1e7))
    assert list(found.firsts) == [0, 2, 4, 6]
    assert list(found.starts_behind(3)) == [3, 4, 6]


def test_workers_may_be_idle_in_front_of_a_stage_that_spans_servers_where_cards_are_shared() -> None:
    found = places(Level("inner", 4, 1e9), Level("outer", 3, 1e8), contention=True)
    assert list(found.firsts) == [0, 1, 2, 3]
    assert list(found.starts_behind(3)) == [3, 4, 5, 6, 7]
    spanning = [(run.start, run.stop) for run, movable in zip(found.runs, found.movable, strict=True) if not movable]
    assert (1, 4) not in spanning
    assert (1, 5) in spanning
    assert (4, 6) in spanning
