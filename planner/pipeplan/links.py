"""The rates of a cluster's levels as the cost formulas take them: per operation, with efficiencies applied."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeplan.cluster import Cluster


@dataclass(frozen=True)
class Links:
    """Arrays over levels 0 … L. Level 0 is a device with itself: infinite bandwidth, no latency."""

    sendrecv_bandwidth: NDArray[np.float64]
    """Point to point, of the slowest link between two components of the level below, bytes/s."""
    sendrecv_latency: NDArray[np.float64]
    allreduce_bandwidth: NDArray[np.float64]
    """Of the slowest link that a ring spanning this level passes, bytes/s."""
    allreduce_latency: NDArray[np.float64]

    @staticmethod
    def of(cluster: Cluster) -> Links:
        """The links of a cluster. A level that joins a single component has no links: nothing crosses it."""
        real = [level.count > 1 for level in cluster.levels]
        rate = [level.bandwidth if used else np.inf for level, used in zip(cluster.levels, real, strict=True)]
        delay = [level.latency_s if used else 0.0 for level, used in zip(cluster.levels, real, strict=True)]
        send = [bytes_s * level.sendrecv_efficiency for bytes_s, level in zip(rate, cluster.levels, strict=True)]
        reduce = [bytes_s * level.allreduce_efficiency for bytes_s, level in zip(rate, cluster.levels, strict=True)]
        latency = np.array([0.0, *delay])
        return Links(
            sendrecv_bandwidth=np.minimum.accumulate(np.array([np.inf, *send])),
            sendrecv_latency=np.maximum.accumulate(latency),
            allreduce_bandwidth=np.minimum.accumulate(np.array([np.inf, *reduce])),
            allreduce_latency=np.maximum.accumulate(latency),
        )
