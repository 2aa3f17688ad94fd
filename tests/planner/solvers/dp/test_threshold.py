"""Bisection with a search that finds the least that there is, or nothing."""

from __future__ import annotations

import pytest

from pipeplan.solvers.dp.budget import OutOfTime
from pipeplan.solvers.dp.threshold import PRECISION, BisectionResult, least_threshold


def _least(known: float, least: float, patience: float = float("inf")) -> tuple[BisectionResult[str], list[float]]:
    """The result from a known value, where the least is known to the search, and the limits that were searched.

    A search within more than `patience` takes too long.
    """
    limits: list[float] = []

    def find(limit: float) -> tuple[float, str] | None:
        limits.append(limit)
        if limit > patience:
            raise OutOfTime
        return (least, "least") if limit >= least else None

    return least_threshold(find, 1.0, 10.0, (known, "known"), finds_least=True), limits


@pytest.mark.parametrize(("known", "least"), [(1.05, 1.05), (1.05, 1.045), (1.05, 1.01), (1.0005, 1.0), (1.9, 1.3)])
def test_the_least_is_found_and_proven(known: float, least: float) -> None:
    result, _ = _least(known, least)
    assert result.finished
    assert result.high == least
    assert result.low >= least * (1 - 2 * PRECISION)
    assert result.best == ("least" if least < known else "known")


def test_the_best_is_proven_to_a_hundredth_before_it_is_proven_to_be_the_least() -> None:
    result, limits = _least(1.05, 1.05)
    assert limits[-2:] == [1.05 / 1.01, 1.05 * (1 - PRECISION)]
    result, _ = _least(1.05, 1.045, patience=1.041)
    assert not result.finished
    assert (result.high, result.best) == (1.05, "known")
    assert result.low == 1.05 / 1.01


def test_after_two_searches_in_vain_the_next_is_right_below_the_best() -> None:
    limits: list[float] = []

    def find(limit: float) -> tuple[float, str] | None:
        limits.append(limit)
        return None

    assert least_threshold(find, 1.0, 3.0, (3.0, "known")).closed
    # The steps upwards from the lower end come first.
    steps = [limit for limit in limits if limit < 1.5]
    assert limits[len(steps) + 2 :] == [3.0 * (1 - PRECISION)]


@pytest.mark.parametrize("step", [0.0, 1e-7, 1e-3, 0.1])
@pytest.mark.parametrize("least", [1.0, 1.0001, 1.3, 2.9])
def test_a_search_that_finds_something_within_its_limit_comes_to_the_least(least: float, step: float) -> None:
    def find(limit: float) -> tuple[float, float] | None:
        if limit < least:
            return None
        found = max(least, limit * (1 - step))
        return found, found

    result = least_threshold(find, 1.0, 4.0, (3.5, 3.5))
    assert result.finished
    assert result.high == pytest.approx(least, rel=1e-8)
    assert result.low >= result.high * (1 - 3 * PRECISION)
