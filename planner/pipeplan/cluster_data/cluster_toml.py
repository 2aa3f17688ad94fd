"""Reads and writes cluster files (docs/file-formats.md), and finds the bundled ones."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from pipeplan.cluster_data.cluster import MEMORY_RESERVE, Cluster, Device, Level, Server
from pipeplan.cluster_data.cluster_document import (
    CLUSTER_FORMAT,
    CLUSTER_VERSION,
    DeviceTable,
    LevelTable,
    ListedFile,
    ServerTable,
    UniformFile,
)
from pipeplan.cluster_data.executor_costs import ExecutorCosts
from pipeplan.cluster_data.machine_costs import with_machine_costs
from pipeplan.errors import InputError
from pipeplan.util import files
from pipeplan.util.files import read_toml, write_text
from pipeplan.util.text import did_you_mean, near_files, one_line
from pipeplan.util.typed import decode
from pipeplan.util.units import parse_rate, parse_size, parse_time

LOCAL_COSTS = "local"
"""The value of `executor` that stands for what was measured on this machine."""
MOST_SERVERS = 1 << 16
"""Largest number of servers in a cluster file that lists them, because they are kept in memory one by one."""
_RATES = (("Gbit/s", 1.25e8), ("Mbit/s", 1.25e5), ("Kbit/s", 125.0))
_TIMES = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9))
_SIZES = (("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10))
_BASES: dict[Callable[[object, str], float], str] = {parse_rate: "B/s", parse_time: "s", parse_size: "B"}
"""The units in which the parsers count."""


def bundled_cluster_names() -> list[str]:
    """The clusters that come with pipeplan, besides `local`."""
    return sorted(path.stem for path in (files.bundled_folder("profiles") / "clusters").glob("*.toml"))


def load_cluster(name: str) -> Cluster:
    """The bundled cluster of that name, or the cluster in the TOML file at that path.

    Raises an `InputError` where there is neither, or where the file is not a valid cluster file.
    """
    path = Path(name)
    if name in bundled_cluster_names():
        return read_cluster(files.bundled_folder("profiles") / "clusters" / f"{name}.toml")
    if path.is_file():
        if path.suffix == ".json":
            raise InputError(f"{name} is not a cluster file, which is TOML: `pipeplan init` writes one")
        return read_cluster(path)
    if path.is_dir():
        raise InputError(f"{name} is a folder: a cluster is a TOML file, which `pipeplan init` writes")
    if path.suffix == ".toml" or len(path.parts) > 1:
        raise InputError(f"there is no cluster file {name}{near_files(path)}")
    raise InputError(
        f"there is no cluster {name!r}; {did_you_mean(name, [*bundled_cluster_names(), 'local'])} (or give a TOML file)"
    )


def read_cluster(path: Path) -> Cluster:
    """Read and check a cluster file. Raises an `InputError` that names the file and the field that is wrong."""
    root = read_toml(path, CLUSTER_FORMAT, CLUSTER_VERSION)
    with root.locating_errors():
        if "server" in root.mapping():
            return _heterogeneous(decode(root, ListedFile))
        file = decode(root, UniformFile)
        levels = tuple(_level(number, table) for number, table in enumerate(file.level))
        price, costs = file.price_per_hour, file.costs
        cluster = Cluster(file.name, file.device.record(), levels, server_price=price, executor=costs)
        return with_machine_costs(cluster) if file.executor == LOCAL_COSTS else cluster


def _heterogeneous(file: ListedFile) -> Cluster:
    """A cluster that lists its servers. Where all of them are the same, it equals that of a file with one [device]."""
    devices = _devices(file.devices)
    machines = [server for number, table in enumerate(file.server) for server in _servers(number, table, devices)]
    if len(machines) > MOST_SERVERS:
        raise InputError(f"server: {len(machines)} servers; at most {MOST_SERVERS} can be listed")
    if len(machines) > 1 and not file.level:
        raise InputError(f"there are {len(machines)} servers and no [[level]] that joins them")
    above: list[Level] = []
    for number, table in enumerate(file.level):
        # Unless it states a count, the outermost level joins all components below it.
        rest = len(machines) // math.prod(max(1, level.count) for level in above)
        above.append(_level(number, table, rest if table is file.level[-1] else None))
    return uniform_if_equal(Cluster.of_servers(file.name, machines, above, file.costs))


def uniform_if_equal(cluster: Cluster) -> Cluster:
    """The cluster in its uniform form, without the list of servers, if all are the same; otherwise unchanged."""
    if any(not machine.same_as(cluster.machines[0]) for machine in cluster.machines) or cluster.uniform:
        return cluster
    first = cluster.machines[0]
    levels = [first.inside, *cluster.levels[1:]]
    if first.card and len(levels) > 1:
        slower = min(rate for rate in (first.card, levels[1].bandwidth) if rate)
        levels[1] = replace(levels[1], bandwidth=slower)
    return Cluster(
        cluster.name, first.device, tuple(levels), server_price=first.price_per_hour, executor=cluster.executor
    )


def _devices(tables: Sequence[DeviceTable]) -> dict[str, Device]:
    devices: dict[str, Device] = {}
    for number, table in enumerate(tables):
        if table.name in devices:
            raise InputError(f"device[{number}]: name: there are two devices called {table.name!r}")
        devices[table.name] = table.record()
    if not devices:
        raise InputError("device: there must be at least one device")
    return devices


def _servers(number: int, table: ServerTable, devices: dict[str, Device]) -> list[Server]:
    """The servers of one [[server]] table."""
    where, count = f"server[{number}]", table.count
    if table.device not in devices:
        near = did_you_mean(table.device, list(devices))
        raise InputError(f"{where}: device: there is no device {table.device!r}; {near}")
    if table.name and count > 1:
        raise InputError(f"{where}: name: one name stands for {count} servers: give each server a table of its own")
    if count > MOST_SERVERS:
        raise InputError(f"{where}: count: at most {MOST_SERVERS} servers can be listed, found {count}")
    if table.devices > 1 and not table.bandwidth:
        raise InputError(f"{where}: its {table.devices} devices need a bandwidth between them, such as '12 GB/s'")
    if table.card is not None and not table.card:
        raise InputError(f"{where}: card: zero bandwidth; say what the card carries, such as '10 Gbit/s'")
    inside, card = table.level("server", table.devices), float(table.card or 0.0)
    return [Server(devices[table.device], inside, card, table.price_per_hour, table.name)] * count


def _level(number: int, table: LevelTable, rest: int | None = None) -> Level:
    """The level of one [[level]] table; `rest` is its count where the table states none."""
    count = rest if table.count is None else table.count
    if count is None:
        raise InputError(f"level[{number}]: the field 'count' is missing")
    return table.level(table.name, count)


def write_cluster(cluster: Cluster, path: Path, remarks: Sequence[str] = ()) -> None:
    """Write a cluster file by atomic replace; `remarks` become comments at its top."""
    write_text(path, cluster_toml(cluster, remarks))


def cluster_toml(cluster: Cluster, remarks: Sequence[str] = ()) -> str:
    """The TOML of a cluster. Raises `InputError` where two of its devices differ and share a name."""
    lines = [f"# {one_line(remark)}" for remark in remarks]
    lines += [f'format = "{CLUSTER_FORMAT}"', f"version = {CLUSTER_VERSION}", f"name = {_text(cluster.name)}"]
    if cluster.machines:
        lines += _heterogeneous_lines(cluster)
    else:
        if cluster.server_price is not None:
            lines.append(f"price_per_hour = {cluster.server_price!r}")
        lines += ["", "[device]", *_device_lines(cluster.device)]
        for level in cluster.levels:
            lines += _level_lines(level)
    return "\n".join([*lines, *_executor_lines(cluster.executor)]) + "\n"


def _heterogeneous_lines(cluster: Cluster) -> list[str]:
    """Lines for every distinct device, then for each run of equal servers, then for the levels above the server."""
    devices: dict[str, Device] = {}
    for machine in cluster.machines:
        if devices.setdefault(machine.device.name, machine.device) != machine.device:
            raise InputError(f"two devices of cluster {cluster.name} are both called {machine.device.name!r}")
    lines: list[str] = []
    for device in devices.values():
        lines += ["", "[[device]]", *_device_lines(device)]
    for machine, run in itertools.groupby(cluster.machines):
        servers = list(run)
        lines += _server_lines(machine, len(servers)) if not machine.name else _server_lines(machine, 1) * len(servers)
    for level in cluster.levels[1:]:
        lines += _level_lines(level)
    return lines


def _executor_lines(costs: ExecutorCosts) -> list[str]:
    if not costs:
        return []
    times = [
        f"{name.removesuffix('_s')} = {_quantity(seconds, _TIMES, parse_time)}"
        for name, seconds in costs.times().items()
        if seconds
    ]
    memory = [f"worker = {_quantity(costs.worker_bytes, _SIZES, parse_size)}"] if costs.worker_bytes else []
    memory += [f"allocator_share = {costs.allocator_share!r}"] if costs.allocator_share else []
    memory += [f"activation_share = {costs.activation_share!r}"] if costs.activation_share else []
    return ["", "[executor]", *times, *memory, *([f"source = {_text(costs.source)}"] if costs.source else [])]


def _device_lines(device: Device) -> list[str]:
    lines = [f"name = {_text(device.name)}", f"kind = {_text(device.kind)}"]
    lines.append(f"memory = {_quantity(device.memory_bytes, _SIZES, parse_size)}")
    lines += [f"memory_reserve = {device.memory_reserve!r}"] if device.memory_reserve != MEMORY_RESERVE else []
    lines += [f"speed = {device.speed!r}"] if device.speed != 1.0 else []
    return [*lines, f"cores = {device.cores}"] if device.cores else lines


def _server_lines(machine: Server, count: int) -> list[str]:
    lines = ["", "[[server]]", *([f"name = {_text(machine.name)}"] if machine.name else [])]
    lines += [f"count = {count}"] if count > 1 else []
    lines += [f"device = {_text(machine.device.name)}", f"devices = {machine.inside.count}"]
    lines += _link_lines(machine.inside)
    if machine.card:
        lines.append(f"card = {_quantity(machine.card, _RATES, parse_rate)}")
    if machine.price_per_hour is not None:
        lines.append(f"price_per_hour = {machine.price_per_hour!r}")
    return lines


def _level_lines(level: Level) -> list[str]:
    return ["", "[[level]]", f"name = {_text(level.name)}", f"count = {level.count}", *_link_lines(level)]


def _link_lines(level: Level) -> list[str]:
    """Lines for the fields of a link that differ from the defaults of a cluster file."""
    lines = []
    if level.bandwidth:
        lines.append(f"bandwidth = {_quantity(level.bandwidth, _RATES, parse_rate)}")
    if level.latency_s:
        lines.append(f"latency = {_quantity(level.latency_s, _TIMES, parse_time)}")
    if level.allreduce_efficiency != 1.0:
        lines.append(f"allreduce_efficiency = {level.allreduce_efficiency!r}")
    if level.sendrecv_efficiency != 1.0:
        lines.append(f"sendrecv_efficiency = {level.sendrecv_efficiency!r}")
    return [*lines, f"source = {_text(level.source)}"] if level.source else lines


def _quantity(value: float, units: Sequence[tuple[str, float]], parse: Callable[[object, str], float]) -> str:
    """A quantity as a TOML value, in the largest unit that gives at least 1 and from which the exact value is read
    back; where there is no such unit, in the one that counts as 1."""
    for unit, factor in units:
        shown = f"{float(f'{value / factor:.6g}'):.6f}".rstrip("0").rstrip(".")
        if value >= factor and parse(f"{shown} {unit}", "") == value:
            return f'"{shown} {unit}"'
    return f'"{value!r} {_BASES[parse]}"'


def _text(value: str) -> str:
    # A JSON string is a valid TOML string except for DEL, which TOML requires to be escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
