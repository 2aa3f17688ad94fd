"""The rates of every level of a uniform cluster, and the level that joins two workers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeplan.cluster_data.cluster import Cluster

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class UniformRates:
    """Arrays over levels 0 … L: the slowest bandwidth and the longest latency of a level and of those inside it.

    Level 0 is a single device, which has no links. A level that joins a single component has no links of its own.
    """

    spans: tuple[int, ...]
    """Number of workers in one component."""
    allreduce: Floats
    """Bandwidth of ring all-reduces, bytes/s."""
    message: Floats
    """Bandwidth of point-to-point traffic, bytes/s."""
    latency_s: Floats

    @staticmethod
    def of(cluster: Cluster) -> UniformRates:
        """The rates of a cluster."""
        spans, allreduce, message, latency = [1], [math.inf], [math.inf], [0.0]
        for level in cluster.levels:
            spans.append(spans[-1] * level.count)
            linked = level.count > 1
            allreduce.append(min(allreduce[-1], level.bandwidth * level.allreduce_efficiency if linked else math.inf))
            message.append(min(message[-1], level.bandwidth * level.sendrecv_efficiency if linked else math.inf))
            latency.append(max(latency[-1], level.latency_s if linked else 0.0))
        return UniformRates(tuple(spans), np.array(allreduce), np.array(message), np.array(latency))

    def level(self, first: int, last: int) -> int:
        """The smallest level with a component that holds both workers."""
        return next(level for level, span in enumerate(self.spans) if first // span == last // span)
