"""Looking at the workers whenever torchrun does: it puts what it found into its metrics before it acts on that."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from torch.distributed.elastic.metrics.api import MetricHandler, configure

from pipeplan_launch import children, restarts

CONNECTING_S = 1.0


class NoMore(Exception):
    """No further attempt is to be made, though torchrun would make one."""


def begin(patience_s: float | None, reach: Reach | None = None) -> None:
    """Look at the workers of the torchrun that runs in this process. `patience_s`: with one that is stopped."""
    configure(_Overseer(patience_s, reach))


class Reach:
    """Whether the workers' common store can still be reached, while torchrun starts the workers again.

    It asks the store for its part in the next attempt, and where the way there is cut waits for a quarter of an hour.
    """

    def __init__(self, address: tuple[str, int], patience_s: float, give_up: Callable[[], None]) -> None:
        """`give_up` is called, in another thread, once it was out of reach for so long."""
        self._address, self._patience_s, self._give_up = address, patience_s, give_up
        self._asked = threading.Event()
        threading.Thread(target=self._watch, daemon=True, name="reach").start()

    def ask(self, asked: bool) -> None:
        """Whether that is to be looked at."""
        if asked:
            self._asked.set()
        else:
            self._asked.clear()

    def _watch(self) -> None:
        last = time.monotonic()
        while True:
            if not self._asked.wait(CONNECTING_S):
                last = time.monotonic()
                continue
            if self._answers():
                last = time.monotonic()
            elif time.monotonic() - last > self._patience_s:
                self._give_up()
            time.sleep(0.1)

    def _answers(self) -> bool:
        try:
            socket.create_connection(self._address, timeout=CONNECTING_S).close()
        except OSError:
            return False
        return True


class _Overseer(MetricHandler):
    def __init__(self, patience_s: float | None, reach: Reach | None = None) -> None:
        self._reach = reach
        # A little before its peers give up: torchrun then gives the stopped one half a minute to end by itself.
        self._stopped = children.Stopped(None if patience_s is None else 0.9 * patience_s)
        self._restarts_left = 0

    def emit(self, metric_data: Any) -> None:
        """Raises `NoMore` where torchrun would start the workers again in vain."""
        what = str(metric_data.name).rpartition(".")[2]
        if what == "remaining_restarts":
            self._restarts_left = metric_data.value
        elif what == "healthy":
            if self._reach is not None:
                self._reach.ask(False)
            self._stopped.end_those_stopped_too_long()
        elif what in ("failed", "unhealthy"):
            over = restarts.given_up() is not None or restarts.stop_asked() is not None
            if over and self._restarts_left:
                raise NoMore
            if self._reach is not None:
                self._reach.ask(True)
