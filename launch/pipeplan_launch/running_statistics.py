"""Averages the buffers of a stage's replicas (running statistics, counters) when a segment has drained."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def _mean(buffer: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The replicas' mean. Where they agree, their value is returned exactly: a constant must not drift by rounding."""
    total, high, low = buffer.clone(), buffer.clone(), buffer.clone()
    dist.all_reduce(total, group=group)
    dist.all_reduce(high, op=dist.ReduceOp.MAX, group=group)
    dist.all_reduce(low, op=dist.ReduceOp.MIN, group=group)
    return torch.where(high == low, buffer, total / dist.get_world_size(group))


@torch.no_grad()
def average_buffers(buffers: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Replace each buffer by the replicas' mean (floating-point buffers) or maximum (integer counters).

    Boolean buffers are left alone.
    """
    for buffer in buffers:
        if buffer.is_floating_point():
            buffer.copy_(_mean(buffer, group))
        elif buffer.dtype == torch.bool:
            continue
        else:
            dist.all_reduce(buffer, op=dist.ReduceOp.MAX, group=group)
