"""What one worker says on stderr while a run goes on. Torch-free."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field
from typing import Any

from pipeplan_launch.metrics import Recorder, Step


def say(text: str) -> None:
    """A line on stderr, at once."""
    print(text, file=sys.stderr, flush=True)


def accuracy_text(correct: float, judged: float) -> str:
    """`accuracy 97.2% (350 of 360)`."""
    return f"accuracy {correct / judged:.2%} ({correct:.0f} of {judged:.0f})" if judged else "accuracy unknown"


@dataclass(frozen=True)
class EpochResult:
    """One epoch, over all workers."""

    epoch: int
    """Counted from 1."""
    loss: float | None
    """Mean over the minibatches, each with the weights of its turn."""
    test_correct: float
    test_judged: float
    test_loss: float | None
    test_metrics: dict[str, float] = field(default_factory=dict)
    """The job's `metrics`, by name; none where the epoch was not evaluated."""

    def as_json(self) -> dict[str, Any]:
        """For summary.json and the metrics."""
        accuracy = self.test_correct / self.test_judged if self.test_judged else None
        known = {"epoch": self.epoch, "loss": self.loss, "test_accuracy": accuracy, "test_loss": self.test_loss}
        return known | ({"test_metrics": self.test_metrics} if self.test_metrics else {})

    def line(self, epochs: int, pace_s: float | None) -> str:
        """For the terminal."""
        parts = [f"epoch {self.epoch}/{epochs}"]
        if self.loss is not None:
            parts.append(f"loss {self.loss:.4f}")
        if self.test_judged:
            parts.append(f"test {accuracy_text(self.test_correct, self.test_judged)}")
        elif self.test_loss is not None:
            parts.append(f"test loss {self.test_loss:.4f}")
        parts += [f"{name} {value:.4g}" for name, value in self.test_metrics.items()]
        if pace_s:
            parts.append(f"{1 / pace_s:.1f} minibatches/s")
        return "  ".join(parts)


class Progress:
    """Reports every so many minibatches of the pipeline; give one to one replica of the last stage."""

    def __init__(self, recorder: Recorder, every: int, epochs: int, minibatches: int) -> None:
        self._recorder = recorder
        self._every = every
        self._epochs = epochs
        self._minibatches = minibatches
        self._warned = False

    def __call__(self, step: Step) -> None:
        """A minibatch of this worker's is finished."""
        if step.loss is not None:
            self.warn_unless_finite(step.loss, step.epoch, step.minibatch)
        before = step.minibatch + 1 - self._recorder.stride
        if self._every < 1 or (step.minibatch + 1) // self._every == max(before, 0) // self._every:
            return
        parts = [f"epoch {step.epoch + 1}/{self._epochs}", f"minibatch {step.minibatch + 1}/{self._minibatches}"]
        if step.loss is not None:
            parts.append(f"loss {step.loss:.4f}")
        pace = self._recorder.pace_s()
        if pace:
            parts.append(f"{1 / pace:.1f} minibatches/s")
        say("  ".join(parts))

    def warn_unless_finite(self, loss: float, epoch: int, minibatch: int | None) -> None:
        """Say once that the loss is lost; the minibatch is None where another replica had it."""
        if math.isfinite(loss) or self._warned:
            return
        self._warned = True
        where = "" if minibatch is None else f", minibatch {minibatch + 1}/{self._minibatches}"
        say(
            f"warning: the loss became non-finite ({loss}) in epoch {epoch + 1}/{self._epochs}{where}: "
            "a lower learning rate is the usual cure"
        )
