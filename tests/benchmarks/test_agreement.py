"""Replays agree with the formulas: the samples of the benchmark `agreement.py`, fewer of them."""

from __future__ import annotations

import random
import statistics

import pytest
from agreement import difference, sample

PLANS = 12
"""Samples of each kind of plan."""

EXACT = [
    *((schedule, kind) for schedule in ("1f1b-stashing", "vertical-sync") for kind in ("straight", "balanced", "any")),
    *((schedule, "one stage") for schedule in ("1f1b-stashing", "vertical-sync")),
    ("2bw", "straight"),
]
CLOSE = [
    # Schedule, kind of plan, and what the replay may be faster and slower by, at most and in the median:
    # docs/cost-model.md says why. With a flush the formula is a lower bound.
    ("2bw", "one stage", 0.2, 0.001, 0.05),
    ("2bw", "any", 0.25, 0.001, 0.05),
    ("gpipe", "one stage", 1e-9, 0.4, 0.1),
    ("gpipe", "straight", 1e-9, 0.5, 0.25),
    ("gpipe", "balanced, replicas fall and divide M", 1e-9, 0.25, 0.1),
    ("gpipe", "any", 1e-9, 0.7, 0.2),
    ("1f1b-flush", "one stage", 1e-9, 0.4, 0.1),
    ("1f1b-flush", "straight", 1e-9, 0.15, 0.03),
    ("1f1b-flush", "balanced, replicas fall and divide M", 1e-9, 0.25, 0.1),
    ("1f1b-flush", "any", 1e-9, 0.5, 0.15),
]
LONG = [("2bw", "any"), ("gpipe", "balanced, replicas fall and divide M")]
"""Of these, the ones that take the longest beside others of their schedule and kind."""


def differences(schedule: str, kind: str, plans: int) -> list[float]:
    random_ = random.Random(7)
    return [difference(*sample(kind, schedule, random_)) for _ in range(plans)]


@pytest.mark.parametrize("plans", [4, pytest.param(PLANS, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("schedule", "kind"), EXACT)
def test_the_formula_is_exact(schedule: str, kind: str, plans: int) -> None:
    assert max(abs(share) for share in differences(schedule, kind, plans)) < 1e-3


@pytest.mark.parametrize(
    ("schedule", "kind", "faster", "slower", "median"),
    [pytest.param(*row, marks=pytest.mark.slow) if row[:2] in LONG else row for row in CLOSE],
)
def test_the_formula_is_close(schedule: str, kind: str, faster: float, slower: float, median: float) -> None:
    found = differences(schedule, kind, PLANS)
    assert min(found) > -faster
    assert max(found) < slower
    assert abs(statistics.median(found)) < median
