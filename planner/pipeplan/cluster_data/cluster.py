"""A cluster: devices joined by levels of links, innermost first.

`cluster_toml` reads and writes cluster files, `links` derives the rates of the links. Workers are numbered 0 … D-1 so
that every component of every level holds consecutive numbers: with servers of 4 devices, workers 4 … 7 are on server 1.
In a uniform cluster all servers are the same. In a heterogeneous cluster they may differ in the kind and number of
their devices, in links and in price, and each server is listed.

A server with unequal devices is a component of level 2, named `server`, which joins one machine for each device. So
the planner treats these devices like servers that differ. For example, it tries them in different orders:

    levels     level 1: device     level 2: server          level 3: cluster
    machines   [4090] [4060 Ti]    {[4090] [4060 Ti]}       …
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import operator
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from pipeplan.cluster_data.executor_costs import NO_COSTS, ExecutorCosts
from pipeplan.cluster_data.machines import MAXIMUM_WORKERS, check_device, check_level
from pipeplan.cluster_data.machines import MEMORY_RESERVE as MEMORY_RESERVE
from pipeplan.cluster_data.machines import Device as Device
from pipeplan.cluster_data.machines import Level as Level
from pipeplan.cluster_data.machines import Server as Server
from pipeplan.errors import InputError
from pipeplan.util.files import LARGEST
from pipeplan.util.typed import json_fields, settle_numbers

SHARDED_RINGS = 1.5
"""Time of an exchange if replicas reduce gradients and gather weights, as a multiple of a ring all-reduce. An
all-gather takes half the time of an all-reduce."""


@dataclass(frozen=True)
class Cluster:
    """Devices and the levels that join them, innermost first. Raises an `InputError` if a figure is implausible."""

    name: str
    device: Device
    """The device of every worker; in a heterogeneous cluster the device of worker 0 (`devices` lists all)."""
    levels: tuple[Level, ...]
    """The levels, innermost first. In a heterogeneous cluster, the innermost level summarises the servers: it has the
    largest number of devices and the slowest links of any server."""
    machines: tuple[Server, ...] = ()
    """The servers of a heterogeneous cluster in order, or their devices if the devices of some server differ; empty in
    a uniform cluster. The machines form the innermost level."""
    server_price: float | None = None
    """Price of one server of a uniform cluster for one hour; None if unknown."""
    executor: ExecutorCosts = NO_COSTS
    """Costs of the executor itself on a device of speed 1."""
    exchange_rings: float = 1.0
    """Time of one exchange of gradients, as a multiple of a ring all-reduce: 1, or `SHARDED_RINGS` if replicas also
    gather the weights that each has updated. `Problem` sets it; cluster files do not contain it."""

    def __post_init__(self) -> None:
        settle_numbers(self)
        _check(self)

    @staticmethod
    def of_servers(
        name: str, machines: Sequence[Server], above: Sequence[Level], executor: ExecutorCosts = NO_COSTS
    ) -> Cluster:
        """A heterogeneous cluster of the servers `machines`, numbered in this order, joined by the levels `above`."""
        if not machines:
            raise InputError(f"cluster {name} has no servers")
        inside = [machine.inside for machine in machines]
        summary = Level(
            name="device" if any(level.name == "server" for level in above) else "server",
            count=max(level.count for level in inside),
            bandwidth=min((level.bandwidth for level in inside if level.count > 1), default=0.0),
            latency_s=max(level.latency_s for level in inside),
            allreduce_efficiency=min(level.allreduce_efficiency for level in inside),
            sendrecv_efficiency=min(level.sendrecv_efficiency for level in inside),
        )
        return Cluster(name, machines[0].device, (summary, *above), tuple(machines), executor=executor)

    @staticmethod
    def of_devices(name: str, devices: Sequence[Device], inside: Level, executor: ExecutorCosts = NO_COSTS) -> Cluster:
        """A cluster of one server with these devices, equal or not, which the links `inside` join."""
        joined = replace(inside, name="server", count=len(devices))
        if len(set(devices)) == 1:
            return Cluster(name, devices[0], (joined,), executor=executor)
        alone = [Server(device, Level("device", 1, 0.0)) for device in devices]
        return Cluster.of_servers(name, alone, [joined], executor)

    @property
    def uniform(self) -> bool:
        """Whether all servers are the same. A uniform cluster does not list its servers."""
        return not self.machines

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """The device of every worker."""
        if self.uniform:
            return (self.device,) * self.workers
        return tuple(machine.device for machine in self.machines for _ in range(machine.inside.count))

    def device_of(self, worker: int) -> Device:
        """The device of one worker."""
        return self.device if self.uniform else self.devices[worker]

    def speed_of(self, workers: Iterable[int]) -> float:
        """The slowest speed among some workers.

        A stage on these workers has this speed, because the workers take minibatches in turn.
        """
        return self.device.speed if self.uniform else min(self.devices[worker].speed for worker in workers)

    def relative_times(self, workers: Iterable[int]) -> tuple[float, ...]:
        """The time of a pass on each of these workers, relative to its time on the slowest of them."""
        speeds = [self.device_of(worker).speed for worker in workers]
        return tuple(min(speeds) / speed for speed in speeds)

    def memory_of(self, workers: Iterable[int]) -> int:
        """The smallest usable memory among some workers, in bytes."""
        return (
            self.device.usable_bytes if self.uniform else min(self.devices[worker].usable_bytes for worker in workers)
        )

    @property
    def distinct_devices(self) -> set[Device]:
        """The distinct devices of the cluster."""
        return {self.device} if self.uniform else {machine.device for machine in self.machines}

    @property
    def total_speed(self) -> float:
        """The sum of the speeds of all workers. Total work divided by this sum is a lower bound on every step time."""
        if self.uniform:
            return self.workers * self.device.speed
        return math.fsum(machine.inside.count * machine.device.speed for machine in self.machines)

    @property
    def shared_cores(self) -> list[tuple[int, int, float]]:
        """(first worker, one past the last worker, cores) of every server whose workers share its cores."""
        if not any(device.cores for device in self.distinct_devices):
            return []
        bounds = itertools.pairwise(self.starts(self.server_level))
        servers = ((first, stop, self.device_of(first).cores) for first, stop in bounds)
        return [(first, stop, cores) for first, stop, cores in servers if 0 < cores < stop - first]

    @property
    def workers(self) -> int:
        """D, the number of workers."""
        return self.span(len(self.levels)) if self.uniform else self._starts[0][-1]

    @property
    def server_level(self) -> int:
        """Number of levels up to the level named `server`; 1 if no level has that name."""
        return self._server_level

    @cached_property
    def _server_level(self) -> int:
        names = [level.name for level in self.levels]
        return names.index("server") + 1 if "server" in names else 1

    @property
    def server_machines(self) -> list[tuple[Server, ...]]:
        """The machines of every server of a heterogeneous cluster: one machine, or one for each device of the
        server."""
        size = math.prod(level.count for level in self.levels[1 : self.server_level])
        return [self.machines[start : start + size] for start in range(0, len(self.machines), size)]

    @property
    def workers_per_server(self) -> int:
        """Number of devices in one server; in a heterogeneous cluster, in the largest server (`server_sizes` lists
        all)."""
        return self.span(self.server_level)

    @property
    def server_sizes(self) -> tuple[int, ...]:
        """Number of devices in every server."""
        if self.uniform:
            return (self.workers_per_server,) * self.servers
        return tuple(sum(one.inside.count for one in machines) for machines in self.server_machines)

    @property
    def servers(self) -> int:
        """Number of servers."""
        return len(self.server_machines) if self.machines else self.workers // self.workers_per_server

    @property
    def kinds(self) -> list[tuple[int, int, str]]:
        """(servers, devices in each, names of the devices) for runs of servers with the same devices."""
        if self.uniform:
            return [(self.servers, self.workers_per_server, self.device.name)]
        kind_of_servers = zip(self.server_sizes, self.server_devices, strict=True)
        return [(len(list(run)), *kind) for kind, run in itertools.groupby(kind_of_servers)]

    @property
    def server_devices(self) -> tuple[str, ...]:
        """The names of the devices of every server: one name, or all names, as in `(2 × RTX 4090 + RTX 3090)`."""
        if self.uniform:
            return (self.device.name,) * self.servers
        return tuple(_names([machine.device.name for machine in machines]) for machines in self.server_machines)

    @property
    def price_per_hour(self) -> float | None:
        """Price of the whole cluster for one hour; None if the price of some server is unknown."""
        if self.uniform:
            return None if self.server_price is None else self.server_price * self.servers
        prices = [machine.price_per_hour for machine in self.machines]
        return math.fsum(price for price in prices if price is not None) if None not in prices else None

    def span(self, level: int) -> int:
        """Number of workers in the largest component of `level`; 0 stands for devices, 1 for the innermost level."""
        return self._spans[level]

    @cached_property
    def _spans(self) -> tuple[int, ...]:
        """The values of `span` for levels 0 … L, cached because searches need them millions of times."""
        if self.uniform:
            return tuple(itertools.accumulate((level.count for level in self.levels), operator.mul, initial=1))
        starts = [self.starts(level) for level in range(len(self.levels) + 1)]
        return tuple(max(last - first for first, last in itertools.pairwise(ends)) for ends in starts)

    @cached_property
    def _starts(self) -> list[tuple[int, ...]]:
        """The values of `starts` for levels 1 … L of a heterogeneous cluster."""
        starts = [tuple(itertools.accumulate((machine.inside.count for machine in self.machines), initial=0))]
        for level in self.levels[1:]:
            starts.append(starts[-1][:: level.count])
        return starts

    def starts(self, level: int) -> Sequence[int]:
        """The first worker of every component of `level`, followed by D, the number of workers."""
        if self.uniform or level == 0:
            return range(0, self.workers + 1, self.span(level) if level else 1)
        return self._starts[level - 1]

    def component(self, level: int, worker: int) -> int:
        """Index of the component of `level` that holds a worker."""
        if self.uniform:
            return worker // self.span(level)
        return worker if level == 0 else bisect_right(self._starts[level - 1], worker) - 1

    def server_of(self, worker: int) -> int:
        """Index of the server that holds a worker."""
        return self.component(self.server_level, worker)

    def servers_up_to(self, workers: Iterable[int]) -> int:
        """Number of servers up to the last server with one of these workers. Later servers may stay idle."""
        return self.server_of(max(workers)) + 1

    def level_between(self, first: int, last: int) -> int:
        """The smallest level with a component that contains workers `first` … `last`; 0 if both are the same worker.

        Raises a `ValueError` if one of them is not in the cluster.
        """
        if first == last:
            return 0
        for level in range(1, len(self.levels) + 1):
            if self.component(level, first) == self.component(level, last):
                return level
        raise ValueError(f"workers {first} and {last} are not both in a cluster of {self.workers}")

    def alike(self, level: int, one: int, other: int) -> bool:
        """Whether two components of `level` are the same inside, so that each can hold a copy of the same pipeline."""
        return self.uniform or all(
            server.computes_like(its) and (level == 1 or server.card == its.card)
            for server, its in zip(self._inside(level, one), self._inside(level, other), strict=True)
        )

    def inner(self, level: int, component: int = 0) -> Cluster:
        """A component of `level`, by default the first, as a separate cluster."""
        if self.uniform:
            return replace(self, levels=self.levels[:level])
        return Cluster.of_servers(self.name, self._inside(level, component), self.levels[1:level], self.executor)

    def _inside(self, level: int, component: int) -> tuple[Server, ...]:
        """The servers of a component of a heterogeneous cluster."""
        size = math.prod(joined.count for joined in self.levels[1:level])
        return self.machines[component * size : (component + 1) * size]

    def with_servers(self, servers: int) -> Cluster:
        """This cluster with another number of servers, by changing the count of its outermost level.

        A heterogeneous cluster keeps its first `servers` servers. Raises an `InputError` if the number is not possible.
        """
        if servers == self.servers:
            return self
        inside = self.servers // self.levels[-1].count
        why = ""
        if servers < 1:
            why = "a cluster has at least one"
        elif self.server_level == len(self.levels):
            why = "its only level is the server"
        elif servers % inside:
            why = f"in steps of {inside}"
        elif not self.uniform and servers > self.servers:
            why = f"it lists {self.servers}, which differ"
        if why:
            raise InputError(
                f"cluster {self.name} cannot have {servers} servers: {why}; write a cluster file of your own"
            )
        levels = (*self.levels[:-1], replace(self.levels[-1], count=servers // inside))
        if self.uniform:
            return replace(self, levels=levels)
        machines = itertools.chain.from_iterable(self.server_machines[:servers])
        return Cluster.of_servers(self.name, [*machines], levels[1:], self.executor)

    def with_workers(self, workers: int) -> Cluster:
        """This cluster of one server with the first `workers` of its workers.

        Raises an `InputError` if the cluster has several servers or fewer workers.
        """
        if self.servers > 1 or (self.uniform and len(self.levels) > 1):
            raise InputError(
                "--workers goes with --cluster local and with clusters of one server; for others give --servers"
            )
        if not 1 <= workers <= self.workers:
            raise InputError(
                f"cluster {self.name} has {self.workers} workers, not {workers}: the `count` of its level says it"
            )
        if self.machines and self.server_level > 1:
            joined = replace(self.levels[1], count=workers)
            return Cluster.of_servers(self.name, self.machines[:workers], [joined], self.executor)
        return replace(self, levels=(replace(self.levels[0], count=workers),))

    def to_json(self) -> dict[str, Any]:
        """All fields, as plan.json and `--json` have them."""
        content: dict[str, Any] = {
            "name": self.name,
            "device": self.device.to_json(),
            "levels": [json_fields(level) for level in self.levels],
        }
        if self.machines:
            content["servers"] = [machine.to_json() for machine in self.machines]
        if self.server_price is not None:
            content["server_price"] = self.server_price
        if self.executor:
            content["executor"] = self.executor.to_json()
        return content

    def digest(self) -> str:
        """A SHA-256 hash of all fields. A plan identifies its cluster by this hash."""
        return "sha256:" + hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()


def _names(names: Sequence[str]) -> str:
    """The names of the devices of a server, in their order."""
    runs = [(len(list(run)), name) for name, run in itertools.groupby(names)]
    counted = [f"{count} × {name}" if count > 1 else name for count, name in runs]
    return runs[0][1] if len(runs) == 1 else f"({' + '.join(counted)})"


def _check(cluster: Cluster) -> None:
    """Raise an `InputError` that names the cluster and the wrong or implausible figure."""
    where = f"cluster {cluster.name}"
    if not cluster.levels:
        raise InputError(f"{where} has no levels: at least one [[level]] says how many devices there are")
    check_device(where, cluster.device)
    if cluster.machines:
        _check_servers(where, cluster)
    else:
        for level in cluster.levels:
            check_level(f"{where}, level {level.name}", level)
    if cluster.workers > MAXIMUM_WORKERS:
        raise InputError(f"{where} has {cluster.workers} devices; at most {MAXIMUM_WORKERS} are supported")
    price = cluster.server_price
    if price is not None and not 0 <= price <= LARGEST:
        raise InputError(f"{where}: a price of {price:g} is out of range, which is 0 to {LARGEST:g}")


def _check_servers(where: str, cluster: Cluster) -> None:
    for number, machine in enumerate(cluster.machines):
        server = f"{where}, server {number}"
        check_device(server, machine.device)
        if machine.device.kind != cluster.device.kind:
            raise InputError(
                f"{server}: its devices are {machine.device.kind}, those of server 0 {cluster.device.kind}"
            )
        check_level(server, machine.inside)
        if machine.card and not 1 <= machine.card <= LARGEST:
            raise InputError(f"{server}: a card of {machine.card:g} bytes/s is out of range, which is 1 to {LARGEST:g}")
    above = cluster.levels[1:]
    joined = math.prod(level.count for level in above)
    for level in above:
        carded = level is above[0] and all(machine.card for machine in cluster.machines)
        check_level(f"{where}, level {level.name}", level, needs_bandwidth=not carded)
    if not above and len(cluster.machines) > 1:
        raise InputError(f"{where}: no [[level]] joins its {len(cluster.machines)} servers")
    if joined != len(cluster.machines):
        raise InputError(f"{where}: its levels join {joined} servers, but it has {len(cluster.machines)}")
    for number, machines in enumerate(cluster.server_machines):
        if len({machine.device.cores for machine in machines}) > 1:
            raise InputError(f"{where}, server {number}: its devices share cores: give all of them the same cores")
