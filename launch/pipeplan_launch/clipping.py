"""Gradient clipping by norm, as `torch.nn.utils.clip_grad_norm_` does it.

If the schedule flushes, all stages update at the same point, and the norm is that of the whole model. Otherwise each
stage updates at its own time, and waiting for the others would drain the pipeline, so each stage uses its own norm.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import torch
import torch.distributed as dist
from torch import Tensor

from pipeplan_launch.engine import Place
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.progress import say

_EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_


class Clipping:
    """Scales the gradients of each update down to a largest norm."""

    def __init__(
        self, limit: float, group: dist.ProcessGroup | None, *, contributes: bool = True, warns: bool, where: str
    ) -> None:
        """`group`: all workers of all stages if the norm is that of the whole model. Its norm sums the gradients of
        workers with `contributes`, one replica of each stage. Workers with `warns` print warnings, which call the
        gradients those `where`.
        """
        self._limit, self._group, self._contributes = limit, group, contributes
        self._warns, self._where = warns, where

    def clip(self, gradients: Collection[Tensor]) -> float:
        """Scale gradients in place; returns their norm before that."""
        if any(gradient.layout is not torch.strided for gradient in gradients):
            raise LaunchError("sparse gradients cannot be clipped: build the layer with sparse=False")
        own = torch.nn.utils.get_total_norm(gradients)
        norm = float(own)
        if self._group is not None:
            squares = torch.tensor([norm * norm if self._contributes else 0.0], dtype=torch.float64)
            dist.all_reduce(squares, group=self._group)
            norm = math.sqrt(float(squares))
        if not math.isfinite(norm) and self._warns:
            say(f"warning: the norm of the gradients {self._where}became non-finite ({norm})")
            self._warns = False
        factor = self._limit / (norm + _EPSILON)
        if gradients and not factor >= 1.0:
            torch._foreach_mul_(list(gradients), factor)
        return norm


def of(place: Place, flush: dist.ProcessGroup | None) -> Clipping | None:
    """The clipping that a worker's job asks for, or None. `flush`: all workers, if the schedule flushes."""
    limit, schedule, stages = place.job.clip_norm, place.plan.schedule, len(place.plan.pipeline)
    if limit is None:
        return None
    is_first = place.replica == 0
    if stages == 1 or not schedule.flushes:
        return Clipping(limit, None, warns=is_first, where="" if stages == 1 else f"of stage {place.stage} ")
    assert flush is not None
    return Clipping(limit, flush, contributes=is_first, warns=is_first and place.is_last, where="of all stages ")


def note(place: Place) -> str | None:
    """A note for the user if clipping works stage by stage, otherwise None."""
    stages = len(place.plan.pipeline)
    if place.job.clip_norm is None or stages == 1 or place.plan.schedule.flushes:
        return None
    return (
        f"{place.plan.schedule.name} updates each stage at its own time, so clip_norm {place.job.clip_norm:g} "
        "limits the norm of each stage by itself"
    )
