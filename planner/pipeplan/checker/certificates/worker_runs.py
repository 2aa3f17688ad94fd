"""The runs of consecutive workers that a stage may lie on, and the rates of the links inside and between them."""

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
    """Arrays with one entry for each row, and further `Rows` with as many; fields of other kinds hold for all rows."""

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
    """All runs of consecutive workers of a cluster, one array entry for each, and tables over pairs of workers."""

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
    """Whether a stage on the run has to be tried wherever a later stage begins. Other runs can be moved by one worker
    as long as that worker is idle."""
    level: Ints
    """Level of the smallest component that holds two workers."""
    stop: Ints
    """One past the last worker of this component."""
    message: Floats
    """By level, first and last worker of a run: the slowest link for messages on the ways of all its workers up to
    the level, bytes/s."""
    latency_s: Floats
    """By level, first and last worker: the longest latency on these ways."""
    speed_before: Floats
    """For every number of workers from 0 on, the sum of the speeds of so many first workers."""

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
        """The runs of at most `most` workers. In a uniform grid with `grid` replicas there are no others."""
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
        """Bandwidth and latency of messages between runs, by index, and other runs behind them."""
        start, end = self.start[run], self.end[run] - 1
        level = self.level[start, last]
        bandwidth = np.minimum(self.message[level, start, end], self.message[level, first, last])
        return bandwidth, np.maximum(self.latency_s[level, start, end], self.latency_s[level, first, last])

    def no_slower(self, run: tuple[int, int], first: Ints, last: Ints, level: Ints) -> Flags:
        """Whether a run (first and last worker) is reached as quickly as others, from their levels `level` or above."""
        found = np.ones(len(first), dtype=bool)
        for above in range(len(self.message)):
            quick = self.message[(above, *run)] >= self.message[above, first, last]
            quick &= self.latency_s[(above, *run)] <= self.latency_s[above, first, last]
            found &= quick | (above < level)
        return found


def _worst_of_runs(values: Floats, worst: np.ufunc) -> Floats:
    """For a first and a last worker, the worst of the values of all workers from one to the other."""
    count = len(values)
    found = np.tile(values, (count, 1))
    for first in range(count):
        found[first, first:] = worst.accumulate(values[first:])
    return found
