"""What is left of a cluster after a loss, and what moves from one plan to the next."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from instances import drawn, random_instance, unequal_instance

from pipeplan.cluster_data import cluster_toml
from pipeplan.cluster_data.cluster import Cluster, Device, Level
from pipeplan.errors import InputError
from pipeplan.plan.plan import Plan, Stage
from pipeplan.profile_data.layers import Layer
from pipeplan.profile_data.profile import Profile
from pipeplan.replanning.migration import plan_changes
from pipeplan.replanning.remaining_cluster import RemainingCluster, remove_workers, workers_named


def _cluster(*levels: tuple[str, int]) -> Cluster:
    made = tuple(Level(name, count, 100.0 / 2**place) for place, (name, count) in enumerate(levels))
    return Cluster("three", Device("d", "cpu", 1), made)


THREE = _cluster(("server", 2), ("rack", 2), ("cluster", 2))


def _without(cluster: Cluster, *names: str) -> RemainingCluster:
    return remove_workers(cluster, workers_named(list(names), cluster))


@pytest.mark.parametrize("draw", [random_instance, unequal_instance])
def test_what_is_left_is_what_was_there(draw: Any) -> None:
    """Every worker is on the device that it was on, with the same neighbours at every level; no lost one is left."""
    reduced = 0
    for seed in range(150):
        cluster = drawn(seed, draw)[1].cluster
        rng = random.Random(seed)
        lost = frozenset(worker for worker in range(cluster.workers) if rng.random() < 0.3)
        try:
            left = remove_workers(cluster, lost)
        except InputError as error:
            if "nothing is left" in str(error) or "--cluster" in str(error):
                continue  # no cluster can express it
            raise
        reduced += bool(lost)
        assert set(left.workers) == set(range(cluster.workers)) - lost
        assert left.cluster.workers == len(left.workers)
        assert left.cluster.devices == tuple(cluster.devices[worker] for worker in left.workers)
        assert [left.servers[left.cluster.server_of(worker)] for worker in range(len(left.workers))] == [
            cluster.server_of(worker) for worker in left.workers
        ]
        for one, other in itertools.combinations(range(len(left.workers)), 2):
            pair = left.workers[one], left.workers[other]
            assert left.cluster.level_between(one, other) == cluster.level_between(*pair), (seed, lost)
    assert reduced > 30


def test_links_and_prices_stay() -> None:
    cluster = cluster_toml.load_cluster("A")
    assert remove_workers(cluster, frozenset()).cluster == cluster
    assert _without(cluster, "server1").cluster == cluster.with_servers(3)
    unequal = _without(cluster, "server1.worker2", "worker3").cluster
    assert unequal.server_sizes == (3, 3, 4, 4)
    assert unequal.levels[1] == cluster.levels[1]
    assert {machine.inside.bandwidth for machine in unequal.machines} == {12e9}
    # One worker less on each server: equal servers again, so that certificates and quick searches are to be had.
    again = _without(unequal, "server2.worker0", "server3.worker0").cluster
    assert (again.uniform, again.server_sizes) == (True, (3, 3, 3, 3))


def test_names_count_from_zero_and_nonsense_is_one_line() -> None:
    assert workers_named(["server2"], THREE) == {4, 5}
    assert workers_named(["worker5", "server2.worker1", "worker0"], THREE) == {0, 5}
    left = _without(THREE, "server0", "server2")
    assert (left.workers, left.servers) == ((2, 3, 6, 7), (1, 3))
    assert [level.count for level in left.cluster.levels] == [2, 1, 2]
    assert [level.count for level in remove_workers(THREE, frozenset(range(4))).cluster.levels] == [2, 2, 1]
    boards = _cluster(("board", 2), ("server", 2), ("all", 2))
    assert [level.count for level in _without(boards, "server1").cluster.levels] == [2, 2, 1]
    unequal = r"level rack of cluster three would join unequal numbers of the level server \(1, 2\).*--cluster"
    for cluster, names, complaint in (
        (boards, ["worker0"], r"unequal inside.*--cluster"),
        (THREE, ["server4"], "has no server 4: it has servers 0 to 3"),
        (THREE, ["worker8"], "has no worker 8: it has workers 0 to 7"),
        (THREE, ["server1.worker2"], "server 1 has no worker 2: it has workers 0 to 1"),
        (THREE, ["server0", "server1", "server2", "server3"], "all 8 workers of cluster three are lost"),
        (THREE, ["server1"], unequal),
        *(
            (THREE, [odd], "expected servers and workers by their numbers")
            for odd in ("rack1", "server", "server-1", "server1.server2", f"worker{10**19}", "")
        ),
    ):
        with pytest.raises(InputError, match=complaint):
            _without(cluster, *names)


def _left(workers: tuple[int, ...], count: int) -> RemainingCluster:
    """One server of so many workers, which were these before."""
    return RemainingCluster(_cluster(("server", count)), workers, (0,) if workers else ())


def test_a_worker_with_several_stages_takes_over_the_layers_of_all() -> None:
    profile = Profile(tuple(Layer(name, 1.0, 2.0, 100, 0) for name in "abcdefgh"), (), 4)

    def stages(*names: str) -> Plan:
        half = len(names) // 2
        devices = [*range(half), *reversed(range(half))]
        parts = tuple(Stage(tuple(part), (device,), 1, 1) for part, device in zip(names, devices, strict=True))
        return Plan(parts, schedule="zb-v", accumulate=8)

    old, new = stages("a", "b", "c", "d", "e", "fgh"), stages("a", "bcd", "ef", "gh")
    first, second = plan_changes(old, new, _left((0, 1), 2), profile, minibatch_was=4).workers
    assert (first.stages, first.stages_was, first.taken) == ((0, 3), (0, 5), ())
    assert (second.stages, second.stages_was, second.taken) == ((1, 2), (1, 4), ("c", "d", "f"))


def test_what_a_worker_takes_over_and_reads() -> None:
    weighty = [Layer(name, 1.0, 2.0, 100, 0, buffer_bytes=7) for name in "abc"]
    profile = Profile((*weighty, Layer("loss", 1.0, 1.0, 0, 0)), (), 4, optimizer_state_ratio=2.0)
    old = Plan((Stage(("a",), (0, 1, 2), 2, 2), Stage(("b", "c", "loss"), (3,), 1, 1)))
    new = Plan((Stage(("a", "b"), (0,), 2, 2), Stage(("c", "loss"), (1,), 1, 1)))
    found = plan_changes(old, new, _left((2, 3, 1), 3), profile, minibatch_was=8)
    first, second, idle = found.workers
    assert (first.was, first.stages, first.stages_was, first.taken, first.read_bytes) == (2, (0,), (0,), ("b",), 614)
    assert (second.was, second.stages, second.stages_was, second.taken, second.read_bytes) == (3, (1,), (1,), (), 307)
    assert (idle.stages, idle.stages_was, idle.taken, idle.read_bytes) == ((), (0,), (), 0)
    assert found.read_bytes == 921
    assert [(shift.layers, shift.stage_was, shift.stage) for shift in found.shifts] == [
        (("a",), 0, 0),
        (("b",), 1, 0),
        (("c", "loss"), 1, 1),
    ]
    assert found.restaged == 1
    # a: three minibatches of 8 before, one of 4 now; the loss has no weights to update.
    assert [(batch.layers, batch.samples_was, batch.samples) for batch in found.batches] == [
        (("a",), 24, 4),
        (("b", "c"), 8, 4),
    ]
    assert found.batches[0].rate == pytest.approx(1 / 6)
    unknown = plan_changes(old, new, _left((), 3), profile, 4)
    assert {worker.was for worker in unknown.workers} == {None}
    assert unknown.workers[0].taken == ("a", "b")
    # Where all stages update for a common batch, it stays.
    old = Plan(old.stages, schedule="2bw", accumulate=8)
    new = Plan((Stage(("a", "b", "c", "loss"), (0,), 1, 2),), schedule="2bw", accumulate=8)
    assert plan_changes(old, new, _left((0,), 1), profile, 4).rebatched == ()
