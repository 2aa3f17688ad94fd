"""The JSON that nccl-tests writes with `-J` (github.com/NVIDIA/nccl-tests, src/util.cu, version 2 of its file).

`results` has one entry for each size: `size` in bytes, and `out_of_place` and `in_place` (or null) with `time` in µs
(`cpu_time` under `-C`, which is not that of the operation), `alg_bw` = size / time and `bus_bw`, both in GB/s, and
`nwrong`. `config` has `nthreads`, `ngpus` and `devices`, the ranks and their hosts (all of them under MPI). Which
operation it was stands in `args` alone. For an all-reduce among n ranks bus_bw / alg_bw = 2 (n - 1) / n
(doc/PERFORMANCE.md), which gives n.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from pipeplan.errors import InputError
from pipeplan.files import Node, read_json
from pipeplan.linkfit import fit as linkfit
from pipeplan.linkfit.fit import Fit, Point

KIND = "nccl-tests file"
ALL_REDUCE, SENDRECV = "all_reduce", "sendrecv"
LEAST_SHARE = 0.2
"""Least share of the largest size's time that its bytes must take for a bandwidth to be fitted."""
_PROGRAM = re.compile(r"(?:.*/)?([a-z_]+?)_perf(?:_mpi)?(?:\.exe)?")


@dataclass(frozen=True)
class Run:
    """One run of one program of nccl-tests."""

    file: str
    operation: str
    ranks: int
    hosts: int
    device: str
    """Name of the devices in the file, empty where it has none."""
    points: tuple[tuple[float, float], ...]
    """Bytes of the whole array and seconds, sorted by size."""


def load(path: Path, operation: str | None = None) -> Run:
    """Read a run of all_reduce_perf or sendrecv_perf. Raises `InputError` where the file is malformed or unusable."""
    root = read_json(path, KIND)
    operation = operation or _operation(root)
    rows = [(node["size"].number(), *_best(node)) for node in root["results"].items()]
    rows = [row for row in rows if row[0] > 0]
    if not rows:
        root["results"].fail("there are no sizes above 0")
    hosts, listed, device = _devices(root)
    ranks = listed
    if operation == ALL_REDUCE:
        ranks = _ranks(root, max(rows)[2]) or listed
    if ranks < 2:
        root.fail(f"{ranks} rank moves no data between devices: run it on at least two")
    points = tuple(sorted((size, seconds) for size, seconds, _ in rows))
    return Run(path.name, operation, ranks, hosts, device, points)


def _operation(root: Node) -> str:
    found = root.get("args")
    names = [match[1] for one in (found.items() if found else []) if (match := _PROGRAM.fullmatch(one.text()))]
    if not names:
        root.fail("its `args` do not name the program: give --operation all_reduce or sendrecv")
    if names[0] not in (ALL_REDUCE, SENDRECV):
        root.fail(
            f"it is a run of {names[0]}_perf; a level is made of all_reduce_perf, and sendrecv_perf if there is one"
        )
    return names[0]


def _best(node: Node) -> tuple[float, float]:
    """Seconds of the operation, and bus_bw / alg_bw (0 where unknown).

    The in-place measurement is preferred, because gradients are reduced in place.
    """
    measured = node.get("in_place") or node.get("out_of_place")
    if measured is None:
        node.fail("it has neither in_place nor out_of_place")
    if (wrong := measured.get("nwrong")) is not None and wrong.number():
        node.fail(f"{wrong.value:g} values came out wrong: these links, or their drivers, do not work")
    if "cpu_time" in measured.mapping():
        measured.fail("it has the CPU's time (-C), not the operation's: run it without -C")
    seconds = measured["time"].number() / 1e6
    if seconds <= 0 and node["size"].number():
        measured["time"].fail("a time must be above 0")
    algorithm, bus = measured.get("alg_bw"), measured.get("bus_bw")
    known = algorithm is not None and bus is not None and algorithm.number() > 0
    return seconds, bus.number() / algorithm.number() if known and algorithm and bus else 0.0


def _devices(root: Node) -> tuple[int, int, str]:
    """The number of hosts and ranks, and the name of the devices."""
    config = root.get("config")
    if config is None:
        return 1, 0, ""
    listed = config.get("devices")
    devices = listed.items() if listed else []
    hosts = {one["hostname"].text() for one in devices}
    names = {name.text() for one in devices if (name := one.get("device_info"))}
    threads, gpus = config.get("nthreads"), config.get("ngpus")
    local = (threads.integer() if threads else 1) * (gpus.integer() if gpus else 1)
    return max(1, len(hosts)), max(len(devices), local), names.pop().strip() if len(names) == 1 else ""


def _ranks(root: Node, ratio: float) -> int:
    """The number n of ranks from bus_bw / alg_bw = 2 (n - 1) / n; 0 where the ratio is unknown."""
    if not ratio:
        return 0
    if not 0.99 <= ratio < 2:
        root.fail(f"bus_bw / alg_bw is {ratio:.3g}; for an all-reduce it is 2 (n - 1) / n, from 1 up to 2")
    return round(2 / (2 - ratio))


def fit(run: Run) -> Fit:
    """Fit the latency of a step and the bandwidth to a run, like `pipeplan profile --links` does for its own times.

    A single size determines only the bandwidth. Raises `InputError` where all sizes are too small for a bandwidth.
    """
    ring = run.operation == ALL_REDUCE
    points = [Point.ring(run.ranks, size, t) if ring else Point.message(size, t) for size, t in run.points]
    if len({size for size, _ in run.points}) < 2:
        return Fit(0.0, points[-1].bytes / points[-1].seconds, 0.0, 0.0)
    found = linkfit.fit(points)
    largest = points[-1]
    if largest.bytes / found.bandwidth < LEAST_SHARE * largest.seconds:
        raise InputError(
            f"{run.file}: its sizes are too small to tell a bandwidth, the time hardly grows with them: measure up to "
            "larger ones, as with -e 1G"
        )
    return found
