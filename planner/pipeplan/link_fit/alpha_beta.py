"""Fits a latency and a bandwidth to measured transfer times of several sizes, for a pair or group of workers.

Every operation of the cost model takes starts · latency + bytes / bandwidth. Times span four decades and their errors
are relative, so the logarithms are fitted. Otherwise the largest size alone would decide. Huber's loss (Huber, Robust
estimation of a location parameter, 1964) limits the influence of outliers, such as a size at which a protocol changes
or at which other programs used the machine. Real links are often faster at medium sizes than the formula, because
latency and transfer overlap. Pipelines send large tensors, so larger sizes have up to ten times the weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeplan.cost import formulas
from pipeplan.link_fit.find_levels import Nesting

Floats = NDArray[np.float64]
TOLERATED = 0.1
"""Relative error beyond which the loss grows linearly instead of quadratically."""
LEAST_WEIGHT = 0.1
"""Smallest weight of a size. The largest size has weight 1, and a size with a quarter of its bytes has weight 1/2."""
_ROUNDS = 30
_SHARES = 97
MESSAGE, TOGETHER, RING = "message", "together", "ring"
"""Kinds of measurements: one pair exchanges messages in both directions, several pairs do so at once, or a group runs
an all-reduce."""


@dataclass(frozen=True)
class TransferTime:
    """One measured time of a transfer."""

    starts: float
    """Number of latencies that the time includes."""
    bytes: float
    """Bytes that cross the slowest link."""
    seconds: float

    @staticmethod
    def message(size: float, seconds: float) -> TransferTime:
        """The time of a message from one worker to another."""
        return TransferTime(1.0, size, seconds)

    @staticmethod
    def ring(members: int, size: float, seconds: float) -> TransferTime:
        """The time of an all-reduce, by the formula of the cost model."""
        starts = formulas.ring_allreduce_time(members, 0.0, 1.0, 1.0)
        return TransferTime(starts, formulas.ring_allreduce_time(members, size, 1.0, 0.0), seconds)


@dataclass(frozen=True)
class AlphaBetaFit:
    """A fitted latency and bandwidth, with the errors of the fit."""

    latency_s: float
    bandwidth: float
    """Bandwidth in bytes/s."""
    error: float
    """Median relative error of the formula."""
    worst: float
    """Largest relative error of the formula."""

    def seconds(self, point: TransferTime) -> float:
        """The time that the fitted formula gives for a transfer."""
        return point.starts * self.latency_s + point.bytes / self.bandwidth


def fit_alpha_beta(points: Sequence[TransferTime], latency_s: float | None = None) -> AlphaBetaFit:
    """Fit a latency and a bandwidth to transfer times, or only a bandwidth if a latency is given.

    There must be at least two sizes, each with a time above 0.
    """
    starts, size, seconds = (
        np.array([getattr(point, name) for point in points]) for name in ("starts", "bytes", "seconds")
    )
    weights = np.maximum(LEAST_WEIGHT, np.sqrt(size / size.max()))

    def with_product(product: Floats) -> tuple[Floats, Floats]:
        # With latency · bandwidth = q, log t = log(starts q + bytes) - log bandwidth, so only a location is fitted.
        return _locations(np.log(seconds) - np.log(np.outer(product, starts) + size), weights)

    def with_bandwidth(bandwidth: Floats) -> tuple[Floats, Floats]:
        expected = starts * latency_s + np.outer(1.0 / bandwidth, size)
        return _losses(np.log(seconds) - np.log(expected), np.zeros(len(bandwidth)), weights), -np.log(bandwidth)

    if latency_s is None:
        product, bandwidth = _least(with_product, size.min() * 1e-3, size.max() * 1e3)
        result = AlphaBetaFit(product / bandwidth, bandwidth, 0.0, 0.0)
    else:
        rates = size / seconds
        _, bandwidth = _least(with_bandwidth, rates.min() / 2, rates.max() * 100)
        result = AlphaBetaFit(latency_s, bandwidth, 0.0, 0.0)
    errors = np.array([abs(result.seconds(point) / point.seconds - 1.0) for point in points])
    return AlphaBetaFit(result.latency_s, bandwidth, float(np.median(errors)), float(errors.max()))


def _least(losses: Callable[[Floats], tuple[Floats, Floats]], low: float, high: float) -> tuple[float, float]:
    """(number with the smallest loss, its bandwidth), by a grid search that is refined three times."""
    start, stop = np.log(low), np.log(high)
    for _ in range(4):
        tried = np.linspace(start, stop, _SHARES)
        loss, slowness = losses(np.exp(tried))
        best = int(loss.argmin())
        step = (stop - start) / (_SHARES - 1)
        start, stop = tried[best] - step, tried[best] + step
    with np.errstate(over="ignore"):  # impossible times give an infinite bandwidth
        return float(np.exp(tried[best])), float(np.exp(-slowness[best]))


def _locations(rows: Floats, importance: Floats) -> tuple[Floats, Floats]:
    """(Huber's loss, location that minimises it) for every row, by iteratively reweighted least squares."""
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


@dataclass(frozen=True)
class LinkSeries:
    """Times of one operation for several sizes."""

    kind: str
    level: int
    """Index of the level in the nesting."""
    ranks: tuple[int, ...]
    """The pair that exchanges messages, or the group of the all-reduce."""
    way: str
    """Transport: `Gloo` or `NCCL`."""
    samples: tuple[tuple[int, float], ...]
    """(bytes, median seconds)."""

    @property
    def points(self) -> list[TransferTime]:
        """The samples as points for a fit."""
        if self.kind == RING:
            return [TransferTime.ring(len(self.ranks), size, seconds) for size, seconds in self.samples]
        return [TransferTime.message(size, seconds) for size, seconds in self.samples]


def fit_series(series: Sequence[LinkSeries], latency_s: float | None = None) -> AlphaBetaFit:
    """Fit one latency and bandwidth to several series, or only a bandwidth if a latency is given."""
    return fit_alpha_beta([point for measured in series for point in measured.points], latency_s)


def fit_cards(series: Sequence[LinkSeries], nesting: Nesting, level: int) -> dict[tuple[int, int], AlphaBetaFit]:
    """Fits for pairs of components of a level whose workers all send at once, by the indices of the components.

    The time of a size is the time of the slowest pair of workers. The bytes of a size are the sum over all pairs.
    """
    home = {rank: number for number, ranks in enumerate(nesting.below(level)) for rank in ranks}
    teams: dict[tuple[int, int], list[LinkSeries]] = {}
    for measured in series:
        if (measured.kind, measured.level) == (TOGETHER, level):
            first, last = sorted(home[rank] for rank in measured.ranks)
            teams.setdefault((first, last), []).append(measured)
    fits = {}
    for pair, members in teams.items():
        times: dict[int, list[float]] = {}
        for member in members:
            for size, seconds in member.samples:
                times.setdefault(size, []).append(seconds)
        points = [TransferTime.message(size * len(each), max(each)) for size, each in times.items()]
        fits[pair] = fit_alpha_beta(points)
    return fits
