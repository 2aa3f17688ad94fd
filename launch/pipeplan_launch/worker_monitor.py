"""Monitors workers from torchrun's metric hook, which runs after each health check and before torchrun acts on it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from torch.distributed.elastic.metrics.api import MetricHandler, configure

from pipeplan_launch import child_processes
from pipeplan_launch.elastic import restart_state

CONNECTING_S = 1.0


class NoFurtherAttempt(Exception):
    """torchrun must not make a further attempt, although it would."""


def monitor_workers(patience_s: float | None, reach: StoreReachability | None = None) -> None:
    """Monitor the workers of the torchrun that runs in this process.

    `patience_s`: how long a worker may be stopped (SIGSTOP) before it is killed; None: for ever. `reach`: watches the
    store, where another server keeps it.
    """
    configure(_Overseer(patience_s, reach))


class StoreReachability:
    """Watches whether the workers' common store can be reached while torchrun restarts the workers.

    torchrun itself asks the store to join the next attempt; without a connection it waits for a quarter of an hour.
    """

    def __init__(self, address: tuple[str, int], patience_s: float, give_up: Callable[[], None]) -> None:
        """`give_up` is called, in another thread, once the store has been out of reach for `patience_s`."""
        self._address, self._patience_s, self._give_up = address, patience_s, give_up
        self._enabled = threading.Event()
        threading.Thread(target=self._watch, daemon=True, name="reach").start()

    def ask(self, enabled: bool) -> None:
        """Begin or end watching."""
        if enabled:
            self._enabled.set()
        else:
            self._enabled.clear()

    def _watch(self) -> None:
        last = time.monotonic()
        while True:
            if not self._enabled.wait(CONNECTING_S):
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
    def __init__(self, patience_s: float | None, reach: StoreReachability | None = None) -> None:
        self._reach = reach
        # Ends a stopped worker shortly before its peers give up, as torchrun then waits half a minute for it to end.
        self._stopped = child_processes.StoppedChildren(None if patience_s is None else 0.9 * patience_s)
        self._restarts_left = 0

    def emit(self, metric_data: Any) -> None:
        """Handle one of torchrun's metrics. Raises `NoFurtherAttempt` where torchrun would restart the workers in
        vain."""
        metric = str(metric_data.name).rpartition(".")[2]
        if metric == "remaining_restarts":
            self._restarts_left = metric_data.value
        elif metric == "healthy":
            if self._reach is not None:
                self._reach.ask(False)
            self._stopped.end_those_stopped_too_long()
        elif metric in ("failed", "unhealthy"):
            over = restart_state.given_up() is not None or restart_state.stop_asked() is not None
            if over and self._restarts_left:
                raise NoFurtherAttempt
            if self._reach is not None:
                self._reach.ask(True)
