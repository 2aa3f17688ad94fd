"""Calling the job's callbacks, and what they are told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pipeplan_launch.callbacks import Callback, MinibatchInfo, RunInfo
from pipeplan_launch.metrics import Step
from pipeplan_launch.progress import EpochResult
from pipeplan_launch.usercode import user_code


class Listeners:
    """A job's callbacks, called one after the other, in their order. An exception of one becomes a `LaunchError`."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._callbacks = tuple(callbacks)

    def __bool__(self) -> bool:
        return bool(self._callbacks)

    def start(self, run: RunInfo) -> None:
        """Training begins."""
        self._tell("on_start", lambda one: one.on_start(run))

    def minibatch(self, step: Step, rate: float | None, pace_s: float | None) -> None:
        """A minibatch is done at the last stage, with that learning rate, so many seconds after the one before."""
        assert step.loss is not None
        info = MinibatchInfo(
            epoch=step.epoch,
            minibatch=step.minibatch,
            samples=step.samples,
            loss=step.loss,
            learning_rate=rate,
            minibatches_per_s=1 / pace_s if pace_s else None,
        )
        self._tell("on_minibatch", lambda one: one.on_minibatch(info))

    def epoch(self, result: EpochResult) -> None:
        """An epoch is done."""
        self._tell("on_epoch", lambda one: one.on_epoch(result))

    def checkpoint(self, folder: Path) -> None:
        """A checkpoint is complete."""
        self._tell("on_checkpoint", lambda one: one.on_checkpoint(folder))

    def end(self, summary: dict[str, Any]) -> None:
        """The run has ended."""
        self._tell("on_end", lambda one: one.on_end(summary))

    def _tell(self, what: str, call: Callable[[Callback], None]) -> None:
        for one in self._callbacks:
            with user_code(f"the job's callback {type(one).__name__}.{what}"):
                call(one)
