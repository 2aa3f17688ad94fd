"""The process groups over which messages travel in the one order: one for every pair of workers and direction.

All workers make the groups together, in one sorted order, and try each of them with a message of one number before
training. A transfer in that trial is a node of an order that all workers share, too, so it cannot deadlock either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeplan_launch.plan.launch_plan import LaunchPlan
from pipeplan_launch.plan.transport_modes import Edge, edges

EdgeGroups = Mapping[Edge, Any]
"""The process group of each edge of a run."""


def make_edge_groups(plan: LaunchPlan, backend: str, timeout: timedelta) -> EdgeGroups:
    """Make the groups. All workers of the run call this, those outside of the plan's stages with them."""
    return {edge: dist.new_group(sorted(edge), timeout=timeout, backend=backend) for edge in edges(plan)}


def post_sends(groups: EdgeGroups, tensors: Sequence[Tensor], source: int, destination: int) -> list[dist.Work]:
    """Start sending the tensors of a message, of which none is empty."""
    return [_started(dist.isend(tensor, destination, groups[source, destination])) for tensor in tensors]


def post_receives(groups: EdgeGroups, tensors: Sequence[Tensor], source: int, destination: int) -> list[dist.Work]:
    """Start receiving the tensors of a message, of which none is empty."""
    return [_started(dist.irecv(tensor, source, groups[source, destination])) for tensor in tensors]


def try_edges(groups: EdgeGroups, rank: int, device: torch.device) -> None:
    """Send a number over each edge of this worker, in sorted order, so that NCCL connects before training begins.

    Raises `RuntimeError` if a message does not come, or comes wrong.
    """
    for source, destination in sorted(groups):
        number = source * 7919 + destination + 1
        if rank == source:
            tensor = torch.full((1,), number, dtype=torch.int64, device=device)
            works = post_sends(groups, [tensor], source, destination)
        elif rank == destination:
            tensor = torch.zeros(1, dtype=torch.int64, device=device)
            works = post_receives(groups, [tensor], source, destination)
        else:
            continue
        for work in works:
            work.wait()
        if int(tensor) != number:
            raise RuntimeError(f"a message from rank {source} to rank {destination} came wrong")


def _started(work: dist.Work | None) -> dist.Work:
    """`work`, which is None only in a process outside the group."""
    assert work is not None
    return work
