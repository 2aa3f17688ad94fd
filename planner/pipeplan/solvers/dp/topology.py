"""Topology of clusters: candidate placements on a heterogeneous cluster, and the components of a uniform one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipeplan.cluster_data.cluster import Cluster
from pipeplan.cluster_data.links import Links
from pipeplan.problem.cuts import Floats, Ints


@dataclass(frozen=True)
class PlacementTable:
    """All candidate placements of a stage, as arrays in the order of their ends, then of their first workers."""

    first: Ints
    end: Ints
    """One past the last worker."""
    replicas: Ints
    span: Ints
    """The level of the smallest component that holds the placement."""
    speed: Floats
    """Speed of the slowest device."""
    memory: Floats
    """Memory of the smallest device, in bytes."""
    allreduce_bandwidth: Floats
    allreduce_latency: Floats
    begins: Ints
    """For each end 0 … D, the index where the placements with that end begin; a further entry closes the last."""

    @staticmethod
    def of(cluster: Cluster, most: int) -> PlacementTable:
        """The placements on up to `most` workers."""
        total = cluster.workers
        sizes = np.minimum(np.arange(total + 1), most)
        begins = np.concatenate([[0], np.cumsum(sizes)])
        end = np.repeat(np.arange(total + 1), sizes)
        replicas = sizes[end] - (np.arange(len(end)) - begins[end])
        first = end - replicas
        span = levels_between(cluster)[first, end - 1]
        rates = [Links.of(cluster).over_workers(level) for level in range(len(cluster.levels) + 1)]
        bandwidth, latency = (np.array([getattr(rate, name) for rate in rates]) for name in ("allreduce", "latency"))
        speed = _least(np.array([device.speed for device in cluster.devices]), first, end)
        memory = _least(np.array([float(device.memory_bytes) for device in cluster.devices]), first, end)
        return PlacementTable(
            first, end, replicas, span, speed, memory, bandwidth[span, first], latency[span, first], begins
        )

    def index(self, first: int, end: int) -> int:
        """The index of the placement on workers `first` … `end` - 1."""
        begin = int(self.begins[end])
        return begin + first - int(self.first[begin])

    def with_ends(self, ends: Ints) -> tuple[Ints, Ints]:
        """All placements that end at one of `ends`: the index into `ends`, and the placement's own index."""
        counts = self.begins[ends + 1] - self.begins[ends]
        which = np.repeat(np.arange(len(ends)), counts)
        before = np.cumsum(counts) - counts
        return which, np.arange(len(which)) - before[which] + self.begins[ends][which]


def levels_between(cluster: Cluster) -> Ints:
    """The level of the smallest component that holds two workers, for all pairs."""
    levels = np.zeros((cluster.workers, cluster.workers), dtype=np.intp)
    for level in range(len(cluster.levels)):
        home = np.repeat(np.arange(len(cluster.starts(level)) - 1), np.diff(np.array(cluster.starts(level))))
        levels += home[:, None] != home[None, :]
    return levels


def _least(values: Floats, first: Ints, end: Ints) -> Floats:
    """The smallest of the values from each `first` to just before each `end`."""
    table = np.minimum.accumulate(np.where(np.triu(np.ones((len(values),) * 2, dtype=bool)), values, np.inf), axis=1)
    least: Floats = table[first, end - 1]
    return least


@dataclass(frozen=True)
class ComponentLayout:
    """The components of a uniform cluster, for arithmetic on workers' numbers."""

    spans: Ints
    """For each level 0 … L, the number of workers in one of its components."""
    joins: Ints
    """For each p from 0 to D, level(p-1, p); L at both ends, where one of the two workers does not exist."""

    @staticmethod
    def of(cluster: Cluster) -> ComponentLayout:
        """The components of a cluster."""
        spans = np.array([cluster.span(level) for level in range(len(cluster.levels) + 1)], dtype=np.intp)
        positions = np.arange(cluster.workers + 1)
        top = len(spans) - 1
        joins = np.full(len(positions), top, dtype=np.intp)
        for level in range(top - 1, -1, -1):
            joins[positions % spans[level] != 0] = level
        # Two different workers share no component of level 0.
        joins = np.maximum(joins, 1)
        joins[[0, -1]] = top
        return ComponentLayout(spans, joins)

    @property
    def top(self) -> int:
        """L, the number of levels."""
        return len(self.spans) - 1

    def between(self, first: Ints, last: Ints) -> Ints:
        """The level of the smallest component that holds both workers, elementwise."""
        level = np.zeros(np.broadcast(first, last).shape, dtype=np.intp)
        for span in self.spans[:-1]:
            level += first // span != last // span
        return level
