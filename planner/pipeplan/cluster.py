"""A cluster: devices joined by levels of links, innermost first. The TOML format is in docs/file-formats.md.

Workers are numbered 0 … D-1 so that the components of every level are runs of consecutive numbers: with servers of 4,
workers 4 … 7 are server 1.
"""

from __future__ import annotations

import hashlib
import json
import math
import tomllib
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pipeplan import resources
from pipeplan.errors import InputError
from pipeplan.files import LARGEST, Node, read_text
from pipeplan.suggest import did_you_mean
from pipeplan.units import parse_rate, parse_size, parse_time

FORMAT = "pipeplan-cluster"
VERSION = 1
MAXIMUM_WORKERS = 1 << 20
LONGEST_LATENCY_S = 3600.0


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
class Cluster:
    """Devices and the levels that join them, innermost first."""

    name: str
    device: Device
    levels: tuple[Level, ...]

    def __post_init__(self) -> None:
        _check(self)

    @property
    def workers(self) -> int:
        """D, the number of devices."""
        return self.span(len(self.levels))

    @property
    def server_level(self) -> int:
        """How many levels lie inside one server: those up to the one named `server`, else the innermost alone."""
        names = [level.name for level in self.levels]
        return names.index("server") + 1 if "server" in names else 1

    @property
    def workers_per_server(self) -> int:
        """Devices in one server."""
        return self.span(self.server_level)

    @property
    def servers(self) -> int:
        """Number of servers."""
        return self.workers // self.workers_per_server

    def span(self, level: int) -> int:
        """Workers in one component of `level` (0: a device; 1: of the innermost level; …)."""
        return math.prod(joined.count for joined in self.levels[:level])

    def level_between(self, first: int, last: int) -> int:
        """The smallest level with a component that holds workers `first` … `last`; 0 where they are the same."""
        if first == last:
            return 0
        for level in range(1, len(self.levels) + 1):
            if first // self.span(level) == last // self.span(level):
                return level
        raise ValueError(f"workers {first} and {last} are not both in a cluster of {self.workers}")

    def inner(self, level: int) -> Cluster:
        """One component of `level` as a cluster of its own."""
        return replace(self, levels=self.levels[:level])

    def with_servers(self, servers: int) -> Cluster:
        """This cluster with another number of servers, by the count of its outermost level."""
        inside = self.servers // self.levels[-1].count
        if self.server_level == len(self.levels) or servers % inside:
            why = "its only level is the server" if self.server_level == len(self.levels) else f"in steps of {inside}"
            raise InputError(
                f"cluster {self.name} cannot have {servers} servers: {why}; write a cluster file of your own"
            )
        return replace(self, levels=(*self.levels[:-1], replace(self.levels[-1], count=servers // inside)))

    def to_json(self) -> dict[str, Any]:
        """All fields, for plan.json and `--json`."""
        return {"name": self.name, "device": asdict(self.device), "levels": [asdict(level) for level in self.levels]}

    def digest(self) -> str:
        """A hash of everything in the cluster, by which a plan names the cluster that it was made for."""
        return "sha256:" + hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()


def _check(cluster: Cluster) -> None:
    if not cluster.levels:
        raise InputError(
            f"cluster {cluster.name} has no levels: at least one [[level]] says how many devices there are"
        )
    if cluster.device.memory_bytes < 1:
        raise InputError(f"cluster {cluster.name}: its device has no memory")
    if not 1e-6 <= cluster.device.speed <= 1e6:
        raise InputError(f"cluster {cluster.name}: the device's speed must lie between 1e-6 and 1e6")
    for level in cluster.levels:
        _check_level(cluster, level)
    if cluster.workers > MAXIMUM_WORKERS:
        raise InputError(
            f"cluster {cluster.name} has {cluster.workers} devices; at most {MAXIMUM_WORKERS} are supported"
        )


def _check_level(cluster: Cluster, level: Level) -> None:
    where = f"cluster {cluster.name}, level {level.name}"
    if level.count < 1:
        raise InputError(f"{where}: no devices (count = {level.count}); a count is at least 1")
    if level.count > 1 and level.bandwidth <= 0:
        raise InputError(f"{where}: zero bandwidth; say what its links carry, such as '10 Gbit/s'")
    if level.count > 1 and not 1 <= level.bandwidth <= LARGEST:
        raise InputError(f"{where}: a bandwidth of {level.bandwidth:g} bytes/s cannot be meant")
    if not level.latency_s <= LONGEST_LATENCY_S:
        raise InputError(f"{where}: a latency of {level.latency_s:g} s cannot be meant")
    for what, share in (("allreduce", level.allreduce_efficiency), ("sendrecv", level.sendrecv_efficiency)):
        if not 0 < share <= 1:
            raise InputError(f"{where}: {what}_efficiency must be above 0 and at most 1, not {share:g}")


def bundled_names() -> list[str]:
    """The clusters that come with pipeplan, besides `local`."""
    return sorted(path.stem for path in (resources.folder("profiles") / "clusters").glob("*.toml"))


def load(name: str) -> Cluster:
    """A bundled cluster by name, or one from a TOML file by path."""
    path = Path(name)
    if name in bundled_names():
        return parse(resources.folder("profiles") / "clusters" / f"{name}.toml")
    if path.is_file():
        return parse(path)
    if path.suffix == ".toml" or len(path.parts) > 1:
        raise InputError(f"there is no cluster file {name}")
    raise InputError(
        f"there is no cluster {name!r}; {did_you_mean(name, [*bundled_names(), 'local'])} (or give a TOML file)"
    )


def parse(path: Path) -> Cluster:
    """Read and check a cluster file; an `InputError` names the file and the field that is wrong."""
    try:
        document = tomllib.loads(read_text(path))
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{path} is not valid TOML: {error}") from error
    root = Node(document, str(path))
    if (found := root.get("format")) is None or found.value != FORMAT:
        raise InputError(f'{path} is not a cluster file: it does not say format = "{FORMAT}"')
    if (number := root["version"].integer(minimum=1)) > VERSION:
        raise InputError(
            f"{path} is version {number} of {FORMAT}; this pipeplan reads up to {VERSION}: upgrade pipeplan"
        )
    _known(root, {"format", "version", "name", "device", "level"})
    try:
        return Cluster(
            name=root["name"].text(),
            device=_device(root["device"]),
            levels=tuple(_level(node) for node in root["level"].items()),
        )
    except InputError as error:
        message = str(error)
        raise InputError(message if message.startswith(str(path)) else f"{path}: {message}") from None


def _device(node: Node) -> Device:
    _known(node, {"name", "kind", "memory", "speed"})
    kind = node["kind"].text()
    if kind not in ("cuda", "cpu"):
        node["kind"].fail(f"expected 'cuda' or 'cpu', found {kind!r}")
    speed = node.get("speed")
    return Device(
        name=node["name"].text(),
        kind=kind,
        memory_bytes=parse_size(node["memory"].value, node["memory"].where),
        speed=speed.number() if speed else 1.0,
    )


def _level(node: Node) -> Level:
    _known(node, {"name", "count", "bandwidth", "latency", "allreduce_efficiency", "sendrecv_efficiency", "source"})
    bandwidth, latency, source = node.get("bandwidth"), node.get("latency"), node.get("source")
    allreduce, sendrecv = node.get("allreduce_efficiency"), node.get("sendrecv_efficiency")
    return Level(
        name=node["name"].text(),
        count=node["count"].integer(),
        bandwidth=parse_rate(bandwidth.value, bandwidth.where) if bandwidth else 0.0,
        latency_s=parse_time(latency.value, latency.where) if latency else 0.0,
        allreduce_efficiency=allreduce.number() if allreduce else 1.0,
        sendrecv_efficiency=sendrecv.number() if sendrecv else 1.0,
        source=source.text() if source else "",
    )


def _known(node: Node, names: set[str]) -> None:
    for key in node.mapping():
        if key not in names:
            node.fail(f"there is no field {key!r}; {did_you_mean(key, sorted(names))}")
