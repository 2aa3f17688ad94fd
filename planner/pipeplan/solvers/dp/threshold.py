"""Bisection: from a search that answers "is there a pipeline within T?" to the smallest such T.

A positive answer comes with a pipeline whose own step time is the new upper end, so the interval closes in jumps. A
last search just below the best pipeline's step time proves that there is no better one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from pipeplan.cost import formulas
from pipeplan.solvers.dp.budget import OutOfTime

PRECISION = 1e-9
"""Relative difference below which step times of plans count as equal."""

_SLACK = 10 * formulas.ROUNDING

# If the ratio of the two ends is below this, the next search is right below the upper end.
_NARROW = 1.0003

# Number of searches in a row without a better result after which the next search is right below the best result,
# because that result is probably the smallest.
_IN_VAIN = 2

# Relative distance of the second search from the lower end. Each further step is four times as long, up to the longest.
_FIRST_STEP, _LONGEST_STEP = 1e-3, float("inf")

# The longest steps with a known result and without, if each search finds the smallest result. Such a search visits
# everything within its limit, so the limit must not be far above the optimum.
_LONGEST_WITH_KNOWN, _LONGEST_WITHOUT = 0.1, 0.05

# A search for batches first proves its best result to this relative distance, which is faster than a search right below
# the result.
_PROVEN_FIRST = 0.01

# If a known result is within the first distance of the lower end, it is proven at once. Otherwise the second number is
# the first step. Searches near the lower end take as long as those a few percent above, so small steps do not pay.
_CLOSE, _STEP_WITH_KNOWN = 0.05, 0.02

Found = TypeVar("Found")


@dataclass
class BisectionResult(Generic[Found]):
    """The interval that contains the optimum: the optimum is at least `low`, and `best` reaches `high`."""

    low: float
    high: float = float("inf")
    best: Found | None = None
    finished: bool = True
    """Whether the search ran to its end, without a deadline or an interrupt before."""
    interrupted: bool = False
    gap: float = 0.0
    """Relative distance between the two ends at which the search may stop; 0 stands for `PRECISION`."""
    useful: float = float("inf")
    """Value of the lower end at which the search may stop."""

    @property
    def closed(self) -> bool:
        """Whether the two ends are close enough, or nothing useful is left."""
        return self.low >= self.useful or self.high <= self.low * (1 + max(2 * PRECISION, self.gap))


@dataclass(frozen=True)
class NearLeast(Generic[Found]):
    """The functions by which a search continues from a known result that is probably the smallest."""

    find: Callable[[float], tuple[float, Found] | None]
    """The search function with less time; it may raise `OutOfTime`."""
    improve: Callable[[tuple[float, Found]], tuple[float, Found]]
    """A quick function that turns a result into one that is at least as good."""


def least_threshold(
    find: Callable[[float], tuple[float, Found] | None],
    low: float,
    most: float,
    known: tuple[float, Found] | None = None,
    gap: float = 0.0,
    report: Callable[[float, float], None] = lambda low, high: None,
    *,
    near: NearLeast[Found] | None = None,
    useful: float = float("inf"),
    finds_least: bool = False,
    first_step: float = PRECISION,
) -> BisectionResult[Found]:
    """The smallest threshold above `low` for which `find` finds a result; `find` must be monotonic.

    `find(T)` returns None, or a step time of at most T and the result that reaches it. Above `most`, its answer does
    not change. `known` is an earlier result, and `gap` the relative distance that is close enough. With `near`, the
    known result is probably the smallest, so the first search is right below it. The search may stop if no limit below
    `useful` is left. With `finds_least`, each result of `find` is the smallest that exists. A deadline or Ctrl-C ends
    the search with the interval so far. `report` is called with both ends of the interval as it narrows. The first
    search is at a relative distance of `first_step` above `low`, unless `finds_least` is set.
    """
    interval = BisectionResult[Found](low, gap=gap, useful=useful)
    if finds_least:
        find = _closing(find, interval)
    if known is not None:
        interval.high, interval.best = known
    try:
        if near is not None:
            _close_from_above(near, interval, report)
        if finds_least:
            if known is None:
                _bracket(find, interval, most, _FIRST_STEP, _LONGEST_WITHOUT)
            elif known[0] > interval.low * (1 + _CLOSE) * (1 + PRECISION):
                _bracket(find, interval, most, _STEP_WITH_KNOWN, _LONGEST_WITH_KNOWN)
        else:
            _bracket(find, interval, most, first_step, _LONGEST_STEP)
        report(interval.low, interval.high)
        _close(find, interval, report, finds_least=finds_least)
    except OutOfTime:
        interval.finished = False
    except KeyboardInterrupt:
        interval.finished, interval.interrupted = False, True
    return interval


def least_near(
    find: Callable[[float], tuple[float, Found] | None],
    low: float,
    limit: float,
    report: Callable[[float, float], None] = lambda low, high: None,
    gap: float = 0.0,
    *,
    finds_least: bool = False,
) -> BisectionResult[Found]:
    """A variant of `least_threshold` if the smallest threshold is probably just below `limit`; larger thresholds do not
    count.

    If nothing is found within the limit, the limit becomes the lower end. If a result is found, a search right below it
    follows, and a bisection only if that search succeeds.
    """
    interval = BisectionResult[Found](low * (1 - PRECISION), gap=gap)
    try:
        if not _search_below(find, interval, limit):
            interval.low = max(interval.low, limit)
            return interval
        if finds_least:
            interval.low = interval.high
        report(interval.low, interval.high)
        if not interval.closed:
            _search_below(find, interval, interval.high * (1 - PRECISION))
    except OutOfTime:
        interval.finished = False
    except KeyboardInterrupt:
        interval.finished, interval.interrupted = False, True
    if interval.closed or not interval.finished or interval.best is None:
        return interval
    return least_threshold(find, interval.low, limit, (interval.high, interval.best), gap, report)


def _close_from_above(
    near: NearLeast[Found], interval: BisectionResult[Found], report: Callable[[float, float], None]
) -> None:
    """Search right below the best result, and then below each better result, while there is time."""
    try:
        while not interval.closed and interval.best is not None:
            if _search_below(near.find, interval, interval.high * _right_below(interval.gap)):
                assert interval.best is not None
                interval.high, interval.best = near.improve((interval.high, interval.best))
            report(interval.low, interval.high)
    except OutOfTime:
        return


def _close(
    find: Callable[[float], tuple[float, Found] | None],
    interval: BisectionResult[Found],
    report: Callable[[float, float], None],
    *,
    finds_least: bool,
) -> None:
    """Search within the interval until its ends are close enough."""
    in_vain, most_in_vain = 0, _IN_VAIN
    while not interval.closed and interval.best is not None:
        before = interval.high
        if finds_least:
            far = interval.high > interval.low * (1 + _PROVEN_FIRST) * (1 + PRECISION)
            below = 1 / (1 + _PROVEN_FIRST) if far else 1 - PRECISION
            _search_below(find, interval, interval.high * below)
        elif in_vain == most_in_vain:
            _search_below(find, interval, interval.high * _right_below(interval.gap))
            # If that search finds a result, allow more searches in vain before the next search of this kind.
            most_in_vain *= 2
        else:
            _narrow(find, interval)
        in_vain = in_vain + 1 if interval.high == before else 0
        report(interval.low, interval.high)


def _right_below(gap: float) -> float:
    """Factor on a result's step time: if no result is found below the product, the result is close enough."""
    return min(1 - PRECISION, (1 + PRECISION) / (1 + gap))


