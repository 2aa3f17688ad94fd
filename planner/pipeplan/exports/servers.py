"""On which servers a grid of workers runs, and on how many devices of each."""

from __future__ import annotations

import itertools

from pipeplan.cluster_data import Cluster


def used(cluster: Cluster, count: int) -> list[int]:
    """How many of the first `count` workers each server has, without the servers that have none."""
    ends = itertools.accumulate(cluster.server_sizes)
    return [
        min(end, count) - (end - size)
        for end, size in zip(ends, cluster.server_sizes, strict=True)
        if end - size < count
    ]
