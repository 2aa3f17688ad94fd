"""The fields of a cluster as types: the tables of a cluster file, and the object in plan.json.

docs/file-formats.md describes them.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from pipeplan.cluster_data.cluster import MEMORY_RESERVE, Cluster, Device, Level, Server
from pipeplan.cluster_data.executor_costs import NO_COSTS, ExecutorCosts
from pipeplan.errors import InputError
from pipeplan.util.files import Node
from pipeplan.util.typed import Amount, Natural, Positive, WrittenRate, WrittenShare, WrittenSize, WrittenTime, decode

CLUSTER_FORMAT = "pipeplan-cluster"
CLUSTER_VERSION = 1
LEAST_MEMORY = 2**20
"""Smallest memory of a device, in bytes. A smaller number probably lacks its unit."""


class DeviceTable(Struct, forbid_unknown_fields=True):
    """A table `[device]` or `[[device]]`."""

    name: str
    kind: Literal["cuda", "cpu"]
    memory: WrittenSize
    speed: Amount = 1.0
    cores: Positive | Annotated[float, Meta(ge=1)] = 0
    memory_reserve: WrittenShare | None = None
    """Share of the memory that plans leave free; None stands for `MEMORY_RESERVE`."""

    def record(self) -> Device:
        """The device of this table. Raises an `InputError` for a memory size without a unit."""
        if 0 < self.memory < LEAST_MEMORY:
            raise InputError(f"device {self.name}: a memory of {self.memory} bytes; is a unit missing, as in '16 GiB'?")
        reserve = MEMORY_RESERVE if self.memory_reserve is None else float(self.memory_reserve)
        return Device(self.name, self.kind, self.memory, self.speed, self.cores, reserve)


class _LinkFields(Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields of links."""

    bandwidth: WrittenRate | None = None
    latency: WrittenTime | None = None
    allreduce_efficiency: Amount = 1.0
    sendrecv_efficiency: Amount = 1.0
    source: str = ""

    def level(self, name: str, count: int) -> Level:
        """A level with these links."""
        rates = (self.allreduce_efficiency, self.sendrecv_efficiency)
        return Level(name, count, float(self.bandwidth or 0), float(self.latency or 0), *rates, self.source)


class LevelTable(_LinkFields, kw_only=True, forbid_unknown_fields=True):
    """A table `[[level]]`."""

    name: str
    count: Natural | None = None
    """Number of joined components. The outermost level above servers may omit this number, and then joins all
    servers."""


class ServerTable(_LinkFields, kw_only=True, forbid_unknown_fields=True):
    """A table `[[server]]`: `count` equal servers."""

    device: str | None = None
    devices: Positive | Annotated[tuple[str, ...], Meta(min_length=1)]
    """The number of devices, or, without `device`, the name of each device."""
    name: str = ""
    count: Positive = 1
    card: WrittenRate | None = None
    price_per_hour: Amount | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The name of each device of one server."""
        return (self.device or "",) * self.devices if isinstance(self.devices, int) else self.devices

    @property
    def size(self) -> int:
        """Number of devices of one server."""
        return self.devices if isinstance(self.devices, int) else len(self.devices)


class ExecutorTable(Struct, forbid_unknown_fields=True, rename={"each_pass": "pass"}):
    """A table `[executor]`."""

    each_pass: WrittenTime | None = None
    message: WrittenTime | None = None
    message_byte: WrittenTime | None = None
    version_byte: WrittenTime | None = None
    correction_byte: WrittenTime | None = None
    sample: WrittenTime | None = None
    read: WrittenTime | None = None
    step: WrittenTime | None = None
    worker: WrittenSize | None = None
    """Memory of a worker process without a model."""
    allocator_share: Amount = 0.0
    activation_share: Amount = 0.0
    source: str = ""

    def record(self) -> ExecutorCosts:
        """The costs of this table."""
        passes, messages = float(self.each_pass or 0), float(self.message or 0)
        sizes = float(self.message_byte or 0), float(self.version_byte or 0)
        memory = float(self.worker or 0), self.allocator_share, self.activation_share
        others = (float(one or 0) for one in (self.sample, self.step, self.read, self.correction_byte))
        return ExecutorCosts(passes, messages, *sizes, self.source, *memory, *others)


class _ClusterHead(Struct, kw_only=True, forbid_unknown_fields=True):
    format: Literal["pipeplan-cluster"]
    version: Literal[1]
    name: str
    executor: ExecutorTable | Literal["local"] | None = None
    """Costs of the executor; `local` stands for the costs measured on this machine."""

    @property
    def costs(self) -> ExecutorCosts:
        """The costs that the file states."""
        return self.executor.record() if isinstance(self.executor, ExecutorTable) else NO_COSTS


class UniformFile(_ClusterHead, kw_only=True, forbid_unknown_fields=True):
    """A cluster file whose servers are all the same."""

    device: DeviceTable
    level: tuple[LevelTable, ...]
    price_per_hour: Amount | None = None


class ListedFile(_ClusterHead, kw_only=True, forbid_unknown_fields=True):
    """A cluster file that lists its servers."""

    device: tuple[DeviceTable, ...] | DeviceTable
    """A single table `[device]` stands for a list of one."""
    server: tuple[ServerTable, ...]
    level: tuple[LevelTable, ...] = ()

    @property
    def devices(self) -> tuple[DeviceTable, ...]:
        """All tables of devices."""
        return (self.device,) if isinstance(self.device, DeviceTable) else self.device


class ClusterFields(Struct):
    """The fields of a cluster in plan.json."""

    name: str
    device: Device
    levels: tuple[Level, ...]
    servers: tuple[Server, ...] = ()
    server_price: Amount | None = None
    executor: ExecutorCosts = NO_COSTS
    digest: str = ""

    def to_cluster(self) -> Cluster:
        """The cluster that `Cluster.to_json` wrote. Raises an `InputError` if a figure is implausible."""
        return Cluster(self.name, self.device, self.levels, self.servers, self.server_price, self.executor)


def cluster_from_json(node: Node) -> Cluster:
    """The cluster that `Cluster.to_json` wrote. Raises an `InputError` that names the wrong field."""
    with node.locating_errors():
        return decode(node, ClusterFields).to_cluster()
