"""Monitors workers from torchrun's metric hook, which runs after each health check and before torchrun acts on it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.metrics.api import MetricHandler, configure
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.launcher import api

from pipeplan_launch import child_processes
from pipeplan_launch.elastic import restart_state

CONNECTING_S = 1.0


class NoFurtherAttempt(Exception):
    """Raised to keep torchrun from making another attempt."""


OnRestart = Callable[[Mapping[int, ProcessFailure], int, int], None]
"""Called before a restart with (failures by rank, number of the restart, largest number of restarts)."""


def monitor_workers(patience_s: float | None, reachability: StoreReachability | None, on_restart: OnRestart) -> None:
    """Monitor the workers of the torchrun that runs in this process.

    `patience_s`: how long a worker may be stopped (SIGSTOP) before it is killed; None: for ever. `reachability`:
    watches the store, if it is on another server.
    """
    handler = _HealthCheckHandler(patience_s, reachability, on_restart)
    configure(handler)

    class FailureNotingAgent(LocalElasticAgent):
        """torchrun's agent, which also passes failures to the handler, because torchrun's metrics leave them out."""

        def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
            result: RunResult = super()._monitor_workers(worker_group)
            handler.failures = result.failures
            return result

    api.LocalElasticAgent = FailureNotingAgent  # type: ignore[attr-defined]


class StoreReachability:
    """Watches whether the workers' common store can be reached while torchrun restarts the workers.

    To join the next attempt, torchrun asks the store. Without a connection it would wait for a quarter of an hour.
    """

    def __init__(self, answers: Callable[[float], bool], patience_s: float, end_launch: Callable[[], None]) -> None:
        """`answers(seconds)`: whether the store's server answers in that time. `end_launch` is called, in another
        thread, if the server has not answered for `patience_s`.
        """
        self._answers, self._patience_s, self._end_launch = answers, patience_s, end_launch
        self._enabled = threading.Event()
        threading.Thread(target=self._watch, daemon=True, name="reach").start()

    def watch(self, enabled: bool) -> None:
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
            if self._answers(CONNECTING_S):
                last = time.monotonic()
            elif time.monotonic() - last > self._patience_s:
                self._end_launch()
            time.sleep(0.1)


class _HealthCheckHandler(MetricHandler):
    def __init__(
        self,
        patience_s: float | None,
        reachability: StoreReachability | None = None,
        on_restart: OnRestart = lambda *_: None,
    ) -> None:
        self._reachability, self._on_restart = reachability, on_restart
        self.failures: Mapping[int, ProcessFailure] = {}
        """The workers of this launcher that had failed at the last health check, by rank."""
        # Ends a stopped worker shortly before its peers give up. Otherwise torchrun would wait half a minute for it to
        # end.
        self._stopped_children = child_processes.StoppedChildren(None if patience_s is None else 0.9 * patience_s)
        self._restarts_left: int = 0
        self._most_restarts: int | None = None

    def emit(self, metric_data: Any) -> None:
        """Handle one of torchrun's metrics. Raises `NoFurtherAttempt` if a restart of the workers would be useless."""
        metric = str(metric_data.name).rpartition(".")[2]
        if metric == "remaining_restarts":
            self._restarts_left = metric_data.value
            if self._most_restarts is None:
                self._most_restarts = metric_data.value
        elif metric == "healthy":
            if self._reachability is not None:
                self._reachability.watch(False)
            self._stopped_children.end_those_stopped_too_long()
        elif metric in ("failed", "unhealthy"):
            over = restart_state.final_status() is not None or restart_state.stop_signal() is not None
            if over and self._restarts_left:
                raise NoFurtherAttempt
            if self._restarts_left and self._most_restarts is not None:
                self._on_restart(self.failures, self._most_restarts - self._restarts_left + 1, self._most_restarts)
            if self._reachability is not None:
                self._reachability.watch(True)
