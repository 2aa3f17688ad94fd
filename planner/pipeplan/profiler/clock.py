"""Clocks that time calls on a device, and the precision of measured passes, which decides when to stop."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Any

import torch

LONGEST_LAYERS_SHARE = 0.9
"""The longest layers together take this share of the total time. They have a separate precision aim."""
MIN_JUDGED_PASSES = 5
"""Smallest number of passes from which the spread is computed."""
DRIFT_BOUND = 0.05
"""A larger relative change of the total time, from the first to the last third of the passes, is reported."""
DRIFT_STANDARD_ERRORS = 4.0
"""Number of standard errors that a change must exceed to count as drift."""
MIN_MEASURED_PASSES, MAX_MEASURED_PASSES = 3, 120
"""Smallest and largest number of measured passes, if the user does not give the number."""


class CPUClock:
    """CPU time of the calling thread if torch computes with one thread, else wall-clock time.

    `how` is the kind of time that the clock measures, phrased as part of a sentence.

    With one thread, forward and backward run on the calling thread, so its CPU time excludes other processes. CPU time
    includes the slowdown from shared caches, memory bandwidth and clock frequency. CPU time excludes waiting for a
    core. The planner accounts for such waits itself, because it knows how many cores a cluster's workers share.
    """

    def __init__(self, threads: int) -> None:
        own = threads == 1
        self._now = time.thread_time if own else time.perf_counter
        self.how = "CPU time of the one computing thread" if own else f"wall-clock time with {threads} threads"

    def measure(self, call: Callable[[], None]) -> Callable[[], float]:
        """Run `call`. The returned function gives its time in seconds once `settle` has been called."""
        start = self._now()
        call()
        elapsed = self._now() - start
        return lambda: elapsed

    def settle(self) -> None:
        """Do nothing: CPU calls have finished when they return."""


class CUDAClock:
    """Time between two CUDA events, recorded before and after the kernels of a call."""

    how = "device events"

    def measure(self, call: Callable[[], None]) -> Callable[[], float]:
        """Record events before and after the kernels that the call enqueues."""
        start: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        call()
        end.record()
        return lambda: float(start.elapsed_time(end)) / 1e3

    def settle(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize()


Clock = CPUClock | CUDAClock


def repeated_s(
    clock: Clock,
    call: Callable[[], None],
    least: int,
    most: float,
    budget_s: float,
    between: Callable[[], object] = lambda: None,
) -> float:
    """Median time of a call, in seconds, from `least` to `most` repetitions.

    After `least` repetitions, measuring stops when `budget_s` seconds have passed. `between` runs before each call and
    is not timed.
    """
    taken: list[Callable[[], float]] = []
    start = time.perf_counter()
    while len(taken) < least or (len(taken) < most and time.perf_counter() - start < budget_s):
        between()
        taken.append(clock.measure(call))
    clock.settle()
    return median([one() for one in taken])


def interquartile_range(times: Sequence[float]) -> float:
    """The interquartile range, in the unit of the times; 0 for a single time."""
    if len(times) < 2:
        return 0.0
    low, _, high = quantiles(times, n=4, method="inclusive")
    return high - low


@dataclass(frozen=True)
class Aim:
    """The precision aim for a minibatch size, if the number of passes is not given."""

    total: float
    """Largest standard error of the median total, as a share of the median."""
    layer: float
    """Largest standard error for each of the longest layers, as a share of the layer's time."""
    least_s: float
    """Shortest duration of the measured passes, so that changes of the machine's speed are noticed."""
    budget_s: float
    """Time limit of the measured passes."""


THOROUGH = Aim(0.01, 0.03, 1.0, 25.0)
BRIEF = Aim(0.02, 0.06, 0.25, 3.0)
"""The aim for additional sizes, which the user did not ask for."""


@dataclass
class Samples:
    """Times of the measured layers and of the whole model, in seconds, with one value for each pass."""

    weights: Mapping[str, int] = field(default_factory=dict)
    """Number of layers that a measured layer represents; 1 for a layer that is not listed."""
    forward: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    backward: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    whole_forward: list[float] = field(default_factory=list)
    whole_backward: list[float] = field(default_factory=list)
    whole_split: list[float] = field(default_factory=list)
    """Times of the backward pass in two parts, in a few passes only."""

    @property
    def passes(self) -> int:
        """Number of passes."""
        return len(next(iter(self.forward.values()), []))

    def totals(self, times_by_layer: Mapping[str, Sequence[float]]) -> list[float]:
        """The sum over all layers of the model, in each pass."""
        weighted = ([self.weights.get(name, 1) * time_s for time_s in times] for name, times in times_by_layer.items())
        return [sum(times) for times in zip(*weighted, strict=True)]

    def by_layer(self) -> dict[str, list[float]]:
        """Forward plus backward times of each layer that was run."""
        return {
            name: [a + b for a, b in zip(times, self.backward[name], strict=True)]
            for name, times in self.forward.items()
        }


