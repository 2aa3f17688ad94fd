"""A latency and a bandwidth from times of transfers of several sizes.

Every operation of the cost model takes starts · latency + bytes / bandwidth. Errors of times are relative: one measured
over four decades is fitted in its logarithm, or the largest size alone would decide. Huber's loss (Huber, Robust
estimation of a location parameter, 1964) keeps a size at which a protocol changes, or at which somebody else had the
machine, from pulling the rest with it. Real links are often faster in the middle than the sum of the two says, as one
hides behind the other. Pipelines send what is large, so that larger sizes count more, up to ten times.
"""

from __future__ import annotations

from collections.abc import Sequence
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


def fit(points: Sequence[Point]) -> Fit:
    """The latency and bandwidth closest to all points. Two sizes at least, each with a time above 0."""
    starts, size, seconds = (
        np.array([getattr(point, name) for point in points]) for name in ("starts", "bytes", "seconds")
    )
    weights = np.maximum(LEAST_WEIGHT, np.sqrt(size / size.max()))
    # With q = latency · bandwidth, log t = log(starts q + bytes) - log bandwidth: for a given q only a location is
    # left to find, and q is one number, searched between far less than any size and far more.
    low, high = np.log(size.min() * 1e-3), np.log(size.max() * 1e3)
    best = 0.0
    for _ in range(4):
        found = [
            (*_location(np.log(seconds) - np.log(starts * np.exp(q) + size), weights), q)
            for q in np.linspace(low, high, _SHARES)
        ]
        _, best, at = min(found, key=lambda one: one[0])
        step = (high - low) / (_SHARES - 1)
        low, high = at - step, at + step
    bandwidth = float(np.exp(-best))
    result = Fit(float(np.exp(at)) / bandwidth, bandwidth, 0.0, 0.0)
    off = np.array([abs(result.seconds(point) / point.seconds - 1.0) for point in points])
    return Fit(result.latency_s, bandwidth, float(np.median(off)), float(off.max()))


def _location(values: Floats, importance: Floats) -> tuple[float, float]:
    """(Huber's loss there, the location with the least of it), by weights that are found again from what is left."""
    middle = float(np.average(values, weights=importance))
    for _ in range(_ROUNDS):
        off = np.abs(values - middle)
        moved = float(np.average(values, weights=importance * TOLERATED / np.maximum(off, TOLERATED)))
        if abs(moved - middle) < 1e-12:
            break
        middle = moved
    off = np.abs(values - middle)
    loss = np.where(off <= TOLERATED, off**2 / 2, TOLERATED * (off - TOLERATED / 2))
    return float((importance * loss).sum()), middle
