"""The rates of a cluster's links in the form that the cost formulas need: per operation, with efficiencies applied.

The path of a worker leads up to the smallest component that contains all workers of the operation. The path has the
worker's own port, then the card of its component at every level below that one. A component without siblings has no
card. The slowest port or card on these paths sets the rate of a message or ring all-reduce. The longest latency counts.
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
    """The rates of one level, as arrays over its components or over the workers, of length 1 if all are the same."""

    sendrecv: Floats
    """Bandwidth of point-to-point traffic, in bytes/s."""
    allreduce: Floats
    """Bandwidth of a ring all-reduce, in bytes/s."""
    latency: Floats
    """Longest latency, in seconds."""

    def slowest_with(self, other: LevelRates) -> LevelRates:
        """The slower rate and the longer latency of each entry."""
        return LevelRates(
            np.minimum(self.sendrecv, other.sendrecv),
            np.minimum(self.allreduce, other.allreduce),
            np.maximum(self.latency, other.latency),
        )


@dataclass(frozen=True)
class Links:
    """The rates of all levels of a cluster."""

    cluster: Cluster
    rates: tuple[LevelRates, ...]
    """The slowest rates inside each component, for levels 0 … L. Level 0 is a single device, with infinite bandwidth
    and no latency."""

    @staticmethod
    def of(cluster: Cluster) -> Links:
        """The links of a cluster. A level that joins a single component adds no links, because no traffic crosses it.

        An all-reduce takes the time of `Cluster.exchange_rings` ring all-reduces.
        """
        rates = [LevelRates(np.array([np.inf]), np.array([np.inf]), np.zeros(1))]
        for number, level in enumerate(cluster.levels):
            rates.append(_within(cluster, number, level, rates[-1]))
        return Links(cluster, tuple(rates))

    @cached_property
    def ways(self) -> tuple[LevelRates, ...]:
        """The slowest rates on every worker's path up to each level 0 … L, as arrays over the workers."""
        if self.cluster.uniform:
            return self.rates
        free = np.full(self.cluster.workers, np.inf)
        found = [LevelRates(free, free, np.zeros(len(free)))]
        for level in range(len(self.cluster.levels)):
            starts, below = self.cluster.starts(level), found[-1]
            rates = [_card_rates(self.cluster, level, component) for component in range(len(starts) - 1)]
            sizes = np.diff(np.array(starts))
            found.append(below.slowest_with(LevelRates(*np.repeat(np.array(rates), sizes, axis=0).T)))
        return tuple(found)

    def sendrecv(self, level: int, worker: int) -> tuple[float, float]:
        """(slowest bandwidth of messages in bytes/s, longest latency in s) in a worker's component of `level`."""
        rates, component = self.rates[level], self._row(level, worker)
        return float(rates.sendrecv[component]), float(rates.latency[component])

    def allreduce(self, level: int, worker: int) -> tuple[float, float]:
        """(slowest bandwidth of rings in bytes/s, longest latency in s) in a worker's component of `level`."""
        rates, component = self.rates[level], self._row(level, worker)
        return float(rates.allreduce[component]), float(rates.latency[component]) * self._rings

    def sendrecv_among(self, workers: Sequence[int]) -> tuple[float, float]:
        """Bandwidth (bytes/s) and latency (s) of messages among some workers."""
        ways, mine = self._ways_of(workers)
        return float(ways.sendrecv[mine].min()), float(ways.latency[mine].max())

    def allreduce_among(self, workers: Sequence[int]) -> tuple[float, float]:
        """Bandwidth (bytes/s) and latency (s) of a ring among some workers."""
        ways, mine = self._ways_of(workers)
        return float(ways.allreduce[mine].min()), float(ways.latency[mine].max()) * self._rings

    def _ways_of(self, workers: Sequence[int]) -> tuple[LevelRates, Sequence[int]]:
        """The paths up to the smallest component that holds some workers, and the entries of these workers."""
        ways = self.ways[self.cluster.level_between(min(workers), max(workers))]
        return ways, [0] if self.cluster.uniform else list(workers)

    def card(self, level: int, worker: int) -> tuple[float, float]:
        """Rates of the network card of a component: its link to the other components of the level above.

        The component is the one at `level` that holds the given worker. Returns (bandwidth of messages, bandwidth of
        all-reduces) in bytes/s for each direction; both are infinite if the component has no neighbours.
        """
        if level == len(self.cluster.levels):
            return float("inf"), float("inf")
        return _card_rates(self.cluster, level, self.cluster.component(level, worker))[:2]

    @property
    def _rings(self) -> float:
        return self.cluster.exchange_rings

    def _row(self, level: int, worker: int) -> int:
        """Index into the arrays of a level for the component that holds a worker."""
        return self.cluster.component(level, worker) if len(self.rates[level].latency) > 1 else 0

    @cached_property
    def sendrecv_bandwidth(self) -> Floats:
        """Bandwidth of messages in the slowest component of each level, as an array over levels 0 … L."""
        return np.array([rates.sendrecv.min() for rates in self.rates])

    @cached_property
    def sendrecv_latency(self) -> Floats:
        """Longest latency in each level, as an array over levels 0 … L."""
        return np.array([rates.latency.max() for rates in self.rates])

    @cached_property
    def allreduce_bandwidth(self) -> Floats:
        """Bandwidth of ring all-reduces in the slowest component of each level, as an array over levels 0 … L."""
        return np.array([rates.allreduce.min() for rates in self.rates])

    @property
    def allreduce_latency(self) -> Floats:
        """Longest latency of each step of a ring in each level, as an array over levels 0 … L."""
        return self.sendrecv_latency * self._rings


def _within(cluster: Cluster, number: int, level: Level, inside: LevelRates) -> LevelRates:
    """The rates of the components of `cluster.levels[number]`, given the rates of the level below, `inside`."""
    if cluster.uniform:
        return inside.slowest_with(LevelRates(*np.array(_level_rates(cluster, level))[:, None]))
    if number == 0:
        return LevelRates(*np.array([_level_rates(cluster, machine.inside) for machine in cluster.machines]).T)
    if level.count == 1:
        return inside
    below = len(cluster.starts(number)) - 1
    cards = np.array([_card_rates(cluster, number, component) for component in range(below)])
    own, firsts = inside.slowest_with(LevelRates(*cards.T)), np.arange(0, below, level.count)
    return LevelRates(
        np.minimum.reduceat(own.sendrecv, firsts),
        np.minimum.reduceat(own.allreduce, firsts),
        np.maximum.reduceat(own.latency, firsts),
    )


def _card_rates(cluster: Cluster, level: int, component: int) -> tuple[float, float, float]:
    """The rates of the link that joins a component of `level` with others, as `_level_rates` returns them."""
    return _level_rates(cluster, _joined(cluster, level, component))


def _level_rates(cluster: Cluster, level: Level) -> tuple[float, float, float]:
    """Bandwidth of messages and of gradient exchanges over a level in bytes/s, and latency in seconds.

    A level of a single component slows nothing down.
    """
    if level.count == 1:
        return np.inf, np.inf, 0.0
    exchanges = level.bandwidth * level.allreduce_efficiency / cluster.exchange_rings
    return level.bandwidth * level.sendrecv_efficiency, exchanges, level.latency_s


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
