"""Variants of a cluster that differ from it in one property: a link, the memory, the speed, or the number of
servers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from pipeplan.cluster_data.cluster import Cluster, Device, Level
from pipeplan.errors import InputError
from pipeplan.util.text import did_you_mean

OPERATIONS = ("all-reduce", "send/recv")


def level_index(cluster: Cluster, name: str) -> int:
    """Index of the level of that name.

    Raises an `InputError` that suggests existing names if there is no such level.
    """
    names = [level.name for level in cluster.levels]
    if name not in names:
        raise InputError(f"cluster {cluster.name} has no level {name!r}; {did_you_mean(name, names)}")
    return names.index(name)


def joining_levels(cluster: Cluster) -> list[int]:
    """Indices of the levels that join several components. A level of a single component carries no traffic."""
    return [index for index, level in enumerate(cluster.levels) if level.count > 1]


def with_bandwidth(cluster: Cluster, index: int, bandwidth: float) -> Cluster:
    """The cluster with links of `bandwidth` bytes/s at one level. A server with a slower card keeps this card."""
    return _with_level(cluster, index, lambda level: replace(level, bandwidth=bandwidth))


def with_faster_links(cluster: Cluster, index: int, factor: float, operation: str | None = None) -> Cluster:
    """The cluster with links `factor` times as fast at one level, including the cards of servers.

    With `operation`, one of `OPERATIONS`, only that operation becomes faster. An operation runs at the bandwidth times
    its efficiency, so the efficiency of the other operation is divided by `factor`.
    """

    def faster(level: Level) -> Level:
        changed_level = replace(level, bandwidth=level.bandwidth * factor)
        if operation == "all-reduce":
            return replace(changed_level, sendrecv_efficiency=level.sendrecv_efficiency / factor)
        if operation == "send/recv":
            return replace(changed_level, allreduce_efficiency=level.allreduce_efficiency / factor)
        return changed_level

    changed = _with_level(cluster, index, faster)
    if index != 1:
        return changed
    return replace(
        changed, machines=tuple(replace(machine, card=machine.card * factor) for machine in changed.machines)
    )


def with_halved_gradients(cluster: Cluster) -> Cluster:
    """The cluster with twice the bandwidth for all-reduces, as if gradients were in bfloat16 instead of float32."""
    for index in range(len(cluster.levels)):
        cluster = with_faster_links(cluster, index, 2.0, "all-reduce")
    return cluster


def with_memory(cluster: Cluster, size: int) -> Cluster:
    """The cluster with `size` bytes of memory on every device."""
    return _with_devices(cluster, lambda device: replace(device, memory_bytes=size))


def with_more_memory(cluster: Cluster, factor: float) -> Cluster:
    """The cluster with `factor` times the memory on every device."""
    return _with_devices(cluster, lambda device: replace(device, memory_bytes=math.ceil(device.memory_bytes * factor)))


def with_faster_devices(cluster: Cluster, factor: float) -> Cluster:
    """The cluster with devices `factor` times as fast."""
    return _with_devices(cluster, lambda device: replace(device, speed=device.speed * factor))


def unit_of_growth(cluster: Cluster) -> str:
    """Name of the components that `grown_cluster` adds, such as `server`; `worker` if there is only one level."""
    return "worker" if len(cluster.levels) == 1 else cluster.levels[-2].name


def grown_cluster(cluster: Cluster, count: int) -> Cluster:
    """The cluster with `count` components at its outermost level, at least as many as now.

    In a heterogeneous cluster each new component is a copy of the last one. Raises an `InputError` if the cluster has
    no level that could join more servers.
    """
    extra = count - cluster.levels[-1].count
    levels = (*cluster.levels[:-1], replace(cluster.levels[-1], count=count))
    if not cluster.machines:
        return replace(cluster, levels=levels)
    if len(levels) == 1:
        raise InputError(f"cluster {cluster.name} lists its servers one by one: there is nothing to join more of them")
    size = len(cluster.machines) // cluster.levels[-1].count
    return replace(cluster, levels=levels, machines=cluster.machines + cluster.machines[-size:] * extra)


def _with_level(cluster: Cluster, index: int, change: Callable[[Level], Level]) -> Cluster:
    levels = tuple(change(level) if number == index else level for number, level in enumerate(cluster.levels))
    machines = cluster.machines
    if index == 0:
        machines = tuple(replace(machine, inside=change(machine.inside)) for machine in machines)
    return replace(cluster, levels=levels, machines=machines)


def _with_devices(cluster: Cluster, change: Callable[[Device], Device]) -> Cluster:
    machines = tuple(replace(machine, device=change(machine.device)) for machine in cluster.machines)
    return replace(cluster, device=change(cluster.device), machines=machines)
