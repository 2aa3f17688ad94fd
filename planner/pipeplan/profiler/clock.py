"""Time intervals on a device, and what to say of repeated ones."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Measures calls. On an accelerator a time is known only after `settle`, so that `measure` returns a handle."""

    how: str
    """What is measured, as part of a sentence."""

    def measure(self, call: Callable[[], None]) -> Callable[[], float]:
        """Run `call`; the result gives its time in seconds, once `settle` has been called."""

    def settle(self) -> None:
        """Wait until all that was measured has run."""


class CPUClock:
    """The time that this thread computes (one thread), else wall-clock time.

    With one thread both passes run on the calling thread; its own time leaves out what other processes take. What they
    slow it by, through caches, memory and the clock, it has in it; waiting for a core it has not, also where the others
    belong to what is measured (`processes`): for that the planner knows how many cores a cluster's workers share.
    """

    def __init__(self, threads: int, processes: int = 1) -> None:
        own = threads == 1
        self._now = time.thread_time if own else time.perf_counter
        self.how = "CPU time of the one computing thread" if own else f"wall-clock time with {counted(threads)}"
        if processes > 1:
            self.how += f" in each of {processes} processes at the same time"

    def measure(self, call: Callable[[], None]) -> Callable[[], float]:
        """Run the call; its time is known at once."""
        start = self._now()
        call()
        elapsed = self._now() - start
        return lambda: elapsed

    def settle(self) -> None:
        """Nothing runs behind the caller's back."""


def counted(threads: int) -> str:
    """`1 thread`, `2 threads`."""
    return f"{threads} thread{'' if threads == 1 else 's'}"


class CUDAClock:
    """Device events around the kernels of a call."""

    how = "device events"

    def measure(self, call: Callable[[], None]) -> Callable[[], float]:
        """Record events around what the call enqueues."""
        start: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        call()
        end.record()
        return lambda: float(start.elapsed_time(end)) / 1e3

    def settle(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize()


def median(times: Sequence[float]) -> float:
    """The median, in the unit of the times."""
    return statistics.median(times)


def spread(times: Sequence[float]) -> float:
    """The interquartile range, in the unit of the times; 0 for a single one."""
    if len(times) < 2:
        return 0.0
    low, _, high = statistics.quantiles(times, n=4, method="inclusive")
    return high - low
