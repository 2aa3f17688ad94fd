"""What the user may do while a run goes on: logging, plotting, telling someone. Torch-free.

Callbacks are called in one process only, the first replica of the last stage. It knows the loss of its own minibatches:
all of them, or every r-th where that stage has r replicas.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeplan_launch.progress import EpochResult


@dataclass(frozen=True)
class RunInfo:
    """A run that begins, or goes on."""

    folder: Path
    """The run folder."""
    plan: str
    """The plan as people write it: `2-1`."""
    minibatch: int
    """Samples in a minibatch."""
    epochs: int
    """To be done, all in all."""
    minibatches: int
    """In an epoch."""
    epoch: int
    """Where this process begins, counted from 0; above 0 for a run that goes on."""
    minibatch_of_epoch: int
    """The first minibatch of that epoch that it runs, counted from 0."""


@dataclass(frozen=True)
class MinibatchInfo:
    """A minibatch that is done with, at the last stage."""

    epoch: int
    """Counted from 0."""
    minibatch: int
    """In the epoch, counted from 0."""
    samples: int
    loss: float
    """With the weights that the minibatch used; not finite where training has failed."""
    learning_rate: float | None
    """Of the last stage's first parameter group, now; None where nothing of that stage is trained."""
    minibatches_per_s: float | None
    """Pace of the whole pipeline over the last 50 minibatches; None before there are two."""


class Callback:
    """Does nothing; override what you need. An exception ends the run."""

    def on_start(self, run: RunInfo) -> None:
        """Training begins, or goes on. Open files here: the job is built in every process."""

    def on_minibatch(self, info: MinibatchInfo) -> None:
        """A minibatch of this process is done. The pipeline waits meanwhile."""

    def on_epoch(self, result: EpochResult) -> None:
        """An epoch is trained and, if that was its turn, evaluated."""

    def on_checkpoint(self, folder: Path) -> None:
        """A checkpoint is complete in that folder."""

    def on_end(self, summary: dict[str, Any]) -> None:
        """The run has ended, as summary.json says; not called where an error ended it."""
