"""The learning rate of one stage, as torch's scheduler sets it.

Stages make different numbers of updates in an epoch, so a scheduler cannot step once per update. It steps per epoch,
or per minibatch of the pipeline: after each update it steps as many times as the update covers minibatches, so that
all stages have the same rate for the same minibatch. The scheduler's state follows from how far training has come,
and for `ReduceLROnPlateau` also from the test losses. A checkpoint holds both for any plan, so it needs no scheduler
state.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from pipeplan_launch.errors import LaunchError
from pipeplan_launch.job import Job, StageInfo
from pipeplan_launch.usercode import user_code


class Rates:
    """Steps the job's scheduler, if it has one."""

    keys: frozenset[str]
    """Optimiser settings that follow from the job, the plan and the progress of training, and not from a checkpoint."""

    def __init__(self, job: Job, optimizer: Optimizer, stage: StageInfo) -> None:
        """`optimizer`: as the job built it. Raises `LaunchError` for a scheduler that cannot be stepped this way."""
        self._optimizer = optimizer
        self._by_minibatch = job.scheduler_interval == "minibatch"
        initial = [dict(group) for group in optimizer.param_groups]
        with user_code("the job's scheduler"):
            self._scheduler = job.make_scheduler(optimizer, stage)
        if self.needs_test_loss and self._by_minibatch:
            raise LaunchError(
                "ReduceLROnPlateau follows the test loss, once an epoch: leave the job's scheduler_interval at 'epoch'"
            )
        changed = {
            key
            for group, settings in zip(optimizer.param_groups, initial, strict=True)
            for key in group
            if key not in settings or group[key] is not settings[key]
        }
        determined = self._scheduler is not None or job.rate_depends_on_stage
        self.keys = frozenset({"lr"} | changed if determined else ())

    @property
    def current(self) -> float:
        """The present rate of the first parameter group."""
        rate: float | Tensor = self._optimizer.param_groups[0]["lr"]
        return float(rate)

    @property
    def needs_test_loss(self) -> bool:
        """Whether the rate depends on the test loss."""
        return isinstance(self._scheduler, ReduceLROnPlateau)

    def after_update(self, minibatches: int) -> None:
        """Step for an update that averaged that many minibatches of the pipeline."""
        if self._scheduler is not None and self._by_minibatch:
            with user_code("the job's scheduler"):
                for _ in range(minibatches):
                    self._scheduler.step()

    def after_epoch(self, test_loss: float | None) -> None:
        """Step for a finished epoch. `test_loss` is None if the epoch was not evaluated."""
        if self._scheduler is None or self._by_minibatch:
            return
        with user_code("the job's scheduler"):
            if not isinstance(self._scheduler, ReduceLROnPlateau):
                self._scheduler.step()
            elif test_loss is not None and math.isfinite(test_loss):
                self._scheduler.step(test_loss)

    def catch_up(self, minibatches: int, test_losses: Sequence[float | None]) -> None:
        """Step from the start of training to a checkpoint: that many minibatches, and epochs with these test losses."""
        with warnings.catch_warnings():
            # Torch warns if a scheduler steps before its optimiser, which has stepped in an earlier process.
            warnings.simplefilter("ignore")
            self.after_update(minibatches)
            for loss in test_losses:
                self.after_epoch(loss)
