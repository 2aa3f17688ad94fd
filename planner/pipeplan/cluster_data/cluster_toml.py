"""Reads and writes cluster files (docs/file-formats.md), and finds the bundled clusters."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from msgspec import structs

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
"""The value of `executor` that stands for the costs measured on this machine."""
MOST_SERVERS = 1 << 16
"""Largest number of servers in a cluster file that lists them, because each is kept in memory."""


def bundled_cluster_names() -> list[str]:
    """The clusters that come with pipeplan, except `local`."""
    return sorted(path.stem for path in (files.bundled_folder("profiles") / "clusters").glob("*.toml"))


def load_cluster(name: str) -> Cluster:
    """The bundled cluster of that name, or the cluster in the TOML file at that path.

    Raises an `InputError` if there is neither, or if the file is not a valid cluster file.
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
    """Read and check a cluster file. Raises an `InputError` that names the file and the wrong field."""
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
    """The cluster of a file that lists its servers.

    If all servers are the same, the result is the same as for a file with one [device].
    """
    devices = _devices(file.devices)
    tables = [_checked(number, table, devices) for number, table in enumerate(file.server)]
    mixed = _mixed_server(tables)
    machines = [machine for table in tables for machine in _machines(table, devices, divided=mixed is not None)]
    if len(machines) > MOST_SERVERS:
        raise InputError(f"server: {len(machines)} servers; at most {MOST_SERVERS} can be listed")
    above = [] if mixed is None else [mixed]
    servers = len(machines) // math.prod(level.count for level in above)
    if servers > 1 and not file.level:
        raise InputError(f"there are {servers} servers and no [[level]] that joins them")
    for number, level in enumerate(file.level):
        # Unless it states a count, the outermost level joins all components below it.
        rest = len(machines) // math.prod(max(1, level.count) for level in above)
        above.append(_level(number, level, rest if level is file.level[-1] else None))
        if level.name == "server":
            raise InputError(f"level[{number}]: name: 'server' stands for the [[server]] tables; name it otherwise")
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


def _checked(number: int, table: ServerTable, devices: dict[str, Device]) -> ServerTable:
    """A [[server]] table after checks that its devices are known and no figure is missing.

    If all listed devices have the same name, their number replaces the list.
    """
    where, count = f"server[{number}]", table.count
    if isinstance(table.devices, int) == (table.device is None):
        raise InputError(f"{where}: devices: give the name of each device, or one `device` and their number")
    names = {table.device or ""} if isinstance(table.devices, int) else {*table.devices}
    for name in sorted(names):
        if name not in devices:
            raise InputError(f"{where}: device: there is no device {name!r}; {did_you_mean(name, list(devices))}")
    if table.name and count > 1:
        raise InputError(f"{where}: name: one name stands for {count} servers: give each server a table of its own")
    if count > MOST_SERVERS:
        raise InputError(f"{where}: count: at most {MOST_SERVERS} servers can be listed, found {count}")
    if table.size > 1 and not table.bandwidth:
        raise InputError(f"{where}: its {table.size} devices need a bandwidth between them, such as '12 GB/s'")
    if table.card is not None and not table.card:
        raise InputError(f"{where}: card: zero bandwidth; say what the card carries, such as '10 Gbit/s'")
    return structs.replace(table, device=names.pop(), devices=table.size) if len(names) == 1 else table


def _mixed_server(tables: Sequence[ServerTable]) -> Level | None:
    """The level that joins the devices of a server, if the devices of some server differ; else None.

    If there is such a level, all servers are divided into their devices. Therefore all servers need equally many
    devices and the same links.
    """
    if all(isinstance(table.devices, int) for table in tables):
        return None
    inside = [table.level("server", table.size) for table in tables]
    if len({replace(level, source="") for level in inside}) > 1 or any(table.card for table in tables):
        raise InputError(
            "server: where the devices of a server differ, all servers need the same number of devices and the same "
            "links between them, and no `card`: its rate is the bandwidth of the level above"
        )
    return inside[0]


def _machines(table: ServerTable, devices: dict[str, Device], *, divided: bool) -> list[Server]:
    """The servers of one [[server]] table; with `divided`, one machine for each of their devices."""
    card, price = float(table.card or 0.0), table.price_per_hour
    if not divided:
        inside = table.level("server", table.size)
        return [Server(devices[table.device or ""], inside, card, price, table.name)] * table.count
    names = table.names
    share = None if price is None else price / len(names)
    alone = Level("device", 1, 0.0)
    return [Server(devices[name], alone, 0.0, share, table.name) for name in names] * table.count


def _level(number: int, table: LevelTable, rest: int | None = None) -> Level:
    """The level of one [[level]] table; `rest` is its count if the table has none."""
    count = rest if table.count is None else table.count
    if count is None:
        raise InputError(f"level[{number}]: the field 'count' is missing")
    return table.level(table.name, count)


def write_cluster(cluster: Cluster, path: Path, remarks: Sequence[str] = ()) -> None:
    """Write a cluster file by atomic replace; `remarks` become comments at its top."""
    write_text(path, cluster_toml(cluster, remarks))


