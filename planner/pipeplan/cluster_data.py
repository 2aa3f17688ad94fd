"""A cluster: devices joined by levels of links, innermost first. `cluster_file` reads one, `links` has its rates.

Workers are numbered 0 … D-1 so that the components of every level are runs of consecutive numbers: with servers of 4,
workers 4 … 7 are server 1. Servers may differ in devices, their number, links and price: then each of them is listed.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from pipeplan import cluster_check
from pipeplan.errors import InputError


@dataclass(frozen=True)
class Device:
    """What one worker computes on."""

    name: str
    kind: str
    """`cuda` or `cpu`."""
    memory_bytes: int
    """What the planner may use of one device."""
    speed: float = 1.0
    """Speed relative to the device on which the profile was measured."""
    cores: int = 0
    """How many of a server's workers can compute at the same time, where they are more than it has processor cores; 0:
    all of them."""

    def to_json(self) -> dict[str, Any]:
        """All fields; the cores only where they are shared."""
        return {name: value for name, value in asdict(self).items() if name != "cores" or value}


@dataclass(frozen=True)
class Level:
    """Joins `count` components of the level below (devices, at the innermost) with full-duplex links."""

    name: str
    """What the level makes: `server`, `cluster`, …"""
    count: int
    bandwidth: float
    """Bytes/s of one component's link, each direction."""
    latency_s: float = 0.0
    allreduce_efficiency: float = 1.0
    """Share of the bandwidth that an all-reduce reaches."""
    sendrecv_efficiency: float = 1.0
    """Share of the bandwidth that point-to-point traffic reaches."""
    source: str = ""
    """Where the figures come from."""


@dataclass(frozen=True)
class Server:
    """One server of a cluster whose servers differ."""

    device: Device
    inside: Level
    """How many devices it has, and what joins them."""
    card: float = 0.0
    """Bytes/s of its link to the others, each direction, where slower than the level's own; 0: as the level says."""
    price_per_hour: float | None = None

    def computes_like(self, other: Server) -> bool:
        """Whether a pipeline inside runs as well on the other: all but the link outwards, the price and the source."""
        mine, its = replace(self.inside, source=""), replace(other.inside, source="")
        return (self.device, mine) == (other.device, its)

    def same_as(self, other: Server) -> bool:
        """Whether nothing distinguishes the two but where their figures come from."""
        mine, its = (self.card, self.price_per_hour), (other.card, other.price_per_hour)
        return self.computes_like(other) and mine == its


