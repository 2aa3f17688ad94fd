"""The numbers of replicas for which a stage is fast enough: the stage times of the cost model, solved for replicas.

With compute c = work / r, synchronisation s(r) and an exposed share x, the time of a stage is max(c + x·s, s + x·c).
Each of the two sums is at most T if a quadratic in r is at least 0, so the solutions are the whole numbers in one or
two intervals. With one synchronisation per group of r minibatches, s(r) = 2 (r-1)/r² · w/B + 2 (r-1)/r · α. With one
synchronisation per `accumulate` minibatches, s(r) = (2 (r-1)/r · w/B + 2 (r-1) · α) / accumulate.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

# Relative rounding error within which a root counts as a whole number.
ROUNDING = 1e-12


# Upper end of a first interval that is unbounded for all stages. There is no second interval then.
EVERYTHING: Floats = np.full(1, np.inf)


@dataclass(frozen=True)
class ReplicaIntervals:
    """The allowed numbers of replicas r: low1 ≤ r ≤ high1 or low2 ≤ r ≤ high2, for each of the two sums."""

    low1: tuple[Floats, Floats]
    high1: tuple[Floats, Floats]
    low2: tuple[Floats, Floats]
    high2: tuple[Floats, Floats]
    only: int | None = None
    """If given, the only number that is allowed within the intervals."""

    def take(self, rows: NDArray[np.intp]) -> ReplicaIntervals:
        """The intervals of the selected stages, by level."""

        def selected(of_sums: tuple[Floats, Floats]) -> tuple[Floats, Floats]:
            first, second = (one if one is EVERYTHING else one[:, rows] for one in of_sums)
            return first, second

        low1, high1, low2, high2 = map(selected, (self.low1, self.high1, self.low2, self.high2))
        return ReplicaIntervals(low1, high1, low2, high2, self.only)

    def least(self, at_least: Floats, rows: tuple[NDArray[np.intp], ...] | None = None) -> Floats:
        """The smallest allowed whole number from `at_least` on, by stage; infinite if there is none.

        `rows` has the stage's index for every entry of `at_least`; None if the entries correspond to the stages.
        """
        count = np.ceil(at_least - ROUNDING)
        if self.only is not None:
            count = np.maximum(count, self.only)
        # Each sum can move the number into its second interval once. If there are only lower limits, one pass is
        # enough.
        for _ in range(1 if self.high1[0] is EVERYTHING else 4):
            before = count
            for low1, high1, low2, high2 in zip(self.low1, self.high1, self.low2, self.high2, strict=True):
                if high1 is EVERYTHING:
                    count = np.maximum(count, low1 if rows is None else low1[rows])
                    continue
                if rows is not None:
                    low1, high1, low2, high2 = low1[rows], high1[rows], low2[rows], high2[rows]
                first, second = np.maximum(count, low1), np.maximum(count, low2)
                count = np.where(first <= high1, first, np.where(second <= high2, second, np.inf))
            if np.array_equal(before, count):
                break
        return count if self.only is None else np.where(count == self.only, count, np.inf)


def allowed_replicas(
    work_s: Floats,
    size: Floats,
    bandwidth: Floats,
    latency_s: Floats,
    threshold: float,
    *,
    overlap: float,
    accumulate: int | None = None,
) -> ReplicaIntervals:
    """The numbers of replicas that keep a stage within the threshold.

    `work_s` is the time of one minibatch on one worker; `size` is the bytes of gradients, 0 in inference. All arguments
    broadcast to the shape of `work_s`.
    """
    exposed = 1.0 - overlap
    transmit, latency = np.asarray(size / bandwidth), np.asarray(latency_s)
    rows = [
        _intervals(of_compute * work_s, of_sync * transmit, of_sync * latency, threshold, accumulate)
        for of_compute, of_sync in ((1.0, exposed), (exposed, 1.0))
    ]
    low1, high1, low2, high2 = zip(*rows, strict=True)
    return ReplicaIntervals(low1, high1, low2, high2)


def _intervals(
    work: Floats, transmit: Floats, latency: Floats, threshold: float, accumulate: int | None
) -> tuple[Floats, Floats, Floats, Floats]:
    """The whole numbers r with work / r + s(r) ≤ threshold, as two intervals."""
    if not latency.any() and not transmit.any():
        # In most calls the stages only compute.
        return np.maximum(1.0, _up(work / threshold)), EVERYTHING, EVERYTHING, EVERYTHING
    if accumulate is None:
        # The inequality times r²: (T - 2α) r² - (work + 2t - 2α) r + 2t ≥ 0.
        square = threshold - 2 * latency + np.zeros_like(work)
        linear, constant = -(work + 2 * transmit - 2 * latency), 2 * transmit + np.zeros_like(work)
    else:
        # The inequality times r: -2α/M r² + (T - (2t - 2α)/M) r - (work - 2t/M) ≥ 0.
        square = -2 * latency / accumulate + np.zeros_like(work)
        linear = threshold - (2 * transmit - 2 * latency) / accumulate
        constant = 2 * transmit / accumulate - work
    return _solve(square, linear, constant)


def _solve(square: Floats, linear: Floats, constant: Floats) -> tuple[Floats, Floats, Floats, Floats]:
    """The whole numbers r ≥ 1 with square·r² + linear·r + constant ≥ 0, as two intervals."""
    none = np.full_like(linear, -np.inf)
    with np.errstate(divide="ignore", invalid="ignore"):
        discriminant = linear * linear - 4 * square * constant
        root = np.sqrt(np.maximum(discriminant, 0.0))
        # The numerically stable pair of roots: q/a and c/q with q = -(b + sign(b)·root)/2.
        q = -0.5 * (linear + np.copysign(root, linear))
        one, other = q / square, constant / q
        one, other = np.where(square == 0, np.inf, one), np.where(q == 0, 0.0, other)
        low, high = np.fmin(one, other), np.fmax(one, other)
        # A straight line is at least 0 from its zero on (rising), up to its zero (falling), everywhere, or nowhere.
        zero = np.where(linear != 0, -constant / linear, np.nan)
    line = square == 0
    rising, falling = line & (linear > 0), line & (linear < 0)
    flat = line & (linear == 0)
    above = (square > 0) & (discriminant >= 0)
    always = ((square > 0) & (discriminant < 0)) | (flat & (constant >= 0))
    between = (square < 0) & (discriminant >= 0)
    low1 = np.where(rising, zero, np.where(between, low, 1.0))
    high1 = np.where(
        rising | always, np.inf, np.where(falling, zero, np.where(above, low, np.where(between, high, -1)))
    )
    low2, high2 = np.where(above, high, np.inf), np.where(above, np.inf, none)
    return np.maximum(1.0, _up(low1)), _down(high1), np.maximum(1.0, _up(low2)), high2


def _up(value: Floats) -> Floats:
    rounded: Floats = np.ceil(value * (1 - ROUNDING))
    return rounded


def _down(value: Floats) -> Floats:
    rounded: Floats = np.floor(value * (1 + ROUNDING))
    return rounded
