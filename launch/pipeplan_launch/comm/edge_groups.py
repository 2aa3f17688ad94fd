"""The process groups over which messages travel in the one order, and how a message is posted in them.

All workers make the groups together, in one sorted order, and try each of them with a message of one number before
training. A transfer in that trial is a node of an order that all workers share, too, so it cannot deadlock either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeplan_launch.plan.launch_plan import LaunchPlan
from pipeplan_launch.plan.transport_modes import BATCHED, NCCL, Edge, edges

MOST_IN_A_BATCH = 128
"""Operations of one batch. NCCL may hang with more than 256 (pytorch/pytorch issue 174288)."""


@dataclass(frozen=True)
class EdgeGroups:
    """The groups of a run. In mode `batched` all edges have the same one."""

    mode: str
    groups: Mapping[Edge, Any]

    def post_sends(self, tensors: Sequence[Tensor], source: int, destination: int) -> list[dist.Work]:
        """Start sending the tensors of a message, of which none is empty."""
        group = self.groups[source, destination]
        if self.mode == BATCHED:
            return _posted([dist.P2POp(dist.isend, tensor, destination, group) for tensor in tensors])
        return [_started(dist.isend(tensor, destination, group)) for tensor in tensors]

    def post_receives(self, tensors: Sequence[Tensor], source: int, destination: int) -> list[dist.Work]:
        """Start receiving the tensors of a message, of which none is empty."""
        group = self.groups[source, destination]
        if self.mode == BATCHED:
            return _posted([dist.P2POp(dist.irecv, tensor, source, group) for tensor in tensors])
        return [_started(dist.irecv(tensor, source, group)) for tensor in tensors]


def make_edge_groups(plan: LaunchPlan, mode: str, backend: str, timeout: timedelta) -> EdgeGroups:
    """Make the groups. All workers of the run call this, those outside of the plan's stages with them."""
    assert mode in (NCCL, BATCHED)
    pairs = edges(plan)
    if mode == BATCHED:
        group = dist.new_group(list(plan.active), timeout=timeout, backend=backend)
        return EdgeGroups(mode, dict.fromkeys(pairs, group))
    return EdgeGroups(mode, {pair: dist.new_group(sorted(pair), timeout=timeout, backend=backend) for pair in pairs})


def try_edges(groups: EdgeGroups, rank: int, device: torch.device) -> None:
    """Send a number over each edge of this worker, in sorted order, so that NCCL connects before training begins.

    Raises `RuntimeError` if a message does not come, or comes wrong.
    """
    for source, destination in sorted(groups.groups):
        number = source * 7919 + destination + 1
        if rank == source:
            tensor = torch.full((1,), number, dtype=torch.int64, device=device)
            works = groups.post_sends([tensor], source, destination)
        elif rank == destination:
            tensor = torch.zeros(1, dtype=torch.int64, device=device)
            works = groups.post_receives([tensor], source, destination)
        else:
            continue
        for work in works:
            work.wait()
        if int(tensor) != number:
            raise RuntimeError(f"a message from rank {source} to rank {destination} came wrong")


def _posted(operations: Sequence[Any]) -> list[dist.Work]:
    works: list[dist.Work] = []
    for first in range(0, len(operations), MOST_IN_A_BATCH):
        works += dist.batch_isend_irecv(list(operations[first : first + MOST_IN_A_BATCH]))
    return works


def _started(work: dist.Work | None) -> dist.Work:
    """`work`, which is None only in a process outside the group."""
    assert work is not None
    return work
