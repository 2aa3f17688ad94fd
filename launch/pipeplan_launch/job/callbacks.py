"""The user's callbacks during a run, for logging, plotting or notification. Torch-free.

Callbacks are called in one process only, the first replica of the last stage. This process knows only the losses of
its own minibatches: all minibatches, or every r-th if that stage has r replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeplan_launch.job.user_code import user_code_errors


@dataclass(frozen=True)
class RunInfo:
    """A run that starts or resumes."""

    folder: Path
    """The run folder."""
    plan: str
    """The plan's replica counts, as in `2-1`."""
    minibatch: int
    """Samples in a minibatch."""
    epochs: int
    """Epochs in the whole run, including finished ones."""
    minibatches: int
    """Minibatches in an epoch."""
    epoch: int
    """The epoch in which this process starts, counted from 0; above 0 for a resumed run."""
    minibatch_of_epoch: int
    """The first minibatch of that epoch that this process runs, counted from 0."""


@dataclass(frozen=True)
class MinibatchInfo:
    """A minibatch that the last stage has finished."""

    epoch: int
    """The epoch, counted from 0."""
    minibatch: int
    """The minibatch's number in the epoch, counted from 0."""
    samples: int
    loss: float
    """The loss with the weights that the minibatch used; not finite if training has diverged."""
    learning_rate: float | None
    """The current rate of the last stage's first parameter group; None if that stage trains nothing."""
    minibatches_per_s: float | None
    """Throughput of the whole pipeline over the last 50 minibatches; None before two are finished."""


def accuracy_text(correct: float, judged: float) -> str:
    """The accuracy as text, such as `accuracy 97.2% (350 of 360)`."""
    return f"accuracy {correct / judged:.2%} ({correct:.0f} of {judged:.0f})"


@dataclass(frozen=True)
class EpochResult:
    """Result of one epoch, over all workers."""

    epoch: int
    """The epoch, counted from 1."""
    loss: float | None
    """Mean training loss over the minibatches, each with the weights that it used."""
    test_correct: float
    """Test samples that the job's metric counted as right."""
    test_judged: float
    """Test samples that the job's metric could judge; 0 if the epoch was not evaluated."""
    test_loss: float | None
    test_metrics: dict[str, float] = field(default_factory=dict)
    """The job's `metrics`, by name; empty if the epoch was not evaluated."""

    def as_json(self) -> dict[str, Any]:
        """The epoch's entry in summary.json and in a checkpoint's manifest."""
        accuracy = self.test_correct / self.test_judged if self.test_judged else None
        content = {"epoch": self.epoch, "loss": self.loss, "test_accuracy": accuracy, "test_loss": self.test_loss}
        return content | ({"test_metrics": self.test_metrics} if self.test_metrics else {})

    def line(self, epochs: int, step_time_s: float | None) -> str:
        """The epoch's line for the terminal. `step_time_s`: seconds between two minibatches, None if not known."""
        parts = [f"epoch {self.epoch}/{epochs}"]
        if self.loss is not None:
            parts.append(f"loss {self.loss:.4f}")
        if self.test_judged:
            parts.append(f"test {accuracy_text(self.test_correct, self.test_judged)}")
        elif self.test_loss is not None:
            parts.append(f"test loss {self.test_loss:.4f}")
        parts += [f"{name} {value:.4g}" for name, value in self.test_metrics.items()]
        if step_time_s:
            parts.append(f"{1 / step_time_s:.1f} minibatches/s")
        return "  ".join(parts)


class Callback:
    """Base class of callbacks. Its methods do nothing: override the methods that you need. An exception ends the
    run.
    """

    def on_start(self, run: RunInfo) -> None:
        """Training starts or resumes. Open files here, not in the constructor: the job is built in every process."""

    def on_minibatch(self, info: MinibatchInfo) -> None:
        """This process has finished a minibatch. The pipeline waits until the method returns."""

    def on_epoch(self, result: EpochResult) -> None:
        """An epoch has been trained, and evaluated unless `--evaluate-every` skips it."""

    def on_checkpoint(self, folder: Path) -> None:
        """A complete checkpoint has been written to `folder`."""

    def on_end(self, summary: dict[str, Any]) -> None:
        """The run has ended; `summary` is the content of summary.json. Not called if an error ended the run."""


# Calls the job's callbacks in order, and reports which callback failed.


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
