"""What every cluster must satisfy, wherever it comes from; an `InputError` says in one line what does not."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pipeplan.errors import InputError
from pipeplan.files import LARGEST

if TYPE_CHECKING:
    from pipeplan.cluster_data import Cluster, Device, Level

MAXIMUM_WORKERS = 1 << 20
LONGEST_LATENCY_S = 3600.0


def check(cluster: Cluster) -> None:
    """Raise an `InputError` that names the cluster and what is wrong with it."""
    where = f"cluster {cluster.name}"
    if not cluster.levels:
        raise InputError(f"{where} has no levels: at least one [[level]] says how many devices there are")
    _check_device(where, "its device", cluster.device)
    if cluster.machines:
        _check_servers(where, cluster)
    else:
        for level in cluster.levels:
            _check_level(f"{where}, level {level.name}", level)
    if cluster.workers > MAXIMUM_WORKERS:
        raise InputError(f"{where} has {cluster.workers} devices; at most {MAXIMUM_WORKERS} are supported")
    price = cluster.server_price
    if price is not None and not 0 <= price <= LARGEST:
        raise InputError(f"{where}: a price of {price:g} cannot be meant")


def _check_servers(where: str, cluster: Cluster) -> None:
    for number, machine in enumerate(cluster.machines):
        server = f"{where}, server {number}"
        _check_device(server, "its device", machine.device)
        if machine.device.kind != cluster.device.kind:
            raise InputError(
                f"{server}: its devices are {machine.device.kind}, those of server 0 {cluster.device.kind}"
            )
        _check_level(server, machine.inside)
        if machine.card and not 1 <= machine.card <= LARGEST:
            raise InputError(f"{server}: a card of {machine.card:g} bytes/s cannot be meant")
    above = cluster.levels[1:]
    joined = math.prod(level.count for level in above)
    for level in above:
        carded = level is above[0] and all(machine.card for machine in cluster.machines)
        _check_level(f"{where}, level {level.name}", level, needs_bandwidth=not carded)
    if not above and len(cluster.machines) > 1:
        raise InputError(f"{where}: no [[level]] joins its {len(cluster.machines)} servers")
    if joined != len(cluster.machines):
        raise InputError(f"{where}: its levels join {joined} servers, but it has {len(cluster.machines)}")


def _check_device(where: str, what: str, device: Device) -> None:
    if device.memory_bytes < 1:
        raise InputError(f"{where}: {what} has no memory")
    if not 1e-6 <= device.speed <= 1e6:
        raise InputError(f"{where}: the device's speed must lie between 1e-6 and 1e6")
    if not 0 <= device.cores <= MAXIMUM_WORKERS:
        raise InputError(f"{where}: {device.cores} cores for the workers of a server cannot be meant")


def _check_level(where: str, level: Level, *, needs_bandwidth: bool = True) -> None:
    if level.count < 1:
        raise InputError(f"{where}: no devices (count = {level.count}); a count is at least 1")
    if level.count > 1 and level.bandwidth <= 0 and needs_bandwidth:
        raise InputError(f"{where}: zero bandwidth; say what its links carry, such as '10 Gbit/s'")
    if level.count > 1 and level.bandwidth and not 1 <= level.bandwidth <= LARGEST:
        raise InputError(f"{where}: a bandwidth of {level.bandwidth:g} bytes/s cannot be meant")
    if not level.latency_s <= LONGEST_LATENCY_S:
        raise InputError(f"{where}: a latency of {level.latency_s:g} s cannot be meant")
    for what, share in (("allreduce", level.allreduce_efficiency), ("sendrecv", level.sendrecv_efficiency)):
        if not 0 < share <= 1:
            raise InputError(f"{where}: {what}_efficiency must be above 0 and at most 1, not {share:g}")
