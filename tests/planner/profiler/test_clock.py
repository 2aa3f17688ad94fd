"""Clocks, spreads, when there are enough passes, and what is said of spread and drift."""

from __future__ import annotations

import random
import statistics
import time

import pytest

from pipeplan.profiler.clock import (
    BRIEF,
    MIN_JUDGED_PASSES,
    THOROUGH,
    CPUClock,
    Samples,
    interquartile_range,
    is_precise_enough,
    relative_drift,
    sample_notes,
    standard_error,
    uncertainty,
)


def test_one_thread_is_not_charged_for_waiting() -> None:
    calls: list[int] = []

    def wait() -> None:
        calls.append(1)
        time.sleep(0.05)

    assert 0.0 <= CPUClock(1).measure(wait)() < 0.04
    assert CPUClock(2).measure(wait)() >= 0.05
    assert len(calls) == 2


def noisy(count: int, middle: float, share: float, seed: int = 0) -> list[float]:
    chance = random.Random(seed)
    return [middle * (1 + chance.gauss(0, share)) for _ in range(count)]


def samples(**layers: list[float]) -> Samples:
    return Samples(forward=dict(layers), backward={name: [0.0] * len(one) for name, one in layers.items()})


def test_spread_and_the_standard_error_is_how_far_medians_lie_apart() -> None:
    """Against the deviation of medians over many repetitions of the same measurement."""
    assert interquartile_range([1.0, 2.0, 3.0, 4.0, 5.0]) == 2.0
    assert interquartile_range([1.0]) == 0.0
    repeated = [noisy(25, 1.0, 0.1, seed) for seed in range(400)]
    apart = statistics.pstdev(sorted(times)[12] for times in repeated)
    assert statistics.mean(map(standard_error, repeated)) == pytest.approx(apart, rel=0.15)


def test_passes_go_on_until_the_spread_is_small() -> None:
    assert not is_precise_enough(samples(a=[1.0] * (MIN_JUDGED_PASSES - 1)), THOROUGH)
    assert is_precise_enough(samples(a=[1.0] * MIN_JUDGED_PASSES), THOROUGH)
    assert not is_precise_enough(samples(a=noisy(5, 1.0, 0.2)), THOROUGH)
    assert is_precise_enough(samples(a=noisy(2000, 1.0, 0.2)), THOROUGH)
    # Layers that hardly count are not waited for, unless they stand for many.
    found = samples(large=[100.0] * 9, small=noisy(9, 0.5, 0.9))
    assert is_precise_enough(found, THOROUGH)
    assert not is_precise_enough(samples(large=[1.0] * 9, small=noisy(9, 0.5, 0.9)), THOROUGH)
    found.weights = {"small": 100}
    assert uncertainty(found)[2] == "small"
    assert not is_precise_enough(found, THOROUGH)
    assert found.totals(found.forward)[0] == 100.0 + 100 * found.forward["small"][0]


def test_drift_is_told_from_chance() -> None:
    assert relative_drift([1.0] * 30) is None
    assert relative_drift(noisy(30, 1.0, 0.02)) is None
    slower = [one * (1 + 0.2 * index / 29) for index, one in enumerate(noisy(30, 1.0, 0.02))]
    assert relative_drift(slower) == pytest.approx(0.13, abs=0.03)
    assert relative_drift(list(reversed(slower))) == pytest.approx(-0.12, abs=0.03)
    assert relative_drift([1.0, 2.0, 3.0]) is None
    # A few passes that something disturbed are no drift.
    assert relative_drift([1.0] * 26 + [9.0] * 4) is None


def test_notes_say_what_remains_and_a_brief_measurement_aims_lower() -> None:
    assert sample_notes(samples(a=[1.0] * 9), THOROUGH) == ()
    wide = samples(a=noisy(9, 1.0, 0.3))
    (spread,), (brief,) = sample_notes(wide, THOROUGH), sample_notes(wide, BRIEF)
    assert "spread is larger than aimed at: after 9 passes" in spread
    assert brief.endswith("(aim: 2% and 6%, standard error)")
    (moved,) = sample_notes(samples(a=[1.0] * 100 + [1.2] * 100), THOROUGH)[:1]
    assert "the machine became 20% slower while it measured" in moved
    found = samples(a=noisy(60, 1.0, 0.1))
    assert (is_precise_enough(found, THOROUGH), is_precise_enough(found, BRIEF)) == (False, True)
    assert sample_notes(found, BRIEF) == ()
