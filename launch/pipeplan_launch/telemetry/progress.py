"""Progress lines that one worker prints on stderr during a run. Torch-free."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from statistics import fmean

from pipeplan_launch.errors import print_status
from pipeplan_launch.telemetry.recorder import MinibatchRecord, Recorder


class Progress:
    """Prints a progress line every few minibatches of the pipeline, at one replica of the last stage."""

    def __init__(self, recorder: Recorder, every: int, epochs: int, minibatches: int, *, warns: bool) -> None:
        """`every`: minibatches of the pipeline between two lines, below 1 for none; `minibatches`: minibatches in an
        epoch; `warns`: whether to warn of a loss that is not finite.
        """
        self._recorder = recorder
        self._every = every
        self._epochs = epochs
        self._minibatches = minibatches
        self._warned = not warns

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
        step_time = self._recorder.step_time_s()
        if step_time:
            parts.append(f"{1 / step_time:.1f} minibatches/s")
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


# Detects that a run with stale gradients does not learn.

UPDATES = 200
"""Updates after which the loss has to be below its first value."""
WINDOW = 20
"""Number of latest losses whose mean is compared with the first loss."""


class LearningWatch:
    """Compares the loss after `UPDATES` updates of a new run with its first value, once.

    If stale gradients have broken a run, its loss is then not below the first value.
    """

    def __init__(self, minibatches: int, staleness: str, warn: Callable[[str], object]) -> None:
        """`minibatches`: number of minibatches in an update; `staleness`: text such as `gradients of stage 0 are 2
        updates old`; `warn`: prints the line.
        """
        self._wait = UPDATES * minibatches
        self._staleness, self._warn = staleness, warn
        self._first: float | None = None
        self._latest: deque[float] = deque(maxlen=WINDOW)
        self._seen = 0

    def __call__(self, minibatches: int, loss: float) -> None:
        """Take a loss that represents this number of the pipeline's minibatches."""
        if self._seen >= self._wait:
            return
        if self._first is None:
            self._first = loss
        self._latest.append(loss)
        self._seen += minibatches
        if self._seen < self._wait or fmean(self._latest) < self._first:
            return
        self._warn(
            f"warning: after {UPDATES} updates the loss is {fmean(self._latest):.4g}, not below its first value, "
            f"{self._first:.4g}: {self._staleness}; try --flush-epochs 1, --correction ef or a lower learning rate"
        )
