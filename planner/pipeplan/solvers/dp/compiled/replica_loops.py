"""The numbers of replicas with which a stage is fast enough: the scalar form of `replicas`, which has the formulas."""

from __future__ import annotations

import math

import numpy as np

from pipeplan.problem.cuts import Floats
from pipeplan.solvers.dp.compiled.jit import compiled
from pipeplan.solvers.dp.terms.replicas import ROUNDING

_PASSES = 4
"""Each of the two sums can move a number into its second interval once."""


@compiled
def least_allowed(intervals: Floats, level: int, at_least: float, only: int) -> float:
    """The smallest allowed whole number from `at_least` on; infinite where there is none.

    `intervals` has low1, high1, low2 and high2 by level, for each of the two sums. `only` is the one number that is
    allowed besides, or 0.
    """
    count = float(np.ceil(at_least - ROUNDING))
    if only > 0:
        count = max(count, float(only))
    for _ in range(_PASSES):
        before = count
        for which in range(2):
            first = max(count, intervals[level, which, 0])
            if first <= intervals[level, which, 1]:
                count = first
                continue
            second = max(count, intervals[level, which, 2])
            count = second if second <= intervals[level, which, 3] else math.inf
        if count == before:
            break
    return count if only == 0 or count == only else math.inf


@compiled
def fill_intervals(
    intervals: Floats,
    level: int,
    work: float,
    transmit: float,
    latency: float,
    within: float,
    overlap: float,
    accumulate: int,
) -> None:
    """Write what `least_allowed` reads at a level, for a stage's work on one worker and its gradients' way."""
    exposed = 1.0 - overlap
    for which in range(2):
        of_compute, of_sync = (1.0, exposed) if which == 0 else (exposed, 1.0)
        low1, high1, low2, high2 = _intervals(
            of_compute * work, of_sync * transmit, of_sync * latency, within, accumulate
        )
        intervals[level, which, 0], intervals[level, which, 1] = low1, high1
        intervals[level, which, 2], intervals[level, which, 3] = low2, high2


@compiled
def _intervals(
    work: float, transmit: float, latency: float, within: float, accumulate: int
) -> tuple[float, float, float, float]:
    """The whole numbers r with work / r + s(r) ≤ threshold, as two intervals."""
    if latency == 0.0 and transmit == 0.0:
        return max(1.0, _up(work / within)), math.inf, math.inf, -math.inf
    if accumulate == 0:
        return _solve(within - 2 * latency, -(work + 2 * transmit - 2 * latency), 2 * transmit)
    linear = within - (2 * transmit - 2 * latency) / accumulate
    return _solve(-2 * latency / accumulate, linear, 2 * transmit / accumulate - work)


@compiled
def _solve(square: float, linear: float, constant: float) -> tuple[float, float, float, float]:
    """The whole numbers r ≥ 1 with square·r² + linear·r + constant ≥ 0, as two intervals."""
    low1, high1, low2, high2 = 1.0, -1.0, math.inf, -math.inf
    discriminant = linear * linear - 4 * square * constant
    if square == 0.0:
        # A straight line is not negative from its zero on, up to it, everywhere, or nowhere.
        if linear > 0:
            low1, high1 = -constant / linear, math.inf
        elif linear < 0:
            high1 = -constant / linear
        elif constant >= 0:
            high1 = math.inf
    elif discriminant >= 0:
        # The numerically stable pair of roots: q/a and c/q with q = -(b + sign(b)·root)/2.
        q = -0.5 * (linear + math.copysign(math.sqrt(discriminant), linear))
        one, other = q / square, constant / q if q != 0.0 else 0.0
        low, high = min(one, other), max(one, other)
        if square > 0:
            high1, low2, high2 = low, high, math.inf
        else:
            low1, high1 = low, high
    elif square > 0:
        high1 = math.inf
    return max(1.0, _up(low1)), float(np.floor(high1 * (1 + ROUNDING))), max(1.0, _up(low2)), high2


@compiled
def _up(value: float) -> float:
    return float(np.ceil(value * (1 - ROUNDING)))
