"""The rest of a cluster that lost servers or workers.

    servers of 2          lost: server1, worker5        left

    server 0  [0][1]                                    server 0  [0][1]     was server 0
    server 1  [2][3]      ×  ×                          server 1  [2]        was server 2: worker 4 is now 2
    server 2  [4][5]         ×

The remaining servers and workers keep their order and are renumbered from 0, as in plans.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from pipeplan.cluster_data.cluster import Cluster, Level, Server
from pipeplan.cluster_data.cluster_toml import uniform_if_equal
from pipeplan.errors import InputError

_NAME = re.compile(r"server(?P<server>[0-9]{1,9})(?:\.worker(?P<inside>[0-9]{1,9}))?|worker(?P<worker>[0-9]{1,9})")
INSTEAD = "describe what is left in a cluster file and give it with --cluster"


@dataclass(frozen=True)
class RemainingCluster:
    """A reduced cluster, and the old indices of its workers and servers."""

    cluster: Cluster
    workers: tuple[int, ...]
    """The old index of every remaining worker; empty if the cluster was replaced."""
    servers: tuple[int, ...]
    """The old index of every remaining server; empty if the cluster was replaced."""


def workers_named(names: Iterable[str], cluster: Cluster) -> frozenset[int]:
    """The workers named by texts such as `server2`, `worker5` (of the cluster) or `server1.worker2`, counted from 0.

    Raises `InputError` if a name has another form, or if the cluster has no such server or worker.
    """
    workers: set[int] = set()
    for name in names:
        match = _NAME.fullmatch(name)
        if match is None:
            raise InputError(
                f"--lost: expected servers and workers by their numbers, from 0, such as server2, worker5 or "
                f"server1.worker0, found {name!r}"
            )
        if match["worker"] is not None:
            workers.add(_existing(int(match["worker"]), cluster.workers, "worker", f"cluster {cluster.name}"))
            continue
        server = _existing(int(match["server"]), cluster.servers, "server", f"cluster {cluster.name}")
        first, end = cluster.starts(cluster.server_level)[server : server + 2]
        if match["inside"] is None:
            workers |= set(range(first, end))
        else:
            workers.add(first + _existing(int(match["inside"]), end - first, "worker", f"server {server}"))
    return frozenset(workers)


def _existing(number: int, count: int, what: str, where: str) -> int:
    if number >= count:
        only = f"{what} 0" if count == 1 else f"{what}s 0 to {count - 1}"
        raise InputError(f"--lost: {where} has no {what} {number}: it has {only}")
    return number


def remove_workers(cluster: Cluster, lost: frozenset[int]) -> RemainingCluster:
    """The cluster without the lost workers, and without servers that lost all workers.

    Servers may be left with different numbers of workers. Raises `InputError` if nothing is left, or if the levels
    above the servers would join unequal numbers of servers, which a cluster cannot express.
    """
    workers = tuple(worker for worker in range(cluster.workers) if worker not in lost)
    if not workers:
        raise InputError(f"--lost: all {cluster.workers} workers of cluster {cluster.name} are lost: nothing is left")
    servers = tuple(dict.fromkeys(cluster.server_of(worker) for worker in workers))
    return RemainingCluster(_reduced(cluster, workers) if lost else cluster, workers, servers)


def _reduced(cluster: Cluster, workers: tuple[int, ...]) -> Cluster:
    inside, *above = [_counts(cluster, workers, level) for level in range(1, len(cluster.levels) + 1)]
    levels = [_level(cluster, index, set(counts)) for index, counts in enumerate(above, start=1)]
    if cluster.uniform and len(set(inside)) == 1:
        return replace(cluster, levels=(replace(cluster.levels[0], count=inside[0]), *levels))
    if cluster.uniform and cluster.server_level > 1:
        raise InputError(f"--lost: what is left of the servers of cluster {cluster.name} is unequal inside: {INSTEAD}")
    kept = dict.fromkeys(cluster.component(1, worker) for worker in workers)
    machines = [_server(cluster, number, count) for number, count in zip(kept, inside, strict=True)]
    return uniform_if_equal(Cluster.of_servers(cluster.name, machines, levels, cluster.executor))


def _counts(cluster: Cluster, workers: tuple[int, ...], level: int) -> list[int]:
    """Number of remaining components of the level below (or workers) in every component of `level`, without empty
    components.

    The components are in order, because the workers are.
    """
    below = {cluster.component(level - 1, worker): worker for worker in workers}
    return list(Counter(cluster.component(level, worker) for worker in below.values()).values())


def _level(cluster: Cluster, index: int, counts: set[int]) -> Level:
    if len(counts) > 1:
        level, below = cluster.levels[index], cluster.levels[index - 1]
        raise InputError(
            f"--lost: level {level.name} of cluster {cluster.name} would join unequal numbers of the level "
            f"{below.name} ({', '.join(map(str, sorted(counts)))}): {INSTEAD}"
        )
    return replace(cluster.levels[index], count=counts.pop())


def _server(cluster: Cluster, number: int, count: int) -> Server:
    """A server with `count` workers left, as an entry of a heterogeneous cluster."""
    if cluster.uniform:
        return Server(cluster.device, replace(cluster.levels[0], name="server", count=count), 0.0, cluster.server_price)
    machine = cluster.machines[number]
    return replace(machine, inside=replace(machine.inside, count=count))
