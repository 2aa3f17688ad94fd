"""The runs of consecutive workers that a stage may lie on, and the rates of the links inside and between them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeplan.checker.model import Flags, Floats
from pipeplan.checker.network import NetworkRates
from pipeplan.cluster_data.cluster import Cluster

Ints = NDArray[np.intp]


@dataclass(frozen=True)
class WorkerRuns:
    """All runs of consecutive workers of a cluster, one array entry for each, and tables over pairs of workers.

    A table's entry for two workers is a property of the smallest component that holds both.
    """

    start: Ints
    """First worker."""
    end: Ints
    """One past the last worker."""
    speed: Floats
    """Speed of the slowest worker."""
    memory: Floats
    """Bytes of the worker with the least memory."""
    ring: Floats
    """Bandwidth of an all-reduce among the workers, bytes/s."""
    ring_latency_s: Floats
    anywhere: Flags
    """Whether a stage on the run has to be tried wherever a later stage begins. Other runs can be moved by one worker
    as long as that worker is idle."""
    message: Floats
    """Bandwidth of a message between two workers, bytes/s."""
    latency_s: Floats
    """Its latency."""
    stop: Ints
    """One past the last worker of the component that holds both."""
    speed_before: Floats
    """For every number of workers from 0 on, the sum of the speeds of so many first workers."""

    @property
    def replicas(self) -> Ints:
        """Number of workers."""
        return self.end - self.start

    @property
    def workers(self) -> int:
        """Number of workers of the cluster."""
        return len(self.message)

    @staticmethod
    def of(cluster: Cluster, most: int | None, grid: int | None = None) -> WorkerRuns:
        """The runs of at most `most` workers. In a uniform grid with `grid` replicas there are no others."""
        network, workers = NetworkRates.of(cluster), cluster.workers
        starts = [np.array(edges) for edges in network.starts]
        homes = [np.repeat(np.arange(len(edges) - 1), np.diff(edges)) for edges in starts]
        level = sum((home[:, None] != home[None, :]).astype(np.intp) for home in homes[:-1])
        level = np.asarray(level, dtype=np.intp).reshape(workers, workers)
        worker = np.arange(workers)[:, None]
        message, ring, latency = (
            np.array([np.array(rates)[home] for rates, home in zip(kind, homes, strict=True)])[level, worker]
            for kind in zip(*(zip(*inside, strict=True) for inside in network.inside), strict=True)
        )
        stop = np.array([edges[1:][home] for edges, home in zip(starts, homes, strict=True)])[level, worker]
        start, last = np.triu_indices(workers)
        kept = last - start < (most or workers)
        kept &= last - start + 1 == grid if grid else True
        start, last = start[kept], last[kept]
        inside = homes[1][start] == homes[1][last]
        speeds = np.array([device.speed for device in cluster.devices])
        memories = np.array([float(device.memory_bytes) for device in cluster.devices])
        pairs = list(zip(start.tolist(), last.tolist(), strict=True))
        return WorkerRuns(
            start=start,
            end=last + 1,
            speed=np.array([speeds[a : b + 1].min() for a, b in pairs]),
            memory=np.array([memories[a : b + 1].min() for a, b in pairs]),
            ring=ring[start, last],
            ring_latency_s=latency[start, last],
            anywhere=(~inside | np.isin(last + 1, starts[1])) & (grid is None),
            message=message,
            latency_s=latency,
            stop=stop,
            speed_before=np.concatenate([[0.0], np.cumsum(speeds)]),
        )