@dataclass(frozen=True)
class Cluster:
    """Devices and the levels that join them, innermost first."""

    name: str
    device: Device
    """Of every worker; in a cluster whose servers differ, of the first (`devices` has them all)."""
    levels: tuple[Level, ...]
    """Where servers differ, the innermost says what the largest number of devices and the slowest links in one are."""
    machines: tuple[Server, ...] = ()
    """The servers in order, where they differ; they make the innermost level. Empty where all are the same."""
    server_price: float | None = None
    """Of one server for an hour, where all are the same."""

    def __post_init__(self) -> None:
        cluster_check.check(self)

    @staticmethod
    def of_servers(name: str, machines: Sequence[Server], above: Sequence[Level]) -> Cluster:
        """A cluster of servers that may differ, joined by the levels `above`, numbered in the order given."""
        if not machines:
            raise InputError(f"cluster {name} has no servers")
        inside = [machine.inside for machine in machines]
        summary = Level(
            name="server",
            count=max(level.count for level in inside),
            bandwidth=min((level.bandwidth for level in inside if level.count > 1), default=0.0),
            latency_s=max(level.latency_s for level in inside),
            allreduce_efficiency=min(level.allreduce_efficiency for level in inside),
            sendrecv_efficiency=min(level.sendrecv_efficiency for level in inside),
        )
        return Cluster(name, machines[0].device, (summary, *above), tuple(machines))

    @property
    def uniform(self) -> bool:
        """Whether all servers are the same, by construction."""
        return not self.machines

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """The device of every worker."""
        if self.uniform:
            return (self.device,) * self.workers
        return tuple(machine.device for machine in self.machines for _ in range(machine.inside.count))

    def device_of(self, worker: int) -> Device:
        """What a worker computes on."""
        return self.device if self.uniform else self.devices[worker]

    def speed_of(self, workers: Iterable[int]) -> float:
        """The slowest speed among some workers: that of a stage on them, as they take minibatches in turn."""
        return self.device.speed if self.uniform else min(self.devices[worker].speed for worker in workers)

    def memory_of(self, workers: Iterable[int]) -> int:
        """The smallest memory among some workers, bytes."""
        return self.device.memory_bytes if self.uniform else min(self.devices[one].memory_bytes for one in workers)

    @property
    def total_speed(self) -> float:
        """The speeds of all workers together: work divided by it is a bound on every pace."""
        if self.uniform:
            return self.workers * self.device.speed
        return math.fsum(machine.inside.count * machine.device.speed for machine in self.machines)

    @property
    def shared_cores(self) -> list[tuple[int, int, int]]:
        """Of every server whose workers share its cores: the first worker, the one after the last, and the cores."""
        if not any(device.cores for device in {self.device, *(machine.device for machine in self.machines)}):
            return []
        runs = itertools.pairwise(self.starts(self.server_level))
        found = ((first, stop, self.device_of(first).cores) for first, stop in runs)
        return [(first, stop, cores) for first, stop, cores in found if 0 < cores < stop - first]

    @property
    def workers(self) -> int:
        """D, the number of devices."""
        return self.span(len(self.levels)) if self.uniform else self._starts[0][-1]

    @property
    def server_level(self) -> int:
        """How many levels lie inside one server: those up to the one named `server`, else the innermost alone."""
        names = [level.name for level in self.levels]
        return names.index("server") + 1 if self.uniform and "server" in names else 1

    @property
    def workers_per_server(self) -> int:
        """Devices in one server; in the largest, where they differ (`server_sizes` has them all)."""
        return self.span(self.server_level)

    @property
    def server_sizes(self) -> tuple[int, ...]:
        """Devices in every server."""
        if self.uniform:
            return (self.workers_per_server,) * self.servers
        return tuple(machine.inside.count for machine in self.machines)

    @property
    def servers(self) -> int:
        """Number of servers."""
        return len(self.machines) if self.machines else self.workers // self.workers_per_server

    @property
    def kinds(self) -> list[tuple[int, int, str]]:
        """Runs of servers with the same devices: how many, and the number and name of the devices in each."""
        each = [(machine.inside.count, machine.device.name) for machine in self.machines]
        if self.uniform:
            return [(self.servers, self.workers_per_server, self.device.name)]
        return [(len(list(run)), *kind) for kind, run in itertools.groupby(each)]

    @property
    def price_per_hour(self) -> float | None:
        """Of the whole cluster; None where the price of a server is not known."""
        if self.uniform:
            return None if self.server_price is None else self.server_price * self.servers
        prices = [machine.price_per_hour for machine in self.machines]
        return math.fsum(price for price in prices if price is not None) if None not in prices else None

    def span(self, level: int) -> int:
        """Workers in one component of `level` (0: a device; 1: of the innermost level; …), in the largest."""
        if self.uniform:
            return math.prod(joined.count for joined in self.levels[:level])
        return max(last - first for first, last in itertools.pairwise(self.starts(level)))

    @cached_property
    def _starts(self) -> list[tuple[int, ...]]:
        """`starts` of levels 1 … L where servers differ."""
        starts = [tuple(itertools.accumulate((machine.inside.count for machine in self.machines), initial=0))]
        for level in self.levels[1:]:
            starts.append(starts[-1][:: level.count])
        return starts

    def starts(self, level: int) -> Sequence[int]:
        """The first worker of every component of `level`, and D at the end."""
        if self.uniform or level == 0:
            return range(0, self.workers + 1, self.span(level) if level else 1)
        return self._starts[level - 1]

    def component(self, level: int, worker: int) -> int:
        """The number of the component of `level` that holds a worker."""
        if self.uniform:
            return worker // self.span(level)
        return worker if level == 0 else bisect_right(self._starts[level - 1], worker) - 1

    def server_of(self, worker: int) -> int:
        """The number of the server that holds a worker."""
        return self.component(self.server_level, worker)

    def level_between(self, first: int, last: int) -> int:
        """The smallest level with a component that holds workers `first` … `last`; 0 where they are the same."""
        if first == last:
            return 0
        for level in range(1, len(self.levels) + 1):
            if self.component(level, first) == self.component(level, last):
                return level
        raise ValueError(f"workers {first} and {last} are not both in a cluster of {self.workers}")

    def alike(self, level: int) -> bool:
        """Whether all components of `level` are the same inside, so that each can hold a copy of one pipeline."""
        if self.uniform:
            return True
        size = math.prod(joined.count for joined in self.levels[1:level])
        groups = [self.machines[start : start + size] for start in range(0, len(self.machines), size)]
        return all(
            one.computes_like(its) and (level == 1 or one.card == its.card)
            for group in groups[1:]
            for one, its in zip(groups[0], group, strict=True)
        )

    def inner(self, level: int) -> Cluster:
        """One component of `level`, the first, as a cluster of its own."""
        size = math.prod(joined.count for joined in self.levels[1:level])
        return replace(self, levels=self.levels[:level], machines=self.machines[:size])

    def with_servers(self, servers: int) -> Cluster:
        """This cluster with another number of servers, by the count of its outermost level; where they differ, the
        first so many of them."""
        inside = self.servers // self.levels[-1].count
        why = ""
        if self.server_level == len(self.levels):
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
        if self.uniform or servers == 0:
            return replace(self, levels=levels)
        return Cluster.of_servers(self.name, self.machines[:servers], levels[1:])

    def to_json(self) -> dict[str, Any]:
        """All fields, for plan.json and `--json`."""
        content: dict[str, Any] = {
            "name": self.name,
            "device": self.device.to_json(),
            "levels": [asdict(level) for level in self.levels],
        }
        if self.machines:
            content["servers"] = [asdict(one) | {"device": one.device.to_json()} for one in self.machines]
        if self.server_price is not None:
            content["server_price"] = self.server_price
        return content

    def digest(self) -> str:
        """A hash of everything in the cluster, by which a plan names the cluster that it was made for."""
        return "sha256:" + hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()
