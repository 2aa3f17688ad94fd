"""Writes cluster files; `cluster_file.parse` reads the same cluster back."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from pipeplan.cluster_data import Cluster, Device, Level, Server
from pipeplan.cluster_file import FORMAT, VERSION
from pipeplan.errors import InputError
from pipeplan.files import write_text
from pipeplan.text import one_line
from pipeplan.units import parse_rate, parse_size, parse_time

_RATES = (("Gbit/s", 1.25e8), ("Mbit/s", 1.25e5), ("Kbit/s", 125.0))
_TIMES = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9))
_SIZES = (("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10))


def save(cluster: Cluster, path: Path, remarks: Sequence[str] = ()) -> None:
    """Write a cluster file by atomic replace; `remarks` become comments at its top."""
    write_text(path, text_of(cluster, remarks))


def text_of(cluster: Cluster, remarks: Sequence[str] = ()) -> str:
    """The TOML of a cluster. Raises `InputError` where two of its devices differ and share a name."""
    lines = [f"# {one_line(remark)}" for remark in remarks]
    lines += [f'format = "{FORMAT}"', f"version = {VERSION}", f"name = {_text(cluster.name)}"]
    if cluster.machines:
        lines += _heterogeneous_lines(cluster)
    else:
        if cluster.server_price is not None:
            lines.append(f"price_per_hour = {cluster.server_price!r}")
        lines += ["", "[device]", *_device_lines(cluster.device)]
        for level in cluster.levels:
            lines += _level_lines(level)
    return "\n".join(lines) + "\n"


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
        lines += _server_lines(machine, len(list(run)))
    for level in cluster.levels[1:]:
        lines += _level_lines(level)
    return lines


def _device_lines(device: Device) -> list[str]:
    lines = [f"name = {_text(device.name)}", f"kind = {_text(device.kind)}"]
    lines.append(f"memory = {_quantity(device.memory_bytes, _SIZES, parse_size)}")
    lines += [f"speed = {device.speed!r}"] if device.speed != 1.0 else []
    return [*lines, f"cores = {device.cores}"] if device.cores else lines


def _server_lines(machine: Server, count: int) -> list[str]:
    lines = ["", "[[server]]", *([f"count = {count}"] if count > 1 else [])]
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
    back; a bare number where there is no such unit."""
    for unit, factor in units:
        shown = f"{float(f'{value / factor:.6g}'):.6f}".rstrip("0").rstrip(".")
        if value >= factor and parse(f"{shown} {unit}", "") == value:
            return f'"{shown} {unit}"'
    return repr(value)


def _text(value: str) -> str:
    # A JSON string is a valid TOML string except for DEL, which TOML requires to be escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