def _closing(
    find: Callable[[float], tuple[float, Found] | None], interval: BisectionResult[Found]
) -> Callable[[float], tuple[float, Found] | None]:
    """The search function for results that are the smallest that exist, so that each result ends the bisection."""

    def found(threshold: float) -> tuple[float, Found] | None:
        result = find(threshold)
        if result is not None and result[0] < interval.high:
            interval.low = max(interval.low, result[0])
        return result

    return found


def _search_below(
    find: Callable[[float], tuple[float, Found] | None], interval: BisectionResult[Found], threshold: float
) -> bool:
    """Search once and narrow the interval. Returns whether a better result was found."""
    result = find(threshold)
    if result is None:
        interval.low = max(interval.low, threshold)
        return False
    if result[0] < interval.high:
        interval.high, interval.best = result
    elif threshold >= interval.high * (1 - _SLACK):
        # Depths are rounded with a tolerance, so a plan may miss the threshold. Such a plan is no better.
        interval.low = max(interval.low, threshold)
        return False
    return True


def _bracket(
    find: Callable[[float], tuple[float, Found] | None],
    interval: BisectionResult[Found],
    most: float,
    first: float,
    longest: float,
) -> None:
    """Find an upper end of the interval.

    The optimum is often at the lower end, and searches near it are the fastest. The relative steps upwards begin with
    `first`, and each is four times the previous one, up to `longest`. A known upper end is close enough if it is within
    twice the longest step.
    """
    growth = first
    while interval.best is None or (interval.low * (1 + 2 * growth) < interval.high and not interval.closed):
        threshold = min(interval.low * (1 + growth), most) if interval.low > 0 else most
        if _search_below(find, interval, threshold) or threshold >= most:
            return
        growth = min(max(_FIRST_STEP, 4 * growth), longest)


def _narrow(find: Callable[[float], tuple[float, Found] | None], interval: BisectionResult[Found]) -> None:
    """Narrow the interval by a search just below its upper end or in its middle."""
    below = interval.high * (1 - PRECISION)
    if interval.high > interval.low * _NARROW:
        below = (interval.low * interval.high) ** 0.5 if interval.low > 0 else interval.high / 4
    before = interval.high
    if _search_below(find, interval, below) and interval.high > interval.low * _NARROW:
        return
    if interval.high < before and interval.high > interval.low * (1 + 1e-6):
        # The plan was much better: bisect once, so that the search does not proceed in many small steps.
        _search_below(find, interval, (interval.low * interval.high) ** 0.5)
