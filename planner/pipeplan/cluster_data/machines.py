"""Parts of a cluster: the device of a worker, a level of links, and a server."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from pipeplan.errors import InputError
from pipeplan.util.files import LARGEST
from pipeplan.util.typed import Amount, Bytes, Natural, json_fields, settle_numbers

MAXIMUM_WORKERS = 1 << 20
LONGEST_LATENCY_S = 3600.0
LEAST_EFFICIENCY = 1e-6
MEMORY_RESERVE, MOST_RESERVED = 0.05, 0.5
"""Default and largest share of a device's memory that plans leave free. A cluster file may set the share."""


@dataclass(frozen=True)
class Device:
    """The device of one worker."""

    name: str
    kind: str
    """Kind of device: `cuda` or `cpu`."""
    memory_bytes: Bytes
    """Memory of one device, in bytes."""
    speed: Amount = 1.0
    """Speed relative to the device on which the profile was measured."""
    cores: Natural | Amount = 0
    """Number of processor cores that the workers of one server share; 0 if every worker has its own core. If throughput
    was measured, the number is these workers' throughput relative to one worker."""
    memory_reserve: Amount = 0.0
    """Share of the memory that plans leave free, because fragmentation keeps an allocator from using all memory."""

    def __post_init__(self) -> None:
        settle_numbers(self)

    @property
    def usable_bytes(self) -> int:
        """Memory that a worker may use, in bytes: all memory except the reserve."""
        return int(self.memory_bytes * (1 - self.memory_reserve))

    def to_json(self) -> dict[str, Any]:
        """All fields as JSON; `cores` and `memory_reserve` only if they are not 0."""
        return json_fields(self, "cores", "memory_reserve")


@dataclass(frozen=True)
class Level:
    """A level joins `count` components of the level below with full-duplex links. The innermost level joins devices."""

    name: str
    """Name of one component of this level: `server`, `cluster`, …"""
    count: Natural
    bandwidth: Amount
    """Bandwidth of the link of each joined component, in bytes/s for each direction."""
    latency_s: Amount = 0.0
    """Seconds from the end of sending a message to its arrival."""
    allreduce_efficiency: Amount = 1.0
    """Share of the bandwidth that an all-reduce reaches."""
    sendrecv_efficiency: Amount = 1.0
    """Share of the bandwidth that point-to-point traffic reaches."""
    source: str = ""
    """Source of the figures."""

    def __post_init__(self) -> None:
        settle_numbers(self)


@dataclass(frozen=True)
class Server:
    """One server of a heterogeneous cluster."""

    device: Device
    inside: Level
    """The number of the server's devices, and the links between them."""
    card: Amount = 0.0
    """Rate of the server's network card in bytes/s for each direction, if it is slower than the links of the level
    above; else 0."""
    price_per_hour: Amount | None = None
    """Price of this server for one hour, in any currency; None if unknown."""
    name: str = ""
    """A name of this server for people, such as its host name. The name has no effect on planning."""

    def __post_init__(self) -> None:
        settle_numbers(self)

    def computes_like(self, other: Server) -> bool:
        """Whether a pipeline inside this server runs equally fast inside the other.

        Compares the devices and the links inside, not the network card, the price or the source of the figures.
        """
        return (self.device, replace(self.inside, source="")) == (other.device, replace(other.inside, source=""))

    def same_as(self, other: Server) -> bool:
        """Whether the two servers are equal except for their names and the source of their figures."""
        outside, other_outside = (self.card, self.price_per_hour), (other.card, other.price_per_hour)
        return self.computes_like(other) and outside == other_outside

    def to_json(self) -> dict[str, Any]:
        """All fields as JSON; `name` only if it is not empty."""
        return json_fields(self, "name") | {"device": self.device.to_json()}


def check_device(where: str, device: Device) -> None:
    """Raise an `InputError` if a figure of a device is wrong or implausible."""
    if device.memory_bytes < 1:
        raise InputError(f"{where}: its device has no memory")
    if not 0 <= device.memory_reserve <= MOST_RESERVED:
        raise InputError(
            f"{where}: a memory_reserve of {device.memory_reserve:.0%} leaves too little to plan with: give at most "
            f"{MOST_RESERVED:.0%}"
        )
    if not 1e-6 <= device.speed <= 1e6:
        raise InputError(f"{where}: the device's speed must lie between 1e-6 and 1e6")
    if not 0 <= device.cores <= MAXIMUM_WORKERS:
        raise InputError(
            f"{where}: {device.cores:g} cores for a server are out of range, which is 0 to {MAXIMUM_WORKERS}"
        )


def check_level(where: str, level: Level, *, needs_bandwidth: bool = True) -> None:
    """Raise an `InputError` if a figure of a level is wrong or implausible. `where` is the beginning of the message."""
    if level.count < 1:
        raise InputError(f"{where}: no devices (count = {level.count}); a count is at least 1")
    if level.count > 1 and level.bandwidth <= 0 and needs_bandwidth:
        raise InputError(f"{where}: zero bandwidth; say what its links carry, such as '10 Gbit/s'")
    if level.count > 1 and level.bandwidth and not 1 <= level.bandwidth <= LARGEST:
        raise InputError(
            f"{where}: a bandwidth of {level.bandwidth:g} bytes/s is out of range, which is 1 to {LARGEST:g}"
        )
    if not level.latency_s <= LONGEST_LATENCY_S:
        raise InputError(
            f"{where}: a latency of {level.latency_s:g} s is out of range, which is up to {LONGEST_LATENCY_S:g} s"
        )
    for what, share in (("allreduce", level.allreduce_efficiency), ("sendrecv", level.sendrecv_efficiency)):
        if not LEAST_EFFICIENCY <= share <= 1:
            raise InputError(f"{where}: {what}_efficiency must be {LEAST_EFFICIENCY:g} to 1, not {share:g}")
