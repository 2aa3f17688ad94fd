"""The weight of a minibatch in the mean over the minibatches of an update, as the job's `loss_weight` counts it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pipeplan_launch.errors import LaunchError


def weight_of(loss_weight: Callable[[Any], Any], target: Any) -> float:
    """The weight of a minibatch with this target. Raises `LaunchError` unless it is a number of at least 0."""
    with torch.no_grad():
        value = loss_weight(target)
    single = not isinstance(value, Tensor) or (value.numel() == 1 and not value.is_complex())
    if not single or not isinstance(value, Tensor | int | float):
        found = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise LaunchError(f"the job's loss_weight must return one number, such as a count of targets, not {found}")
    weight = float(value)
    if not 0 <= weight < math.inf:
        raise LaunchError(f"the job's loss_weight must return a number of at least 0, not {weight:g}")
    return weight
