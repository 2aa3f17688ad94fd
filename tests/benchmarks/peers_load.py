"""Whether a measurement had the machine to itself. Linux only: elsewhere every run counts as undisturbed."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
MOST = 0.15
"""Cores that other processes may use, on average over a run."""
ATTEMPTS = 4
_STAT = Path("/proc/stat")


@dataclass(frozen=True)
class Moment:
    """Seconds so far: of the clock, of work on all cores, of work by processes that this one started and waited for."""

    clock: float
    all: float
    own: float

    @staticmethod
    def now() -> Moment:
        """Read the clocks."""
        worked = 0.0
        if _STAT.exists():
            user, nice, system, _idle, _waiting, irq, softirq, stolen = map(int, _STAT.read_text().split()[1:9])
            worked = (user + nice + system + irq + softirq + stolen) / os.sysconf("SC_CLK_TCK")
        times = os.times()
        return Moment(time.perf_counter(), worked, sum(times[:4]))

    def others_since(self, before: Moment) -> float:
        """Cores that others used in between, on average. What another machine on the same processor took is in it."""
        return max(0.0, (self.all - before.all) - (self.own - before.own)) / (self.clock - before.clock)


def undisturbed(run: Callable[[], T]) -> T:
    """The result of a run during which others used next to nothing, of a few attempts; says so if there is none."""
    for attempt in range(ATTEMPTS):
        before = Moment.now()
        result = run()
        others = Moment.now().others_since(before)
        if others <= MOST:
            break
        what = "measured again" if attempt + 1 < ATTEMPTS else "kept all the same"
        print(f"  disturbed: other processes used {others:.2f} cores; {what}", file=sys.stderr, flush=True)
    return result
