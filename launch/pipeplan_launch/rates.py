"""The learning rate of one stage, as a scheduler of torch's has it.

Stages make different numbers of updates in an epoch, so a scheduler does not step per update. It steps per epoch, or
per minibatch of the pipeline: as many times after an update as that covers, so that all stages have the same rate for
the same minibatch. Where it stands follows from how far training has come, and for `ReduceLROnPlateau` from the test
losses. A checkpoint holds both, for any plan, and so nothing of the scheduler's own.
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
    """The optimiser's settings that follow from the job, the plan and how far training has come: not from a
    checkpoint."""

    def __init__(self, job: Job, optimizer: Optimizer, stage: StageInfo) -> None:
        """The optimiser is as the job made it. Raises `LaunchError` for a scheduler that cannot be stepped so."""
        self._optimizer = optimizer
        self._by_minibatch = job.scheduler_interval == "minibatch"
        before = [dict(group) for group in optimizer.param_groups]
        with user_code("the job's scheduler"):
            self._scheduler = job.make_scheduler(optimizer, stage)
        if self.needs_test_loss and self._by_minibatch:
            raise LaunchError(
                "ReduceLROnPlateau follows the test loss, once an epoch: leave the job's scheduler_interval at 'epoch'"
            )
        changed = {
            key
            for group, own in zip(optimizer.param_groups, before, strict=True)
            for key in group
            if key not in own or group[key] is not own[key]
        }
        bound = self._scheduler is not None or job.rate_depends_on_stage
        self.keys = frozenset({"lr"} | changed if bound else ())

    @property
    def now(self) -> float:
        """The rate of the first parameter group."""
        rate: float | Tensor = self._optimizer.param_groups[0]["lr"]
        return float(rate)

    @property
    def needs_test_loss(self) -> bool:
        """Whether the rate depends on how well training goes."""
        return isinstance(self._scheduler, ReduceLROnPlateau)

    def after_update(self, minibatches: int) -> None:
        """An update was made from so many minibatches of the pipeline."""
        if self._scheduler is not None and self._by_minibatch:
            with user_code("the job's scheduler"):
                for _ in range(minibatches):
                    self._scheduler.step()

    def after_epoch(self, test_loss: float | None) -> None:
        """An epoch is done; the loss is None where it was not evaluated."""
        if self._scheduler is None or self._by_minibatch:
            return
        with user_code("the job's scheduler"):
            if not isinstance(self._scheduler, ReduceLROnPlateau):
                self._scheduler.step()
            elif test_loss is not None and math.isfinite(test_loss):
                self._scheduler.step(test_loss)

    def catch_up(self, minibatches: int, test_losses: Sequence[float | None]) -> None:
        """From the beginning to where a checkpoint is: so many minibatches, and these epochs."""
        with warnings.catch_warnings():
            # Torch warns where a scheduler steps before the optimiser. That has stepped, in the process before this.
            warnings.simplefilter("ignore")
            self.after_update(minibatches)
            for loss in test_losses:
                self.after_epoch(loss)
