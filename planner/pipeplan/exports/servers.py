"""The servers that a grid of workers runs on, and its devices on each of them."""

from __future__ import annotations

import itertools

from pipeplan.cluster_data import Cluster


def used(cluster: Cluster, count: int) -> list[int]:
    """The number of the first `count` workers on each server, without the servers that have none."""
    ends = itertools.accumulate(cluster.server_sizes)
    return [
        min(end, count) - (end - size)
        for end, size in zip(ends, cluster.server_sizes, strict=True)
        if end - size < count
    ]
