"""Medians, spreads, and clocks that run what they measure."""

from __future__ import annotations

import time
from statistics import median

import pytest

from pipeplan.profiler.clock import CPUClock, interquartile_range


def test_median_and_spread() -> None:
    assert median([3.0, 1.0, 2.0]) == 2.0
    assert interquartile_range([1.0, 2.0, 3.0, 4.0, 5.0]) == 2.0
    assert interquartile_range([1.0]) == 0.0


@pytest.mark.parametrize("threads", [1, 4])
def test_clock_runs_the_call_once(threads: int) -> None:
    calls: list[int] = []
    taken = CPUClock(threads).measure(lambda: calls.append(1))
    assert calls == [1]
    assert taken() >= 0.0


@pytest.mark.parametrize("processes", [1, 3])
def test_one_thread_is_not_charged_for_waiting(processes: int) -> None:
    taken = CPUClock(1, processes).measure(lambda: time.sleep(0.05))
    assert taken() < 0.04
    assert CPUClock(2, processes).measure(lambda: time.sleep(0.05))() >= 0.05
