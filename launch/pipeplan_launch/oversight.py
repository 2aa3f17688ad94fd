"""Looking at the workers whenever torchrun does: it puts what it found into its metrics before it acts on that."""

from __future__ import annotations

from typing import Any

from torch.distributed.elastic.metrics.api import MetricHandler, configure

from pipeplan_launch import children, restarts


class NoMore(Exception):
    """No further attempt is to be made, though torchrun would make one."""


def begin(patience_s: float | None) -> None:
    """Look at the workers of the torchrun that runs in this process. `patience_s`: with one that is stopped."""
    configure(_Overseer(patience_s))


class _Overseer(MetricHandler):
    def __init__(self, patience_s: float | None) -> None:
        # A little before its peers give up: torchrun then gives the stopped one half a minute to end by itself.
        self._stopped = children.Stopped(None if patience_s is None else 0.9 * patience_s)
        self._restarts_left = 0

    def emit(self, metric_data: Any) -> None:
        """Raises `NoMore` where torchrun would start the workers again in vain."""
        what = str(metric_data.name).rpartition(".")[2]
        if what == "remaining_restarts":
            self._restarts_left = metric_data.value
        elif what == "healthy":
            self._stopped.end_those_stopped_too_long()
        elif what in ("failed", "unhealthy"):
            over = restarts.given_up() is not None or restarts.stop_asked() is not None
            if over and self._restarts_left:
                raise NoMore
