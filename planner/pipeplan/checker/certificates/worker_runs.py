"""Runs of consecutive workers on which a stage may lie, with the rates of the links inside and between runs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from pipeplan.checker.formulas import room_of
from pipeplan.checker.model import Flags, Floats
from pipeplan.checker.network import NetworkRates
from pipeplan.cluster_data.cluster import Cluster

Ints = NDArray[np.intp]


@dataclass(frozen=True)
class Rows:
    """Arrays with one entry for each row, and nested `Rows` of the same length. Fields of other types apply to all
    rows.
    """

    def take(self, rows: Ints | Flags) -> Self:
        """The entries that `rows` selects."""
        taken = {
            name: value.take(rows) if isinstance(value, Rows) else value[rows]
            for name, value in vars(self).items()
            if isinstance(value, Rows | np.ndarray)
        }
        return replace(self, **taken)


@dataclass(frozen=True)
class WorkerRuns:
    """All runs of consecutive workers of a cluster, with one array entry for each run, and tables over pairs of
    workers.
    """

    start: Ints
    """First worker."""
    end: Ints
    """One past the last worker."""
    speed: Floats
    """Speed of the slowest worker."""
    memory: Floats
    """Bytes that a stage may use on the worker with the least memory."""
    ring: Floats
    """Bandwidth of an all-reduce among the workers, bytes/s."""
    ring_latency_s: Floats
    anywhere: Flags
    """Whether a stage on the run must be tried wherever the next stage begins. Any other run can move by one worker if
    that worker is idle."""
    level: Ints
    """Level of the smallest component that holds two workers."""
    stop: Ints
    """One past the last worker of this component."""
    message: Floats
    """By level, first worker and last worker of a run: bandwidth of the slowest link for messages between the run's
    workers and this level, in bytes/s."""
    latency_s: Floats
    """By level, first worker and last worker of a run: the longest latency of these links."""
    speed_before: Floats
    """Entry n is the sum of the speeds of the first n workers."""

    @property
    def replicas(self) -> Ints:
        """Number of workers."""
        return self.end - self.start

    @property
    def workers(self) -> int:
        """Number of workers of the cluster."""
        return len(self.level)

    @staticmethod
    def of(cluster: Cluster, most: int | None, grid: int | None = None) -> WorkerRuns:
        """The runs of at most `most` workers. With `grid`, only the runs of a uniform grid with this number of
        replicas.
        """
        network, workers = NetworkRates.of(cluster), cluster.workers
        starts = [np.array(edges) for edges in network.starts]
        homes = [np.repeat(np.arange(len(edges) - 1), np.diff(edges)) for edges in starts]
        level = sum((home[:, None] != home[None, :]).astype(np.intp) for home in homes[:-1])
        level = np.asarray(level, dtype=np.intp).reshape(workers, workers)
        message, ring, latency = (
            np.array([_worst_of_runs(np.array(rates), worst) for rates in kind])
            for kind, worst in zip(
                zip(*(zip(*rates, strict=True) for rates in network.ways()), strict=True),
                (np.minimum, np.minimum, np.maximum),
                strict=True,
            )
        )
        stop = np.array([edges[1:][home] for edges, home in zip(starts, homes, strict=True)])[
            level, np.arange(workers)[:, None]
        ]
        start, last = np.triu_indices(workers)
        kept = last - start < (most or workers)
        kept &= last - start + 1 == grid if grid else True
        start, last = start[kept], last[kept]
        inside = homes[1][start] == homes[1][last]
        speeds = np.array([device.speed for device in cluster.devices])
        memories = np.array([room_of(cluster, device) for device in cluster.devices])
        pairs = list(zip(start.tolist(), last.tolist(), strict=True))
        return WorkerRuns(
            start=start,
            end=last + 1,
            speed=np.array([speeds[a : b + 1].min() for a, b in pairs]),
            memory=np.array([memories[a : b + 1].min() for a, b in pairs]),
            ring=ring[level[start, last], start, last],
            ring_latency_s=latency[level[start, last], start, last],
            anywhere=(~inside | np.isin(last + 1, starts[1])) & (grid is None),
            level=level,
            stop=stop,
            message=message,
            latency_s=latency,
            speed_before=np.concatenate([[0.0], np.cumsum(speeds)]),
        )

    def hop(self, run: Ints, first: Ints, last: Ints) -> tuple[Floats, Floats]:
        """(bandwidth, latency) of messages between runs, given by index, and the runs behind them."""
        start, end = self.start[run], self.end[run] - 1
        level = self.level[start, last]
        bandwidth = np.minimum(self.message[level, start, end], self.message[level, first, last])
        return bandwidth, np.maximum(self.latency_s[level, start, end], self.latency_s[level, first, last])

    def no_slower(self, run: tuple[int, int], first: Ints, last: Ints, level: Ints) -> Flags:
        """Whether a run, (first worker, last worker), is reached at least as quickly as other runs, from level `level`
        or above.
        """
        found = np.ones(len(first), dtype=bool)
        for above in range(len(self.message)):
            quick = self.message[(above, *run)] >= self.message[above, first, last]
            quick &= self.latency_s[(above, *run)] <= self.latency_s[above, first, last]
            found &= quick | (above < level)
        return found


def _worst_of_runs(values: Floats, worst: np.ufunc) -> Floats:
    """Entry (first, last): the worst value among the workers from first to last."""
    count = len(values)
    found = np.tile(values, (count, 1))
    for first in range(count):
        found[first, first:] = worst.accumulate(values[first:])
    return found
