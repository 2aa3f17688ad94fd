"""Presets for training with old gradients: what a job file may give as its optimiser or scheduler.

`nesterov_for_stashing` is the recipe of Ajanthan et al., ICML 2025 (arXiv 2505.01099), `rate_by_delay` the first
technique of PipeMare (Yang et al., MLSys 2021, arXiv 1910.05124). docs/learning.md says what was measured of them.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.optim import NAdam, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from pipeplan_launch.errors import LaunchError
from pipeplan_launch.job.job import StageInfo


def nesterov_for_stashing(lr: float = 3e-4, weight_decay: float = 0.0) -> Callable[[list[nn.Parameter]], Optimizer]:
    """The optimiser of a job: NAdam with long momentum, whose look-ahead makes up for gradients that are old."""

    def build(parameters: list[nn.Parameter]) -> Optimizer:
        betas, decay = (0.99, 0.999), 0.004
        return NAdam(
            parameters, lr, betas, weight_decay=weight_decay, momentum_decay=decay, decoupled_weight_decay=True
        )

    return build


def rate_by_delay(steps: int) -> Callable[[Optimizer, StageInfo], LambdaLR]:
    """The scheduler of a job: the rate of a stage is divided by its delay at first, and rises to the full rate.

    After t of `steps` the rate of a stage whose gradients are τ updates old is lr / τ^(1 − t / steps). A step is a
    minibatch or an epoch, as `scheduler_interval` says. About a quarter of the training is usual.
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise LaunchError(f"rate_by_delay needs a number of steps of at least 1, not {steps!r}")

    def build(optimizer: Optimizer, stage: StageInfo) -> LambdaLR:
        delay = max(1, stage.delay)
        return LambdaLR(optimizer, lambda step: float(delay ** (min(step / steps, 1.0) - 1.0)))

    return build
