"""Words that several answers share: a cluster and a configuration in a few characters."""

from __future__ import annotations

from pipeplan.cluster_data.cluster import Cluster
from pipeplan.util.text import one_line


def describe_cluster(cluster: Cluster) -> str:
    """A cluster in a few words: `2 servers × 8 V100 16 GB`, or `3 servers: 2 × 8 V100 16 GB + 4 T4`."""
    (first, devices, name), *others = cluster.kinds
    if others:
        counted = [f"{'' if count == 1 else f'{count} × '}{devices} {name}" for count, devices, name in cluster.kinds]
        return one_line(f"{cluster.servers} servers: {' + '.join(counted)}")
    return one_line(f"{devices} {name}" if first == 1 else f"{first} servers × {devices} {name}")


def short_config(config: str, most: int) -> str:
    """The configuration, or the number of its stages if it is longer than `most` characters."""
    return config if len(config) <= most else f"{config.count('-') + 1} stages"
