"""Ends a worker that hangs: it runs a segment, and none of its actions has ended for longer than any wait may take.

Peers that wait for a tensor of such a worker give up after `--timeout` by themselves. Those that wait for it at the end
of a segment do not, because they may rightly wait there for as long as the others compute.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

GRACE_S = 2.0
"""Time by which a wait of the action itself, which takes `--timeout` at most, is reported first."""


class HangWatch:
    """Watches the main thread of a worker from a thread of its own."""

    def __init__(self, patience_s: float, act: Callable[[float], None]) -> None:
        """`act(seconds)` is called, in another thread, when an action has taken `patience_s` and a grace."""
        self._limit_s, self._act = patience_s + GRACE_S, act
        self._since: float | None = None
        threading.Thread(target=self._watch, daemon=True, name="hang-watch").start()

    def progress(self) -> None:
        """An action has ended, or the first one of a segment begins."""
        self._since = time.monotonic()

    def rest(self) -> None:
        """The segment has ended: what comes next may take any time."""
        self._since = None

    def _watch(self) -> None:
        interval_s = min(1.0, self._limit_s / 10)
        while True:
            began = time.monotonic()
            time.sleep(interval_s)
            now, since = time.monotonic(), self._since
            if now - began > 2 * interval_s + 1.0:
                if since is not None:  # the whole process was stopped, which is no fault of the action
                    self._since = now
            elif since is not None and now - since > self._limit_s:
                self._act(now - since)
                return
