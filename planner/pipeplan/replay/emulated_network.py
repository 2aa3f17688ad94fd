"""The cluster as a tree of switches, in which every component's card is a cable with the rate of its messages."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from pipeplan.cluster_data.cluster import Cluster
from pipeplan.cluster_data.links import Links
from pipeplan.replay.scaling import Scaling


@dataclass(frozen=True)
class NetworkPart:
    """A component of the cluster, joined to others by a cable."""

    name: str
    rate: float
    """Bytes/s of its cable in each direction; infinite where it is not shaped."""
    workers: tuple[int, ...] = ()
    """Workers behind the cable without cables of their own."""
    below: tuple[NetworkPart, ...] = field(default_factory=tuple)
    level: int = 0
    """Level of the component, 0 for a worker."""
    component: int = 0
    """Number of the component at its level."""

    @property
    def cables(self) -> list[NetworkPart]:
        """This part and all parts below it that have a shaped cable."""
        own = [self] if math.isfinite(self.rate) else []
        return own + [cable for part in self.below for cable in part.cables]

    @property
    def shapes_inside(self) -> bool:
        """Whether links inside servers are cables too."""
        return self.leaves[0].level == 0

    @property
    def leaves(self) -> list[NetworkPart]:
        """The lowest parts, in the order of their workers."""
        return [leaf for part in self.below for leaf in part.leaves] if self.below else [self]


MOST_INSIDE = 2.0
"""Largest ratio of the rate inside a server to that of its card. One machine cannot carry bursts of faster links."""
HEADERS = 1.011
"""Bytes of a cable for each byte of messages: headers of frames of 9000 bytes, and acknowledgements of every second one
on the way back. The rates of a cluster are those of messages, without these."""


def parts_of(cluster: Cluster, workers: Collection[int] | None = None) -> NetworkPart:
    """The tree of the whole cluster, for a plan that runs on these workers, by default all.

    Links inside servers are cables too where the plan runs on a single server, or where they are not much faster than
    those between servers. Otherwise messages inside a server are as fast as this machine.
    """
    links = Links.of(cluster)
    own = links.card(cluster.server_level, 0)[0]
    inside = [links.card(0, first)[0] for first in cluster.starts(cluster.server_level)[:-1]]
    # The rate is infinite in a server with one worker, which has no links inside.
    slow = max((rate for rate in inside if math.isfinite(rate)), default=math.inf) <= MOST_INSIDE * own
    servers = {cluster.server_of(worker) for worker in (range(cluster.workers) if workers is None else workers)}
    lowest = 0 if len(servers) == 1 or slow else cluster.server_level
    return _part(cluster, links, len(cluster.levels), 0, lowest)


def _part(cluster: Cluster, links: Links, level: int, component: int, lowest: int) -> NetworkPart:
    starts = cluster.starts(level)
    workers = range(starts[component], starts[component + 1])
    rate = links.card(level, workers[0])[0]
    if level == lowest:
        name = f"worker {component}" if level == 0 else f"{cluster.levels[level - 1].name} {component}"
        return NetworkPart(name, rate, tuple(workers), (), level, component)
    inside = dict.fromkeys(cluster.component(level - 1, worker) for worker in workers)
    name = f"{cluster.levels[level - 1].name} {component}"
    below = tuple(_part(cluster, links, level - 1, component, lowest) for component in inside)
    return NetworkPart(name, rate, (), below, level, component)


def network_tree(part: NetworkPart, scaling: Scaling) -> dict[str, Any]:
    """The tree in the order for the emulation. Its root is always a switch."""
    tree = _node(part, scaling)
    return {"name": "", "below": [tree]} if part.workers else tree


def _node(part: NetworkPart, scaling: Scaling) -> dict[str, Any]:
    node: dict[str, Any] = {"name": part.name, "workers": len(part.workers)}
    if math.isfinite(part.rate):
        node["rate"] = f"{max(1, round(8 * HEADERS * scaling.rate(part.rate)))}bit"
    if part.below:
        node["below"] = [_node(child, scaling) for child in part.below]
    return node
