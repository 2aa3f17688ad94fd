"""The rates of a cluster's links in the form that the cost formulas need: per operation, with efficiencies applied.

The rate of a message or of a ring all-reduce is a property of the smallest component that holds all workers concerned:
that of the slowest link in it, both between the components that it joins and inside them. In a heterogeneous cluster
the components of one level have different rates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from pipeplan.cluster_data.cluster import Cluster, Level

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class LevelRates:
    """The rates of one level: arrays over its components, of length 1 where all components are the same."""

    sendrecv: Floats
    """Bandwidth of point-to-point traffic inside each component, bytes/s."""
    allreduce: Floats
    """Bandwidth of a ring all-reduce that spans each component, bytes/s."""
    latency: Floats
    """Longest latency inside each component, seconds."""


@dataclass(frozen=True)
class Links:
    """The rates of all levels of a cluster."""

    cluster: Cluster
    rates: tuple[LevelRates, ...]
    """The rates of levels 0 … L. Level 0 is a single device, with infinite bandwidth and no latency."""

    @staticmethod
    def of(cluster: Cluster) -> Links:
        """The links of a cluster. A level that joins a single component adds no links, because nothing crosses it."""
        rates = [LevelRates(np.array([np.inf]), np.array([np.inf]), np.zeros(1))]
        for number, level in enumerate(cluster.levels):
            rates.append(_within(cluster, number, level, rates[-1]))
        return Links(cluster, tuple(rates))

    def sendrecv(self, level: int, worker: int) -> tuple[float, float]:
        """Bandwidth (bytes/s) and latency (s) of a message inside the component of `level` that holds a worker."""
        rates, component = self.rates[level], self._row(level, worker)
        return float(rates.sendrecv[component]), float(rates.latency[component])

    def allreduce(self, level: int, worker: int) -> tuple[float, float]:
        """Bandwidth (bytes/s) and latency (s) of a ring that spans the component of `level` that holds a worker."""
        rates, component = self.rates[level], self._row(level, worker)
        return float(rates.allreduce[component]), float(rates.latency[component])

    def sendrecv_among(self, workers: Sequence[int]) -> tuple[float, float]:
        """Bandwidth (bytes/s) and latency (s) of messages in the smallest component that holds some workers."""
        return self.sendrecv(self.cluster.level_between(min(workers), max(workers)), min(workers))

    def allreduce_among(self, workers: Sequence[int]) -> tuple[float, float]:
        """Bandwidth (bytes/s) and latency (s) of a ring in the smallest component that holds some workers."""
        return self.allreduce(self.cluster.level_between(min(workers), max(workers)), min(workers))

    def card(self, level: int, worker: int) -> tuple[float, float]:
        """Rates of the network card of a component: its link to the other components of the level above.

        The component is that of `level` that holds a worker. Returns the bandwidths of messages and of all-reduces in
        bytes/s, each direction; both are infinite where the component has no neighbours.
        """
        alone = float("inf"), float("inf")
        if level == len(self.cluster.levels):
            return alone
        joined = _joined(self.cluster, level, self.cluster.component(level, worker))
        if joined.count == 1:
            return alone
        return joined.bandwidth * joined.sendrecv_efficiency, joined.bandwidth * joined.allreduce_efficiency

    def _row(self, level: int, worker: int) -> int:
        """Index into the arrays of a level for the component that holds a worker."""
        return self.cluster.component(level, worker) if len(self.rates[level].latency) > 1 else 0

    def over_workers(self, level: int) -> LevelRates:
        """The rates of a level as arrays over all workers; each worker has those of the component that holds it."""
        sizes = np.diff(np.array(self.cluster.starts(level)))
        rates = self.rates[level]
        if len(rates.latency) == 1:
            sizes = np.array([self.cluster.workers])
        return LevelRates(*(np.repeat(row, sizes) for row in (rates.sendrecv, rates.allreduce, rates.latency)))

    @cached_property
    def sendrecv_bandwidth(self) -> Floats:
        """Bandwidth of messages in the slowest component of each level, an array over levels 0 … L."""
        return np.array([rates.sendrecv.min() for rates in self.rates])

    @cached_property
    def sendrecv_latency(self) -> Floats:
        """Longest latency in each level, an array over levels 0 … L."""
        return np.array([rates.latency.max() for rates in self.rates])

    @cached_property
    def allreduce_bandwidth(self) -> Floats:
        """Bandwidth of ring all-reduces in the slowest component of each level, an array over levels 0 … L."""
        return np.array([rates.allreduce.min() for rates in self.rates])

    @property
    def allreduce_latency(self) -> Floats:
        """Longest latency in each level, an array over levels 0 … L; the same for messages and all-reduces."""
        return self.sendrecv_latency


def _within(cluster: Cluster, number: int, level: Level, inside: LevelRates) -> LevelRates:
    """The rates of the components of `cluster.levels[number]`, given the rates of the level below, `inside`."""
    if cluster.uniform:
        if level.count == 1:
            return inside
        return LevelRates(
            np.minimum(inside.sendrecv, level.bandwidth * level.sendrecv_efficiency),
            np.minimum(inside.allreduce, level.bandwidth * level.allreduce_efficiency),
            np.maximum(inside.latency, level.latency_s),
        )
    if number == 0:
        servers = [machine.inside for machine in cluster.machines]
        return LevelRates(
            np.array([level.bandwidth * level.sendrecv_efficiency if level.count > 1 else np.inf for level in servers]),
            np.array(
                [level.bandwidth * level.allreduce_efficiency if level.count > 1 else np.inf for level in servers]
            ),
            np.array([level.latency_s if level.count > 1 else 0.0 for level in servers]),
        )
    if level.count == 1:
        return inside
    below = len(cluster.starts(number)) - 1
    cards = np.array([_joined(cluster, number, component).bandwidth for component in range(below)])
    firsts = np.arange(0, below, level.count)
    return LevelRates(
        np.minimum.reduceat(np.minimum(inside.sendrecv, cards * level.sendrecv_efficiency), firsts),
        np.minimum.reduceat(np.minimum(inside.allreduce, cards * level.allreduce_efficiency), firsts),
        np.maximum(np.maximum.reduceat(inside.latency, firsts), level.latency_s),
    )


def _joined(cluster: Cluster, level: int, component: int) -> Level:
    """The level that joins a component of `level` with others, with the bandwidth of that component's own link."""
    if cluster.uniform or level > 1:
        return cluster.levels[level]
    if level == 0:
        return cluster.machines[cluster.server_of(component)].inside
    card, above = cluster.machines[component].card, cluster.levels[1]
    slower = min((rate for rate in (card, above.bandwidth) if rate), default=0.0)
    return Level(
        above.name, above.count, slower, above.latency_s, above.allreduce_efficiency, above.sendrecv_efficiency
    )
