"""Topology of clusters: candidate placements on a heterogeneous cluster, and the components of a uniform one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipeplan.cluster_data.cluster import Cluster
from pipeplan.cluster_data.links import Links
from pipeplan.problem.cuts import Flags, Floats, Ints


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
    """Bytes that a stage may use on the smallest device."""
    allreduce_bandwidth: Floats
    allreduce_latency: Floats
    begins: Ints
    """For each end 0 … D, the index of the first placement with that end; one more entry closes the last."""
    ways: Ints
    """The class of each placement, by the links from its workers up to the higher levels."""
    message: Floats
    """By level (rows) and class: smallest bandwidth of messages on the links up to the level, in bytes/s."""
    latency: Floats
    """By level and class: longest latency on the links up to the level, in seconds."""
    no_slower: Flags
    """By level and two classes: whether the first class's links up to this level and to those above are no slower than
    the second's."""

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
        ways = Links.of(cluster).ways
        bandwidth = _among(np.array([level.allreduce for level in ways]), first, end)
        latency = -_among(-np.array([level.latency for level in ways]), first, end)
        rings = cluster.exchange_rings
        rows = np.arange(len(first))
        speed = least(np.array([device.speed for device in cluster.devices]), first, end)
        room = [cluster.executor.room_in(device.usable_bytes) for device in cluster.devices]
        memory = least(np.array(room), first, end)
        table = first, end, replicas, span, speed, memory, bandwidth[span, rows], latency[span, rows] * rings, begins
        message = _among(np.array([level.sendrecv for level in ways]), first, end)
        return PlacementTable(*table, *_classes(message, latency, span))

    def index(self, first: int, end: int) -> int:
        """The index of the placement on workers `first` … `end` - 1."""
        begin = int(self.begins[end])
        return begin + first - int(self.first[begin])

    def with_ends(self, ends: Ints) -> tuple[Ints, Ints]:
        """All placements that end at one of `ends`, as (index into `ends`, index of the placement)."""
        counts = self.begins[ends + 1] - self.begins[ends]
        which = np.repeat(np.arange(len(ends)), counts)
        before = np.cumsum(counts) - counts
        return which, np.arange(len(which)) - before[which] + self.begins[ends][which]


def levels_between(cluster: Cluster) -> Ints:
    """The level of the smallest component that contains two workers, for all pairs of workers."""
    levels = np.zeros((cluster.workers, cluster.workers), dtype=np.intp)
    for level in range(len(cluster.levels)):
        home = np.repeat(np.arange(len(cluster.starts(level)) - 1), np.diff(np.array(cluster.starts(level))))
        levels += home[:, None] != home[None, :]
    return levels


def least(values: Floats, first: Ints, end: Ints) -> Floats:
    """The smallest of the values from each `first` to just before each `end`."""
    table = np.minimum.accumulate(np.where(np.triu(np.ones((len(values),) * 2, dtype=bool)), values, np.inf), axis=1)
    found: Floats = table[first, end - 1]
    return found


def _among(values: Floats, first: Ints, end: Ints) -> Floats:
    """The smallest of the values of each row from each `first` to just before each `end`."""
    if values.shape[1] == 1:
        return np.repeat(values, len(first), axis=1)
    return np.array([least(row, first, end) for row in values])


def _classes(message: Floats, latency: Floats, span: Ints) -> tuple[Ints, Floats, Floats, Flags]:
    """The fields `ways` to `no_slower` of a table, from the rates by level (rows) and placement.

    No message leaves a placement at a level below its span, so rates at such levels do not distinguish classes.
    """
    levels = np.arange(len(message))[:, None]
    if (message == message[:, :1]).all() and (latency == latency[:, :1]).all():
        ways, message, latency = np.zeros(len(span), dtype=np.intp), message[:, :1], latency[:, :1]
    else:
        rates = np.vstack([np.where(levels < span, np.inf, message), np.where(levels < span, 0.0, latency)])
        rates, ways = np.unique(rates, axis=1, return_inverse=True)
        ways = ways.reshape(-1)
        message, latency = rates[: len(message)], rates[len(message) :]
    here = (message[:, :, None] >= message[:, None]) & (latency[:, :, None] <= latency[:, None])
    no_slower = np.logical_and.accumulate(here[::-1], axis=0)[::-1]
    return ways, message, latency, no_slower


@dataclass(frozen=True)
class ComponentLayout:
    """The components of a uniform cluster, for arithmetic on the indices of workers."""

    spans: Ints
    """For each level 0 … L, the number of workers in one of its components."""
    joins: Ints
    """For each p from 0 to D, level(p-1, p): the lowest level that joins the two workers. The value is L at both ends,
    where only one of the two workers exists."""

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
        """The level of the smallest component that contains both workers, elementwise."""
        level = np.zeros(np.broadcast(first, last).shape, dtype=np.intp)
        for span in self.spans[:-1]:
            level += first // span != last // span
        return level