def standard_error(times: Sequence[float]) -> float:
    """Relative standard error of the median: 1.2533 σ / (√n · median).

    σ is IQR / 1.349: the standard deviation of a normal distribution with the interquartile range of the times.
    """
    middle = median(times)
    if middle <= 0.0 or len(times) < 2:
        return 0.0 if len(times) > 1 else math.inf
    return 1.2533 * interquartile_range(times) / 1.349 / math.sqrt(len(times)) / middle


def uncertainty(samples: Samples) -> tuple[float, float, str]:
    """(relative standard error of the total, largest error among the longest layers, name of that layer)."""
    by_layer = samples.by_layer()
    total = standard_error(samples.totals(by_layer))
    cost = {name: median(times) * samples.weights.get(name, 1) for name, times in by_layer.items()}
    remaining, worst, worst_layer = LONGEST_LAYERS_SHARE * sum(cost.values()), 0.0, ""
    for name in sorted(cost, key=lambda layer: -cost[layer]):
        if remaining <= 0.0:
            break
        remaining -= cost[name]
        error = standard_error(by_layer[name])
        if error >= worst:
            worst, worst_layer = error, name
    return total, worst, worst_layer


def is_precise_enough(samples: Samples, aim: Aim) -> bool:
    """Whether the standard errors are small enough to stop measuring."""
    if samples.passes < MIN_JUDGED_PASSES:
        return False
    total, worst, _ = uncertainty(samples)
    return total <= aim.total and worst <= aim.layer


def relative_drift(totals: Sequence[float]) -> float | None:
    """Relative change of the totals from the first third of the passes to the last; None if chance explains it.

    The medians of the thirds are compared, so that single disturbed passes do not matter.
    """
    third = len(totals) // 3
    if third < 3:
        return None
    first, last = totals[:third], totals[-third:]
    start, end = median(first), median(last)
    if start <= 0.0:
        return None
    chance = math.hypot(standard_error(first) * start, standard_error(last) * end)
    change = end - start
    return change / start if abs(change) > max(DRIFT_BOUND * start, DRIFT_STANDARD_ERRORS * chance) else None


def sample_notes(samples: Samples, aim: Aim) -> tuple[str, ...]:
    """Sentences that warn of drift, and of a spread above the aim."""
    notes = []
    totals = samples.totals(samples.by_layer())
    changed = relative_drift(totals)
    if changed is not None:
        direction = "slower" if changed > 0 else "faster"
        notes.append(
            f"the machine became {abs(changed):.0%} {direction} while it measured (the last third of {len(totals)} "
            "passes against the first): heat, a changing clock or other load; measure again when it is quiet"
        )
    total, worst, worst_layer = uncertainty(samples)
    if samples.passes >= 2 and (total > aim.total or worst > aim.layer):
        notes.append(
            f"the spread is larger than aimed at: after {samples.passes} passes the total is known to "
            f"{total:.1%} and {worst_layer} to {worst:.1%} (aim: {aim.total:.0%} and {aim.layer:.0%}, "
            "standard error)"
        )
    return tuple(notes)


@dataclass
class Series:
    """The passes of one kind, alone or under load, and when to stop them."""

    samples: Samples
    aim: Aim
    repeats: int | None
    """The number of passes, if the user gave it."""
    spent_s: float = 0.0
    """Wall-clock time that the passes have taken, in seconds."""

    @property
    def full(self) -> bool:
        """Whether no further pass is allowed: their number is reached, or their time is used up."""
        done = self.samples.passes
        if self.repeats is not None or done == 0:
            return done >= (self.repeats or 1)
        spent = self.spent_s * (done + 1) / done > self.aim.budget_s
        return done >= MAX_MEASURED_PASSES or (done >= MIN_MEASURED_PASSES and spent)

    @property
    def enough(self) -> bool:
        """Whether no further pass is needed: the series is full, or the aim is reached."""
        if self.full or self.repeats is not None or self.samples.passes < MIN_MEASURED_PASSES:
            return self.full
        return self.spent_s >= self.aim.least_s and is_precise_enough(self.samples, self.aim)
