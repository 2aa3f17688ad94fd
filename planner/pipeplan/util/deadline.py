"""The deadline of a search, which its phases share."""

from __future__ import annotations

import time
from dataclasses import dataclass


class OutOfTime(Exception):
    """The deadline passed during a search, or the search exceeded its limit on work."""


@dataclass(frozen=True)
class Deadline:
    """The time at which a search must end, or no limit."""

    at: float | None = None
    """The time by `time.perf_counter`; None for no limit."""

    @staticmethod
    def after(seconds: float | None) -> Deadline:
        """The deadline `seconds` from now; None for no limit."""
        return Deadline(None if seconds is None else time.perf_counter() + seconds)

    @property
    def left_s(self) -> float | None:
        """Seconds that are left, at least 0; None without a limit."""
        return None if self.at is None else max(0.0, self.at - time.perf_counter())

    @property
    def passed(self) -> bool:
        """Whether the deadline has passed."""
        return self.at is not None and time.perf_counter() > self.at

    def check(self) -> None:
        """Raise `OutOfTime` if the deadline has passed."""
        if self.passed:
            raise OutOfTime

    def share(self, part: float, most_s: float | None = None) -> Deadline:
        """The deadline of a phase that may take the share `part` of the time left, and at most `most_s` seconds."""
        own_s = None if self.left_s is None else self.left_s * part
        limits = [seconds for seconds in (own_s, most_s) if seconds is not None]
        return Deadline.after(min(limits, default=None))


NO_DEADLINE = Deadline()
