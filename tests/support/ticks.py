"""A clock of the profiler by which a call takes as long as a counter grows."""

from __future__ import annotations

from collections.abc import Callable


class Ticks:
    """Times calls by `now`, a counter that what is timed advances."""

    how = "ticks"

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now

    def measure(self, call: Callable[[], None]) -> Callable[[], float]:
        """Run the call; the returned function gives how far the counter grew."""
        before = self.now()
        call()
        taken = float(self.now() - before)
        return lambda: taken

    def settle(self) -> None:
        """Nothing is under way."""
