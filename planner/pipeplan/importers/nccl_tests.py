"""The JSON that nccl-tests writes with `-J`, and the cluster level that follows from its measurements.

`results` has one entry for each size: `size` in bytes, and `out_of_place` and `in_place` (or null) with `time` in µs
(`cpu_time` under `-C`, which is not that of the operation), `alg_bw` = size / time and `bus_bw`, both in GB/s, and
`nwrong`. `config` has `nthreads`, `ngpus` and `devices`, the ranks and their hosts (all of them under MPI). Only `args`
names the operation. For an all-reduce among n ranks bus_bw / alg_bw = 2 (n - 1) / n (doc/PERFORMANCE.md), which gives
n.

Source: github.com/NVIDIA/nccl-tests, src/util.cu, version 2 of its file.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeplan.errors import InputError
from pipeplan.link_fit.alpha_beta import AlphaBetaFit, TransferTime, fit_alpha_beta
from pipeplan.util.files import Node, read_json
from pipeplan.util.units import show_size

KIND = "nccl-tests file"
ALL_REDUCE, SENDRECV = "all_reduce", "sendrecv"
LEAST_SHARE = 0.2
"""Least share of the largest size's time that its bytes must take for a bandwidth to be fitted."""
_PROGRAM = re.compile(r"(?:.*/)?([a-z_]+?)_perf(?:_mpi)?(?:\.exe)?")


@dataclass(frozen=True)
class NcclTestsRun:
    """One run of one program of nccl-tests."""

    file: str
    operation: str
    ranks: int
    hosts: int
    device: str
    """Name of the devices in the file, empty where it has none."""
    points: tuple[tuple[float, float], ...]
    """Bytes of the whole array and seconds, sorted by size."""


def read_nccl_tests(path: Path, operation: str | None = None) -> NcclTestsRun:
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
    return NcclTestsRun(path.name, operation, ranks, hosts, device, points)


def _operation(root: Node) -> str:
    arguments = root.get("args")
    names = [
        match[1]
        for argument in (arguments.items() if arguments else [])
        if (match := _PROGRAM.fullmatch(argument.text()))
    ]
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
    hosts = {device["hostname"].text() for device in devices}
    names = {name.text() for device in devices if (name := device.get("device_info"))}
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


def fit_nccl_tests(run: NcclTestsRun) -> AlphaBetaFit:
    """Fit the latency of a step and the bandwidth to a run, like `pipeplan profile --links` does for its own times.

    A single size determines only the bandwidth. Raises `InputError` where all sizes are too small for a bandwidth.
    """
    ring = run.operation == ALL_REDUCE
    points = [
        TransferTime.ring(run.ranks, size, t) if ring else TransferTime.message(size, t) for size, t in run.points
    ]
    if len({size for size, _ in run.points}) < 2:
        return AlphaBetaFit(0.0, points[-1].bytes / points[-1].seconds, 0.0, 0.0)
    fitted = fit_alpha_beta(points)
    largest = points[-1]
    if largest.bytes / fitted.bandwidth < LEAST_SHARE * largest.seconds:
        raise InputError(
            f"{run.file}: its sizes are too small to tell a bandwidth, the time hardly grows with them: measure up to "
            "larger ones, as with -e 1G"
        )
    return fitted


@dataclass(frozen=True)
class MeasuredLevel:
    """A measured level."""

    bandwidth: float
    """Bytes/s."""
    latency_s: float
    allreduce_efficiency: float
    sendrecv_efficiency: float | None
    """None without a run of sendrecv."""
    source: str
    spans: int
    """Number of hosts, or of devices where all are in one host."""
    servers: bool
    """Whether the level joins hosts."""
    errors: tuple[str, ...]
    """Lines on the error of the fit, one for each run."""


def level_from_runs(runs: Sequence[NcclTestsRun], nominal: float | None) -> MeasuredLevel:
    """Fit a level to one run of all_reduce and optionally one of sendrecv, both on the same ranks.

    Efficiencies are relative to `nominal` (bytes/s), or to the largest measured bandwidth without it. An all-reduce
    alone determines only the product of its bandwidth and efficiency, so that messages stay open. Raises `InputError`
    for other sets of runs.
    """
    by_operation = {run.operation: run for run in runs}
    if ALL_REDUCE not in by_operation or len(by_operation) < len(runs) or len(runs) > 2:
        raise InputError("a level is made of one run of all_reduce_perf, and one of sendrecv_perf if there is one")
    fits = {name: fit_nccl_tests(run) for name, run in by_operation.items()}
    bandwidth = max([nominal or 0.0, *(fit.bandwidth for fit in fits.values())])
    messages = fits.get(SENDRECV)
    collective = by_operation[ALL_REDUCE]
    where = f"{collective.ranks} × {collective.device}" if collective.device else f"{collective.ranks} ranks"
    where += f" on {collective.hosts} hosts" if collective.hosts > 1 else ""
    return MeasuredLevel(
        bandwidth=bandwidth,
        latency_s=max(fit.latency_s for fit in fits.values()),
        allreduce_efficiency=fits[ALL_REDUCE].bandwidth / bandwidth,
        sendrecv_efficiency=messages.bandwidth / bandwidth if messages else None,
        source=f"nccl-tests, {' and '.join(run.file for run in runs)}, {where}",
        spans=collective.hosts if collective.hosts > 1 else collective.ranks,
        servers=collective.hosts > 1,
        errors=tuple(_error(run, fits[name]) for name, run in by_operation.items()),
    )


def _error(run: NcclTestsRun, fitted: AlphaBetaFit) -> str:
    smallest, largest = run.points[0][0], run.points[-1][0]
    return (
        f"{run.operation}, {show_size(smallest)} to {show_size(largest)} in {len(run.points)} sizes: "
        f"{fitted.bandwidth / 1e9:.4g} GB/s, {fitted.latency_s * 1e6:.3g} us a step, off by {fitted.error:.0%} "
        f"(median), at most {fitted.worst:.0%}"
    )
