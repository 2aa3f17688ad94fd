"""Calls the job's callbacks in their order, and reports which of them failed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pipeplan_launch.job.callbacks import Callback, EpochResult, MinibatchInfo, RunInfo
from pipeplan_launch.job.user_code import user_code_errors


class CallbackList:
    """A job's callbacks, called one after another. An exception in one of them becomes a `LaunchError`."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._callbacks = tuple(callbacks)

    def __bool__(self) -> bool:
        return bool(self._callbacks)

    def start(self, run: RunInfo) -> None:
        """Call `on_start` of each."""
        self._call_each("on_start", lambda callback: callback.on_start(run))

    def minibatch(self, info: MinibatchInfo) -> None:
        """Call `on_minibatch` of each."""
        self._call_each("on_minibatch", lambda callback: callback.on_minibatch(info))

    def epoch(self, result: EpochResult) -> None:
        """Call `on_epoch` of each."""
        self._call_each("on_epoch", lambda callback: callback.on_epoch(result))

    def checkpoint(self, folder: Path) -> None:
        """Call `on_checkpoint` of each."""
        self._call_each("on_checkpoint", lambda callback: callback.on_checkpoint(folder))

    def end(self, summary: dict[str, Any]) -> None:
        """Call `on_end` of each."""
        self._call_each("on_end", lambda callback: callback.on_end(summary))

    def _call_each(self, method: str, call: Callable[[Callback], None]) -> None:
        for callback in self._callbacks:
            with user_code_errors(f"the job's callback {type(callback).__name__}.{method}"):
                call(callback)
