"""Medians, spreads, and clocks that run what they measure."""

from __future__ import annotations

import pytest
import torch

from pipeplan.profiler.clock import CPUClock, median, spread
from pipeplan.profiler.overhead import measure_overhead


def test_median_and_spread() -> None:
    assert median([3.0, 1.0, 2.0]) == 2.0
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0]) == 2.0
    assert spread([1.0]) == 0.0


@pytest.mark.parametrize("threads", [1, 4])
def test_clock_runs_the_call_once(threads: int) -> None:
    calls: list[int] = []
    taken = CPUClock(threads).measure(lambda: calls.append(1))
    assert calls == [1]
    assert taken() >= 0.0


def test_overhead_is_measured() -> None:
    overhead = measure_overhead(CPUClock(1), torch.device("cpu"))
    assert overhead.forward_s >= 0.0
    assert overhead.backward_s > 0.0
