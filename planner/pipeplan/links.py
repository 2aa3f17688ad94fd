"""The rates of a cluster's links as the cost formulas take them: per operation, with efficiencies applied.

What a message or a ring runs at is a property of the component that holds both ends: the slowest link between the
components that it joins, and of those inside them. Where servers differ, so do components of one level.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from pipeplan.cluster_data import Cluster, Level

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Rates:
    """Of one level: arrays over its components, or of length 1 where all are the same. Bytes/s and seconds."""

    sendrecv: Floats
    """Point to point, of the slowest link between two components of the level below."""
    allreduce: Floats
    """Of the slowest link that a ring spanning the component passes."""
    latency: Floats


@dataclass(frozen=True)
class Links:
    """The rates of levels 0 … L. Level 0 is a device with itself: infinite bandwidth, no latency."""

    cluster: Cluster
    rates: tuple[Rates, ...]

    @staticmethod
    def of(cluster: Cluster) -> Links:
        """The links of a cluster. A level that joins a single component has no links: nothing crosses it."""
        found = [Rates(np.array([np.inf]), np.array([np.inf]), np.zeros(1))]
        for number, level in enumerate(cluster.levels):
            found.append(_within(cluster, number, level, found[-1]))
        return Links(cluster, tuple(found))

    def sendrecv(self, level: int, worker: int) -> tuple[float, float]:
        """Bandwidth and latency of a message inside the component of `level` that holds a worker."""
        rates, at = self.rates[level], self._at(level, worker)
        return float(rates.sendrecv[at]), float(rates.latency[at])

    def allreduce(self, level: int, worker: int) -> tuple[float, float]:
        """Bandwidth and latency of a ring that spans the component of `level` that holds a worker."""
        rates, at = self.rates[level], self._at(level, worker)
        return float(rates.allreduce[at]), float(rates.latency[at])

    def sendrecv_among(self, workers: Sequence[int]) -> tuple[float, float]:
        """Bandwidth and latency of messages in the smallest component that holds some workers."""
        return self.sendrecv(self.cluster.level_between(min(workers), max(workers)), min(workers))

    def allreduce_among(self, workers: Sequence[int]) -> tuple[float, float]:
        """Bandwidth and latency of a ring in the smallest component that holds some workers."""
        return self.allreduce(self.cluster.level_between(min(workers), max(workers)), min(workers))

    def card(self, level: int, worker: int) -> tuple[float, float]:
        """The link by which the component of `level` that holds a worker joins its neighbours in the level above.

        Bytes/s, each direction, of messages and of all-reduces; infinite where it has no neighbours.
        """
        alone = float("inf"), float("inf")
        if level == len(self.cluster.levels):
            return alone
        joined = _joined(self.cluster, level, self.cluster.component(level, worker))
        if joined.count == 1:
            return alone
        return joined.bandwidth * joined.sendrecv_efficiency, joined.bandwidth * joined.allreduce_efficiency

    def _at(self, level: int, worker: int) -> int:
        return self.cluster.component(level, worker) if len(self.rates[level].latency) > 1 else 0

    def over_workers(self, level: int) -> Rates:
        """The rates of a level as arrays over all workers: those of the component that holds each."""
        sizes = np.diff(np.array(self.cluster.starts(level)))
        rates = self.rates[level]
        if len(rates.latency) == 1:
            sizes = np.array([self.cluster.workers])
        return Rates(*(np.repeat(row, sizes) for row in (rates.sendrecv, rates.allreduce, rates.latency)))

    @cached_property
    def sendrecv_bandwidth(self) -> Floats:
        """Over levels 0 … L: of the slowest component of each."""
        return np.array([rates.sendrecv.min() for rates in self.rates])

    @cached_property
    def sendrecv_latency(self) -> Floats:
        """Over levels, likewise the longest."""
        return np.array([rates.latency.max() for rates in self.rates])

    @cached_property
    def allreduce_bandwidth(self) -> Floats:
        """Over levels, of the slowest component of each."""
        return np.array([rates.allreduce.min() for rates in self.rates])

    @property
    def allreduce_latency(self) -> Floats:
        """Over levels, the longest."""
        return self.sendrecv_latency


def _within(cluster: Cluster, number: int, level: Level, inside: Rates) -> Rates:
    """The rates of the components that `cluster.levels[number]` makes, from those of the level below."""
    if cluster.uniform:
        if level.count == 1:
            return inside
        return Rates(
            np.minimum(inside.sendrecv, level.bandwidth * level.sendrecv_efficiency),
            np.minimum(inside.allreduce, level.bandwidth * level.allreduce_efficiency),
            np.maximum(inside.latency, level.latency_s),
        )
    if number == 0:
        made = [machine.inside for machine in cluster.machines]
        return Rates(
            np.array([one.bandwidth * one.sendrecv_efficiency if one.count > 1 else np.inf for one in made]),
            np.array([one.bandwidth * one.allreduce_efficiency if one.count > 1 else np.inf for one in made]),
            np.array([one.latency_s if one.count > 1 else 0.0 for one in made]),
        )
    if level.count == 1:
        return inside
    below = len(cluster.starts(number)) - 1
    cards = np.array([_joined(cluster, number, component).bandwidth for component in range(below)])
    firsts = np.arange(0, below, level.count)
    return Rates(
        np.minimum.reduceat(np.minimum(inside.sendrecv, cards * level.sendrecv_efficiency), firsts),
        np.minimum.reduceat(np.minimum(inside.allreduce, cards * level.allreduce_efficiency), firsts),
        np.maximum(np.maximum.reduceat(inside.latency, firsts), level.latency_s),
    )


def _joined(cluster: Cluster, level: int, component: int) -> Level:
    """The level above a component of `level`, with the bandwidth of that component's own link."""
    if cluster.uniform or level > 1:
        return cluster.levels[level]
    if level == 0:
        return cluster.machines[cluster.server_of(component)].inside
    card, above = cluster.machines[component].card, cluster.levels[1]
    slower = min((rate for rate in (card, above.bandwidth) if rate), default=0.0)
    return Level(
        above.name, above.count, slower, above.latency_s, above.allreduce_efficiency, above.sendrecv_efficiency
    )
