"""A latency and a bandwidth from times of transfers of several sizes.

Every operation of the cost model takes starts · latency + bytes / bandwidth. Errors of times are relative: one measured
over four decades is fitted in its logarithm, or the largest size alone would decide. Huber's loss (Huber, Robust
estimation of a location parameter, 1964) keeps a size at which a protocol changes, or at which somebody else had the
machine, from pulling the rest with it. Real links are often faster in the middle than the sum of the two says, as one
hides behind the other. Pipelines send what is large, so that larger sizes count more, up to ten times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeplan import cost

Floats = NDArray[np.float64]

TOLERATED = 0.1
"""Relative error beyond which a time counts less than its square."""
LEAST_WEIGHT = 0.1
"""Of a small size, where the largest counts 1 and one of a quarter of its bytes a half."""
_ROUNDS = 30
_SHARES = 97


@dataclass(frozen=True)
class Point:
    """One measured time."""

    starts: float
    """Latencies in it."""
    bytes: float
    """Bytes over the slowest link."""
    seconds: float

    @staticmethod
    def message(size: float, seconds: float) -> Point:
        """Of a message from one worker to another."""
        return Point(1.0, size, seconds)

    @staticmethod
    def ring(members: int, size: float, seconds: float) -> Point:
        """Of an all-reduce, by the formula that plans are costed with."""
        starts = cost.ring_allreduce_time(members, 0.0, 1.0, 1.0)
        return Point(starts, cost.ring_allreduce_time(members, size, 1.0, 0.0), seconds)


@dataclass(frozen=True)
class Fit:
    """What `fit` found."""

    latency_s: float
    bandwidth: float
    """Bytes/s."""
    error: float
    """Median relative difference between formula and time."""
    worst: float
    """The largest one."""

    def seconds(self, point: Point) -> float:
        """What the formula gives for a point, whatever time it has."""
        return point.starts * self.latency_s + point.bytes / self.bandwidth


def fit(points: Sequence[Point], latency_s: float | None = None) -> Fit:
    """The latency and bandwidth closest to all points, or with that latency the bandwidth.

    Two sizes at least, each with a time above 0.
    """
    starts, size, seconds = (
        np.array([getattr(point, name) for point in points]) for name in ("starts", "bytes", "seconds")
    )
    weights = np.maximum(LEAST_WEIGHT, np.sqrt(size / size.max()))

    def with_product(product: Floats) -> tuple[Floats, Floats]:
        # With latency · bandwidth = q, log t = log(starts q + bytes) - log bandwidth: only a location is left to find.
        return _locations(np.log(seconds) - np.log(np.outer(product, starts) + size), weights)

    def with_bandwidth(bandwidth: Floats) -> tuple[Floats, Floats]:
        expected = starts * latency_s + np.outer(1.0 / bandwidth, size)
        return _losses(np.log(seconds) - np.log(expected), np.zeros(len(bandwidth)), weights), -np.log(bandwidth)

    if latency_s is None:
        product, bandwidth = _least(with_product, size.min() * 1e-3, size.max() * 1e3)
        result = Fit(product / bandwidth, bandwidth, 0.0, 0.0)
    else:
        rates = size / seconds
        _, bandwidth = _least(with_bandwidth, rates.min() / 2, rates.max() * 100)
        result = Fit(latency_s, bandwidth, 0.0, 0.0)
    off = np.array([abs(result.seconds(point) / point.seconds - 1.0) for point in points])
    return Fit(result.latency_s, bandwidth, float(np.median(off)), float(off.max()))


def _least(losses: Callable[[Floats], tuple[Floats, Floats]], low: float, high: float) -> tuple[float, float]:
    """(the number with the least loss, the bandwidth there), searched over decades, then closer and closer."""
    start, stop = np.log(low), np.log(high)
    for _ in range(4):
        tried = np.linspace(start, stop, _SHARES)
        loss, slowness = losses(np.exp(tried))
        best = int(loss.argmin())
        step = (stop - start) / (_SHARES - 1)
        start, stop = tried[best] - step, tried[best] + step
    return float(np.exp(tried[best])), float(np.exp(-slowness[best]))


def _locations(rows: Floats, importance: Floats) -> tuple[Floats, Floats]:
    """(Huber's loss, the location with the least of it) of every row, by weights found again from what is left."""
    middle = np.average(rows, axis=1, weights=importance)
    for _ in range(_ROUNDS):
        off = np.abs(rows - middle[:, None])
        weights = importance * TOLERATED / np.maximum(off, TOLERATED)
        middle = (weights * rows).sum(axis=1) / weights.sum(axis=1)
    return _losses(rows, middle, importance), middle


def _losses(rows: Floats, middle: Floats, importance: Floats) -> Floats:
    off = np.abs(rows - middle[:, None])
    loss = np.where(off <= TOLERATED, off**2 / 2, TOLERATED * (off - TOLERATED / 2))
    total: Floats = (importance * loss).sum(axis=1)
    return total
