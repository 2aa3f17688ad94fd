"""Notices a run under a stale schedule that does not learn. Torch-free."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from statistics import fmean

UPDATES = 200
"""Updates after which the loss has to be below its first value."""
WINDOW = 20
"""Losses whose mean is compared with the first one."""


class LearningWatch:
    """Compares the loss after `UPDATES` updates of a new run with its first value, once.

    A run that stale gradients have broken shows it there: its loss stays where it began, or is above that.
    """

    def __init__(self, minibatches: int, staleness: str, warn: Callable[[str], object]) -> None:
        """`minibatches`: those that an update covers; `staleness`: what is said of it, such as `gradients of stage 0
        are 2 updates old`; `warn` takes the line.
        """
        self._wait = UPDATES * minibatches
        self._staleness, self._warn = staleness, warn
        self._first: float | None = None
        self._latest: deque[float] = deque(maxlen=WINDOW)
        self._seen = 0

    def __call__(self, minibatches: int, loss: float) -> None:
        """Take the loss of one minibatch, which stands for so many of the pipeline."""
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
