"""Progress lines that one worker prints on stderr during a run. Torch-free."""

from __future__ import annotations

import math
import sys

from pipeplan_launch.job.callbacks import EpochResult
from pipeplan_launch.telemetry.recorder import MinibatchRecord, Recorder


def print_status(text: str) -> None:
    """Print a line on stderr and flush it."""
    print(text, file=sys.stderr, flush=True)


def accuracy_text(correct: float, judged: float) -> str:
    """The accuracy for people, as in `accuracy 97.2% (350 of 360)`."""
    return f"accuracy {correct / judged:.2%} ({correct:.0f} of {judged:.0f})" if judged else "accuracy unknown"


def epoch_line(result: EpochResult, epochs: int, pace_s: float | None) -> str:
    """The line for a finished epoch of `epochs`. `pace_s`: seconds between two minibatches, None if not known."""
    parts = [f"epoch {result.epoch}/{epochs}"]
    if result.loss is not None:
        parts.append(f"loss {result.loss:.4f}")
    if result.test_judged:
        parts.append(f"test {accuracy_text(result.test_correct, result.test_judged)}")
    elif result.test_loss is not None:
        parts.append(f"test loss {result.test_loss:.4f}")
    parts += [f"{name} {value:.4g}" for name, value in result.test_metrics.items()]
    if pace_s:
        parts.append(f"{1 / pace_s:.1f} minibatches/s")
    return "  ".join(parts)


class Progress:
    """Prints a progress line every few minibatches of the pipeline. One replica of the last stage has one."""

    def __init__(self, recorder: Recorder, every: int, epochs: int, minibatches: int) -> None:
        """`every`: minibatches of the pipeline between two lines, below 1 for none; `minibatches`: minibatches in an
        epoch.
        """
        self._recorder = recorder
        self._every = every
        self._epochs = epochs
        self._minibatches = minibatches
        self._warned = False

    def __call__(self, step: MinibatchRecord) -> None:
        """Report a minibatch that this worker has finished, if a line is due."""
        if step.loss is not None:
            self.warn_unless_finite(step.loss, step.epoch, step.minibatch)
        previous = step.minibatch + 1 - self._recorder.stride
        if self._every < 1 or (step.minibatch + 1) // self._every == max(previous, 0) // self._every:
            return
        parts = [f"epoch {step.epoch + 1}/{self._epochs}", f"minibatch {step.minibatch + 1}/{self._minibatches}"]
        if step.loss is not None:
            parts.append(f"loss {step.loss:.4f}")
        pace = self._recorder.pace_s()
        if pace:
            parts.append(f"{1 / pace:.1f} minibatches/s")
        print_status("  ".join(parts))

    def warn_unless_finite(self, loss: float, epoch: int, minibatch: int | None) -> None:
        """Warn once if the loss is not finite. `minibatch` is None if it may be another replica's."""
        if math.isfinite(loss) or self._warned:
            return
        self._warned = True
        where = "" if minibatch is None else f", minibatch {minibatch + 1}/{self._minibatches}"
        print_status(
            f"warning: the loss became non-finite ({loss}) in epoch {epoch + 1}/{self._epochs}{where}: "
            "a lower learning rate is the usual cure"
        )
