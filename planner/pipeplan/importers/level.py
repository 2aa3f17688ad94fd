"""A cluster level from link measurements: bandwidth, latency, and the efficiency of each operation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeplan.errors import InputError
from pipeplan.importers.nccl_tests import ALL_REDUCE, SENDRECV, Run, fit
from pipeplan.linkfit.fit import Fit
from pipeplan.units import show_size


@dataclass(frozen=True)
class Measured:
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


def measured(runs: Sequence[Run], nominal: float | None) -> Measured:
    """Fit a level to one run of all_reduce and optionally one of sendrecv, both on the same ranks.

    Efficiencies are relative to `nominal` (bytes/s), or to the largest measured bandwidth without it. An all-reduce
    alone determines only the product of its bandwidth and efficiency, so that messages stay open. Raises `InputError`
    for other sets of runs.
    """
    by_operation = {run.operation: run for run in runs}
    if ALL_REDUCE not in by_operation or len(by_operation) < len(runs) or len(runs) > 2:
        raise InputError("a level is made of one run of all_reduce_perf, and one of sendrecv_perf if there is one")
    fits = {name: fit(run) for name, run in by_operation.items()}
    bandwidth = max([nominal or 0.0, *(one.bandwidth for one in fits.values())])
    messages = fits.get(SENDRECV)
    collective = by_operation[ALL_REDUCE]
    return Measured(
        bandwidth=bandwidth,
        latency_s=max(one.latency_s for one in fits.values()),
        allreduce_efficiency=fits[ALL_REDUCE].bandwidth / bandwidth,
        sendrecv_efficiency=messages.bandwidth / bandwidth if messages else None,
        source=f"nccl-tests, {' and '.join(run.file for run in runs)}, {_where(collective)}",
        spans=collective.hosts if collective.hosts > 1 else collective.ranks,
        servers=collective.hosts > 1,
        errors=tuple(_error(run, fits[name]) for name, run in by_operation.items()),
    )


def _error(run: Run, found: Fit) -> str:
    smallest, largest = run.points[0][0], run.points[-1][0]
    return (
        f"{run.operation}, {show_size(smallest)} to {show_size(largest)} in {len(run.points)} sizes: "
        f"{found.bandwidth / 1e9:.4g} GB/s, {found.latency_s * 1e6:.3g} us a step, off by {found.error:.0%} "
        f"(median), at most {found.worst:.0%}"
    )


def _where(run: Run) -> str:
    devices = f"{run.ranks} × {run.device}" if run.device else f"{run.ranks} ranks"
    return f"{devices} on {run.hosts} hosts" if run.hosts > 1 else devices
