"""Levels of a cluster against an oracle that draws the cluster as a tree of sets of workers.

The solvers, the evaluator and the checker all read `Cluster.inner`, the spans and the level between two workers. What
they agree on says nothing about these, so they are compared with sets that are written down component by component.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from pipeplan.cluster_data.cluster import Cluster, Device, Level, Server
from pipeplan.cluster_data.links import Links

Component = tuple[int, ...]


def _tree(cluster: Cluster) -> list[list[Component]]:
    """The components of every level as the workers in them, from single workers up to the whole cluster."""
    sizes = [machine.inside.count for machine in cluster.machines]
    total = sum(sizes) if sizes else math.prod(level.count for level in cluster.levels)
    levels: list[list[Component]] = [[(worker,) for worker in range(total)]]
    for number, level in enumerate(cluster.levels):
        below = iter(levels[-1])
        counts = sizes if sizes and number == 0 else itertools.repeat(level.count)
        joined = []
        for count in counts:
            members = list(itertools.islice(below, count))
            if not members:
                break
            joined.append(tuple(worker for member in members for worker in member))
        levels.append(joined)
    return levels


def _level_between(tree: list[list[Component]], first: int, last: int) -> int:
    return next(
        number for number, level in enumerate(tree) if any({first, last} <= set(component) for component in level)
    )


def _links(rng: random.Random, name: str, count: int) -> Level:
    rate, latency = float(rng.choice([1e8, 1e9, 3e9, 1e10])), rng.choice([0.0, 1e-6, 5e-6])
    return Level(name, count, rate, latency, rng.choice([1.0, 0.6]), rng.choice([1.0, 0.9, 0.8]))


def _device(rng: random.Random) -> Device:
    return Device(rng.choice("xyz"), "cuda", rng.choice([8, 16, 32]) * 2**30, rng.choice([0.5, 1.0, 2.0]))


def _uniform(rng: random.Random) -> Cluster:
    levels = [_links(rng, f"level {number}", rng.randint(1, 3)) for number in range(rng.randint(1, 3))]
    return Cluster("uniform", _device(rng), tuple(levels))


def _mixed(rng: random.Random) -> Cluster:
    above = [_links(rng, f"level {number}", rng.randint(1, 3)) for number in range(1, rng.randint(2, 4))]
    kinds = [
        Server(_device(rng), _links(rng, "server", rng.randint(1, 3)), rng.choice([0.0, 5e7, 5e9])) for _ in range(2)
    ]
    machines = [rng.choice(kinds) for _ in range(math.prod(level.count for level in above))]
    return Cluster.of_servers("mixed", machines, above)


def _clusters() -> Iterator[Cluster]:
    rng = random.Random(5)
    for _ in range(25):
        yield _uniform(rng)
        yield _mixed(rng)


@pytest.fixture(scope="module")
def clusters() -> list[Cluster]:
    """Random clusters of one to three levels, with equal servers and with servers that differ."""
    return list(_clusters())


def test_levels_are_those_of_the_tree(clusters: list[Cluster]) -> None:
    for cluster in clusters:
        tree = _tree(cluster)
        assert cluster.workers == len(tree[0])
        assert tree[-1] == [tuple(range(cluster.workers))]
        for number, components in enumerate(tree):
            assert cluster.span(number) == max(map(len, components))
            assert list(cluster.starts(number)) == [*(component[0] for component in components), cluster.workers]
            for worker in range(cluster.workers):
                assert worker in components[cluster.component(number, worker)]
        for first, last in itertools.combinations_with_replacement(range(cluster.workers), 2):
            assert cluster.level_between(first, last) == _level_between(tree, first, last)


def test_the_inner_cluster_is_the_first_component(clusters: list[Cluster]) -> None:
    for cluster in clusters:
        tree = _tree(cluster)
        for number in range(1, len(cluster.levels) + 1):
            first, inner = tree[number][0], cluster.inner(number)
            assert inner.workers == len(first)
            assert _tree(inner) == [[one for one in level if set(one) <= set(first)] for level in tree[: number + 1]]
            assert inner.devices == cluster.devices[: len(first)]
            whole, part = Links.of(cluster), Links.of(inner)
            for pair in itertools.combinations(first, 2):
                assert part.sendrecv_among(pair) == whole.sendrecv_among(pair)
                assert part.allreduce_among(pair) == whole.allreduce_among(pair)


def test_the_rates_among_workers_are_the_slowest_of_all_links_that_join_them() -> None:
    """On equal servers: by every level up to the one that joins the workers, one link at a time."""
    rng = random.Random(11)
    for _ in range(25):
        cluster = _uniform(rng)
        tree, links = _tree(cluster), Links.of(cluster)
        for pair in itertools.combinations(range(cluster.workers), 2):
            crossed = [level for level in cluster.levels[: _level_between(tree, *pair)] if level.count > 1]
            slowest = max(level.latency_s for level in crossed)
            messages = min(level.bandwidth * level.sendrecv_efficiency for level in crossed)
            reduces = min(level.bandwidth * level.allreduce_efficiency for level in crossed)
            assert links.sendrecv_among(pair) == pytest.approx((messages, slowest))
            assert links.allreduce_among(pair) == pytest.approx((reduces, slowest))


def test_components_are_alike_where_their_servers_are(clusters: list[Cluster]) -> None:
    """Compared machine by machine: the devices, the links inside, and above one server also the network cards."""
    seen = set()
    for cluster in clusters:
        tree = _tree(cluster)
        servers = tree[1]
        for number in range(1, len(tree)):
            described = []
            for component in tree[number]:
                inside = [index for index, server in enumerate(servers) if set(server) <= set(component)]
                machines = [cluster.machines[index] for index in inside] if cluster.machines else []
                described.append(
                    tuple(
                        (one.device, replace(one.inside, source=""), one.card if number > 1 else None)
                        for one in machines
                    )
                )
            for one, other in itertools.combinations(range(len(described)), 2):
                alike = cluster.alike(number, one, other)
                assert alike is (described[one] == described[other])
                seen.add(alike)
    assert seen == {True, False}
