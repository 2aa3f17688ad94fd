"""Averaging among the replicas of a stage: gradients at every update, BatchNorm's statistics when a segment is drained.

Gradients travel in flat buckets that are allocated once. The all-reduce of a group starts at R and is awaited at U. DDP
would not do: with several minibatches in flight its hooks lose the second backward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeplan_launch.errors import LaunchError

BUCKET_BYTES = 25 * 2**20


@dataclass(frozen=True)
class _Bucket:
    flat: Tensor
    """The gradients of some parameters, one after another, then one number a parameter: how many replicas have one."""
    names: tuple[str, ...]
    views: tuple[Tensor, ...]
    """Where each parameter's gradient lies in `flat`, in the parameter's shape."""
    flags: Tensor


class GradientReducer:
    """Averages the gradients of one group of minibatches over the replicas of a stage."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], group: dist.ProcessGroup | None) -> None:
        """`parameters`: those that training changes. `group`: the stage's replicas, None where there is only one."""
        self._parameters = dict(parameters)
        self._group = group
        self._pending: dict[str, Tensor] = {}
        self._weight = 0.0
        self._alone: tuple[dict[str, Tensor], float] = ({}, 1.0)
        """A collected group, where there is nobody to average with."""
        self._works: list[dist.Work] = []
        self._buckets: list[_Bucket] | None = None

    def add(self, gradients: Mapping[str, Tensor], share: float = 1.0) -> None:
        """Take the gradients of one of this replica's minibatches, by parameter name, for the group being collected.

        `share`: the minibatch's weight in the group's mean. The tensors are the reducer's from here on.
        """
        self._weight += share
        for name, gradient in gradients.items():
            if name not in self._parameters:
                continue
            if self._group is not None and gradient.layout is not torch.strided:
                raise LaunchError(
                    f"the gradient of {name!r} is sparse, which a stage with replicas does not support: "
                    "build its layer with sparse=False, or solve for a plan without replicas of it"
                )
            weighted = gradient if share == 1.0 else gradient.mul_(share)
            before = self._pending.get(name)
            self._pending[name] = weighted if before is None else before.add_(weighted)

    def start(self) -> None:
        """The group is collected: start the sum over the replicas; one that has no gradients joins with zeros."""
        if self._group is None:
            self._alone, self._pending = (self._pending, self._weight), {}
            self._weight = 0.0
            return
        if self._buckets is None:
            self._buckets = _make_buckets(self._parameters)
            self._total = torch.zeros(1, dtype=torch.float64)
        self._total.fill_(self._weight)
        for bucket in self._buckets:
            _fill(bucket, self._pending)
        for tensor in (self._total, *(bucket.flat for bucket in self._buckets)):
            work = dist.all_reduce(tensor, group=self._group, async_op=True)
            if work is not None:
                self._works.append(work)
        self._pending, self._weight = {}, 0.0

    def finish(self) -> dict[str, Tensor]:
        """The weighted mean over the group's minibatches, by parameter name; without those that no replica has.

        The tensors are overwritten by the next `start`.
        """
        if self._group is None:
            averaged, weight = self._alone
            self._alone = ({}, 1.0)
            return averaged if weight == 1.0 else {name: one.div_(weight) for name, one in averaged.items()}
        for work in self._works:
            work.wait()
        self._works = []
        weight = float(self._total)
        averaged = {}
        for bucket in self._buckets or ():
            present = bucket.flags.tolist()
            bucket.flat.div_(weight)
            averaged |= {
                name: view for name, view, count in zip(bucket.names, bucket.views, present, strict=True) if count > 0
            }
        return averaged


def _make_buckets(parameters: Mapping[str, nn.Parameter]) -> list[_Bucket]:
    chosen: list[list[str]] = []
    room = 0
    kind: tuple[torch.dtype, torch.device] | None = None
    for name, parameter in parameters.items():
        size = parameter.numel() * parameter.element_size()
        if kind != (parameter.dtype, parameter.device) or size > room:
            chosen.append([])
            kind, room = (parameter.dtype, parameter.device), BUCKET_BYTES
        chosen[-1].append(name)
        room -= size
    return [_make_bucket({name: parameters[name] for name in names}) for names in chosen]


def _make_bucket(parameters: Mapping[str, nn.Parameter]) -> _Bucket:
    first = next(iter(parameters.values()))
    total = sum(parameter.numel() for parameter in parameters.values())
    flat = torch.zeros(total + len(parameters), dtype=first.dtype, device=first.device)
    views = []
    offset = 0
    for parameter in parameters.values():
        views.append(flat[offset : offset + parameter.numel()].view(parameter.shape))
        offset += parameter.numel()
    return _Bucket(flat, tuple(parameters), tuple(views), flat[total:])


def _fill(bucket: _Bucket, gradients: Mapping[str, Tensor]) -> None:
    for name, view in zip(bucket.names, bucket.views, strict=True):
        gradient = gradients.get(name)
        if gradient is None:
            view.zero_()
        else:
            view.copy_(gradient)
    bucket.flags.copy_(torch.tensor([float(name in gradients) for name in bucket.names]))


def _mean(buffer: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The replicas' mean; where they agree already, their very value: a constant must not drift by rounding."""
    total, high, low = buffer.clone(), buffer.clone(), buffer.clone()
    dist.all_reduce(total, group=group)
    dist.all_reduce(high, op=dist.ReduceOp.MAX, group=group)
    dist.all_reduce(low, op=dist.ReduceOp.MIN, group=group)
    return torch.where(high == low, buffer, total / dist.get_world_size(group))


@torch.no_grad()
def average_buffers(buffers: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Make the replicas' buffers equal: the mean of floating ones (running statistics), the largest of counters."""
    for buffer in buffers:
        if buffer.is_floating_point():
            buffer.copy_(_mean(buffer, group))
        elif buffer.dtype == torch.bool:
            continue
        else:
            dist.all_reduce(buffer, op=dist.ReduceOp.MAX, group=group)
