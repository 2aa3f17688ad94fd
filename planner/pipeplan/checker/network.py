"""The links of a cluster: the rates of every card, and the slowest rates between workers."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeplan.cluster_data.cluster import Cluster, Level

Floats = NDArray[np.float64]


class LinkRates(NamedTuple):
    """The rates of one link, or of the slowest link among several."""

    message: float
    """Bandwidth of point-to-point traffic, bytes/s."""
    allreduce: float
    """Bandwidth of ring all-reduces, bytes/s."""
    latency_s: float


FREE = LinkRates(math.inf, math.inf, 0.0)
"""The link of a worker to itself."""


@dataclass(frozen=True)
class NetworkRates:
    """The components of every level, with their links. Index 0 of each tuple is the level of single workers."""

    starts: tuple[tuple[int, ...], ...]
    """For every level: the first worker of each component, followed by the number of workers."""
    cards: tuple[tuple[LinkRates, ...], ...]
    """For every level except the outermost: the network card that connects each component to the others."""

    @staticmethod
    def of(cluster: Cluster) -> NetworkRates:
        """The network of a cluster."""
        starts = [tuple(range(cluster.workers + 1))]
        cards = []
        for number, level in enumerate(cluster.levels):
            below = starts[-1]
            counts = _members(cluster, number, len(below) - 1)
            edges = [0]
            for count in counts:
                edges.append(edges[-1] + count)
            own = [
                _card(cluster, number, level, component, which)
                for component, count in enumerate(counts)
                for which in range(edges[component], edges[component] + count)
            ]
            starts.append(tuple(below[edge] for edge in edges))
            cards.append(tuple(own))
        return NetworkRates(tuple(starts), tuple(cards))

    def component(self, level: int, worker: int) -> int:
        """Index of the component of a level that holds a worker."""
        return bisect_right(self.starts[level], worker) - 1

    def level(self, workers: Sequence[int]) -> int:
        """The lowest level with a component that holds all these workers."""
        level = 0
        while self.component(level, min(workers)) != self.component(level, max(workers)):
            level += 1
        return level

    def among(self, workers: Sequence[int]) -> LinkRates:
        """The slowest rates among the cards between these workers and the level at which all of them meet."""
        top = self.level(workers)
        cards = {(level, self.component(level, worker)) for worker in workers for level in range(top)}
        return _slowest([FREE, *(self.cards[level][component] for level, component in cards)])

    def ways(self) -> tuple[tuple[LinkRates, ...], ...]:
        """For every level: the slowest rates of the cards between each worker and this level."""
        found = [(FREE,) * self.starts[0][-1]]
        for level, cards in enumerate(self.cards):
            below = found[-1]
            homes = [self.component(level, worker) for worker in range(len(below))]
            found.append(tuple(_slowest([rates, cards[home]]) for rates, home in zip(below, homes, strict=True)))
        return tuple(found)


def _members(cluster: Cluster, number: int, below: int) -> list[int]:
    """Number of components of the level below in each component of a level. `below`: their total number."""
    if number == 0 and cluster.machines:
        return [machine.inside.count for machine in cluster.machines]
    count = cluster.levels[number].count
    return [count] * (below // count)


def _card(cluster: Cluster, number: int, level: Level, component: int, which: int) -> LinkRates:
    """The network card of component `which` of the level below, which is part of `component` of this level."""
    bandwidth = level.bandwidth
    if cluster.machines and number == 0:
        level = cluster.machines[component].inside
        bandwidth = level.bandwidth
    if cluster.machines and number == 1:
        bandwidth = min(rate for rate in (cluster.machines[which].card or math.inf, bandwidth) if rate)
    if level.count == 1:
        return FREE
    return LinkRates(bandwidth * level.sendrecv_efficiency, bandwidth * level.allreduce_efficiency, level.latency_s)


def _slowest(links: Sequence[LinkRates]) -> LinkRates:
    message, allreduce, latency = zip(*links, strict=True)
    return LinkRates(min(message), min(allreduce), max(latency))