def cluster_toml(cluster: Cluster, remarks: Sequence[str] = ()) -> str:
    """The TOML of a cluster. Raises `InputError` if two different devices have the same name."""
    lines = [f"# {one_line(remark)}" for remark in remarks]
    lines += [f'format = "{CLUSTER_FORMAT}"', f"version = {CLUSTER_VERSION}", f"name = {toml_text(cluster.name)}"]
    if cluster.machines:
        lines += _heterogeneous_lines(cluster)
    else:
        lines += [] if cluster.server_price is None else [f"price_per_hour = {cluster.server_price!r}"]
        lines += _device_table("[device]", cluster.device)
        for level in cluster.levels:
            lines += _level_table(level)
    return "\n".join([*lines, *_executor_table(cluster.executor)]) + "\n"


def _heterogeneous_lines(cluster: Cluster) -> list[str]:
    """Lines for every distinct device, then for each run of equal servers, then for the levels above the server."""
    devices: dict[str, Device] = {}
    for machine in cluster.machines:
        if devices.setdefault(machine.device.name, machine.device) != machine.device:
            raise InputError(f"two devices of cluster {cluster.name} are both called {machine.device.name!r}")
    lines: list[str] = []
    for device in devices.values():
        lines += _device_table("[[device]]", device)
    inside = cluster.levels[1] if cluster.server_level > 1 else None
    for machines, run in itertools.groupby(cluster.server_machines):
        count = len(list(run))
        named = machines[0].name
        lines += _server_table(machines, 1, inside) * count if named else _server_table(machines, count, inside)
    for level in cluster.levels[cluster.server_level :]:
        lines += _level_table(level)
    return lines


def _table(header: str, **fields: str) -> list[str]:
    """The lines of a table, without the fields whose values are empty."""
    return ["", header, *(f"{name} = {value}" for name, value in fields.items() if value)]


def _unless(default: object, value: Any, shown: Callable[[Any], str] = repr) -> str:
    """A value as TOML; empty if it is the default."""
    return "" if value == default else shown(value)


def _device_table(header: str, device: Device) -> list[str]:
    return _table(
        header,
        name=toml_text(device.name),
        kind=toml_text(device.kind),
        memory=_size(device.memory_bytes),
        memory_reserve=_unless(MEMORY_RESERVE, device.memory_reserve),
        speed=_unless(1.0, device.speed),
        cores=_unless(0, device.cores),
    )


def _server_table(machines: Sequence[Server], count: int, inside: Level | None) -> list[str]:
    """The lines of `count` equal servers.

    A server is one machine, or several machines with unequal devices, which `inside` joins.
    """
    machine, price = machines[0], math.fsum(one.price_per_hour or 0.0 for one in machines)
    names = [one.device.name for one in machines]
    return _table(
        "[[server]]",
        name=_unless("", machine.name, toml_text),
        count=_unless(1, count),
        device="" if inside else toml_text(machine.device.name),
        devices=toml_text(names) if inside else str(machine.inside.count),
        **_link_fields(inside or machine.inside),
        card=_unless(0.0, machine.card, _rate),
        price_per_hour="" if machine.price_per_hour is None else repr(price),
    )


def _level_table(level: Level) -> list[str]:
    return _table("[[level]]", name=toml_text(level.name), count=str(level.count), **_link_fields(level))


def _link_fields(level: Level) -> dict[str, str]:
    return {
        "bandwidth": _unless(0.0, level.bandwidth, _rate),
        "latency": _unless(0.0, level.latency_s, _time),
        "allreduce_efficiency": _unless(1.0, level.allreduce_efficiency),
        "sendrecv_efficiency": _unless(1.0, level.sendrecv_efficiency),
        "source": _unless("", level.source, toml_text),
    }


def _executor_table(costs: ExecutorCosts) -> list[str]:
    if not costs:
        return []
    return _table(
        "[executor]",
        **{name.removesuffix("_s"): _unless(0.0, seconds, _time) for name, seconds in costs.times().items()},
        worker=_unless(0.0, costs.worker_bytes, _size),
        allocator_share=_unless(0.0, costs.allocator_share),
        activation_share=_unless(0.0, costs.activation_share),
        source=_unless("", costs.source, toml_text),
    )


def _rate(value: float) -> str:
    return _quantity(value, (("Gbit/s", 1.25e8), ("Mbit/s", 1.25e5), ("Kbit/s", 125.0)), parse_rate, "B/s")


def _time(value: float) -> str:
    return _quantity(value, (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9)), parse_time, "s")


def _size(value: float) -> str:
    return _quantity(value, (("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10)), parse_size, "B")


def _quantity(
    value: float, units: Sequence[tuple[str, float]], parse: Callable[[object, str], float], base: str
) -> str:
    """A quantity as a TOML value, in the largest unit that gives at least 1 and keeps the exact value.

    If there is no such unit, the quantity is in `base`, the unit of the parser."""
    for unit, factor in units:
        shown = f"{float(f'{value / factor:.6g}'):.6f}".rstrip("0").rstrip(".")
        if value >= factor and parse(f"{shown} {unit}", "") == value:
            return f'"{shown} {unit}"'
    return f'"{value!r} {base}"'


def toml_text(value: object) -> str:
    """A text, number or list as a TOML value."""
    # A JSON string is a valid TOML string except for DEL, which TOML requires to be escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
