"""Measured times, whether there are enough of them, and what to say of their spread and drift."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pipeplan.profiler.clock import median, spread

TOTAL_BOUND = 0.01
"""Passes go on until the standard error of the median total is below this share of it …"""
LAYER_BOUND = 0.03
"""… and that of each layer that counts below this share of the layer's time."""
THAT_COUNT = 0.9
"""The layers that count: the longest ones, which together make up this share of the time."""
LEAST = 5
"""Passes before a spread is judged."""
DRIFT_BOUND = 0.05
"""A change of the total between the first and the last third of the passes that is reported."""
SURE = 4.0
"""A drift is one only if it is this many standard errors large."""


@dataclass
class Samples:
    """Times in seconds, one for each pass; of the layers that were run."""

    weights: Mapping[str, int] = field(default_factory=dict)
    """How many layers a layer stands for; 1 where it is not in here."""
    forward: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    backward: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    whole_forward: list[float] = field(default_factory=list)
    whole_backward: list[float] = field(default_factory=list)

    @property
    def passes(self) -> int:
        """How many there were."""
        return len(next(iter(self.forward.values()), []))

    def totals(self, of: Mapping[str, Sequence[float]]) -> list[float]:
        """For each pass the sum over all layers of the model."""
        weighted = ([self.weights.get(name, 1) * one for one in times] for name, times in of.items())
        return [sum(one) for one in zip(*weighted, strict=True)]

    def by_layer(self) -> dict[str, list[float]]:
        """Forward and backward together, for each layer that was run."""
        return {
            name: [a + b for a, b in zip(times, self.backward[name], strict=True)]
            for name, times in self.forward.items()
        }


def standard_error(times: Sequence[float]) -> float:
    """Of the median, as a share of it: 1.2533 σ / √n, with the σ of a normal distribution of this quartile range."""
    middle = median(times)
    if middle <= 0.0 or len(times) < 2:
        return 0.0 if len(times) > 1 else math.inf
    return 1.2533 * spread(times) / 1.349 / math.sqrt(len(times)) / middle


def uncertainty(samples: Samples) -> tuple[float, float, str]:
    """The standard error of the total, the largest of a layer that counts, and that layer's name."""
    by_layer = samples.by_layer()
    total = standard_error(samples.totals(by_layer))
    cost = {name: median(times) * samples.weights.get(name, 1) for name, times in by_layer.items()}
    left, worst, which = THAT_COUNT * sum(cost.values()), 0.0, ""
    for name in sorted(cost, key=lambda one: -cost[one]):
        if left <= 0.0:
            break
        left -= cost[name]
        error = standard_error(by_layer[name])
        if error >= worst:
            worst, which = error, name
    return total, worst, which


def settled(samples: Samples) -> bool:
    """Whether the spread is small enough to stop."""
    if samples.passes < LEAST:
        return False
    total, worst, _ = uncertainty(samples)
    return total <= TOTAL_BOUND and worst <= LAYER_BOUND


def drift(totals: Sequence[float]) -> float | None:
    """By which share the totals changed from the first third of the passes to the last; None where chance explains it.

    Medians of thirds, so that single passes that something disturbed do not matter.
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
    return change / start if abs(change) > max(DRIFT_BOUND * start, SURE * chance) else None


def notes_on(samples: Samples) -> tuple[str, ...]:
    """Sentences about what a reader of these times should know."""
    found = []
    totals = samples.totals(samples.by_layer())
    changed = drift(totals)
    if changed is not None:
        what = "slower" if changed > 0 else "faster"
        found.append(
            f"the machine became {abs(changed):.0%} {what} while it measured (the last third of {len(totals)} passes "
            "against the first): heat, a changing clock or other load; measure again when it is quiet"
        )
    total, worst, which = uncertainty(samples)
    if samples.passes >= 2 and (total > TOTAL_BOUND or worst > LAYER_BOUND):
        found.append(
            f"the spread is larger than aimed at: after {samples.passes} passes the total is known to "
            f"{total:.1%} and {which} to {worst:.1%} (aim: {TOTAL_BOUND:.0%} and {LAYER_BOUND:.0%}, standard error)"
        )
    return tuple(found)
