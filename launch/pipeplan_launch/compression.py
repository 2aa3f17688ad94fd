"""Gradients compressed among the replicas of a stage, by the communication hooks that torch has for its DDP.

A hook takes a `dist.GradBucket`, which only torch's own reducer can make (it has no constructor); `HookBucket` stands
in for it. A hook averages over the replicas, so gradients are multiplied by their number beforehand.

PowerSGD (Vogels et al., NeurIPS 2019) sends two thin matrices instead of each large gradient. What they leave out stays
on the replica and is added to its next gradient. The last update of a segment is averaged exactly, with all that was
held back: so nothing is lost, a checkpoint need not hold any of it, and a run that goes on from one is bitwise that
which was not interrupted. A segment that is ended early (by a signal) loses what is held back at that moment.

Hooks wait for one another inside of callbacks, for which Gloo has two threads: several buckets at once could block
each other, or start their sums in another order on another replica. So one bucket travels after the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeplan_launch.averaging import Compression
from pipeplan_launch.buckets import Bucket, Round

if TYPE_CHECKING:
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState


class HookBucket:
    """What hooks call of a `dist.GradBucket`."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket, self._buffer = bucket, bucket.values

    def index(self) -> int:
        """Its place among the buckets."""
        return self._bucket.index

    def is_last(self) -> bool:
        """Whether it is the last of the update."""
        return self._bucket.is_last

    def buffer(self) -> Tensor:
        """All gradients in one dimension."""
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        """Replace them."""
        self._buffer = buffer

    def gradients(self) -> list[Tensor]:
        """Each gradient in its shape; a single number in a shape of one dimension, as hooks ask for the first."""
        return [view if view.dim() else view.view(1) for view in self._bucket.views.values()]

    def parameters(self) -> list[Tensor]:
        """What the gradients are of."""
        return list(self._bucket.parameters.values())


class Bfloat16:
    """Gradients travel as bfloat16, and are summed in it."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self.scale = group, float(group.size())

    def __call__(self, bucket: Bucket, of: Round) -> None:
        """Average a bucket."""
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

        _run(bf16_compress_hook, self._group, bucket)
        dist.all_reduce(bucket.flags, group=self._group)

    def draws(self, bucket: Bucket, of: Round) -> bool:
        """Nothing is random."""
        return False

    def reset(self) -> None:
        """Nothing is held back."""


class PowerSGD:
    """Gradients travel as two thin matrices each, where that makes them smaller by half at least."""

    def __init__(self, group: dist.ProcessGroup, rank: int, exact: int) -> None:
        """`rank`: columns of the matrices. `exact`: how many of the job's first updates are averaged exactly."""
        self._group, self.scale = group, float(group.size())
        self._rank, self._exact = rank, exact
        self._state: PowerSGDState | None = None

    def __call__(self, bucket: Bucket, of: Round) -> None:
        """Average a bucket."""
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import powerSGD_hook

        if self._is_exact(of):
            self._add_what_was_held_back(bucket)
            _run(allreduce_hook, self._group, bucket)
        else:
            state = self._state or self._new_state(of)
            _run(powerSGD_hook, state, bucket)
            _begin_anew_where_zero(state.q_memory_dict[bucket.index], of.number)
        dist.all_reduce(bucket.flags, group=self._group)

    def draws(self, bucket: Bucket, of: Round) -> bool:
        """torch's hook seeds the process's generator, draws the first matrices, and puts it back."""
        return not self._is_exact(of) and (self._state is None or bucket.index not in self._state.q_memory_dict)

    def reset(self) -> None:
        """Forget what was held back, and the matrices that the next update would begin with."""
        self._state = None

    def _is_exact(self, of: Round) -> bool:
        return of.whole or of.number < self._exact

    def _add_what_was_held_back(self, bucket: Bucket) -> None:
        held = None if self._state is None else self._state.error_dict.pop(bucket.index, None)
        if held is not None:
            bucket.values.add_(held)
        if bucket.is_last:
            self.reset()

    def _new_state(self, of: Round) -> PowerSGDState:
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

        self._state = state = PowerSGDState(
            self._group,
            matrix_approximation_rank=self._rank,
            start_powerSGD_iter=2,  # the least that torch takes, as its DDP orders its buckets anew after an update
            orthogonalization_epsilon=1e-8,  # a parameter without a gradient would give 0 / 0
            random_seed=of.number % 2**32,
        )
        state.iter = state.start_powerSGD_iter
        return state


def compressed(group: dist.ProcessGroup, how: Compression) -> Bfloat16 | PowerSGD:
    """The exchange for one stage's replicas."""
    return Bfloat16(group) if how.kind == "bf16" else PowerSGD(group, how.rank, how.exact)


def _begin_anew_where_zero(starting: Tensor, seed: int) -> None:
    """The next update begins with these columns, the same on all replicas. One of zeros would stay so for ever: what it
    stands for, a parameter that no minibatch of this group used, would never travel.
    """
    empty = starting == 0
    if bool(empty.any()):
        generator = torch.Generator().manual_seed(seed)
        fresh = torch.randn(starting.shape, generator=generator, dtype=torch.float32)
        starting[empty] = fresh.to(starting)[empty]


def _run(hook: Any, state: object, bucket: Bucket) -> None:
    future: torch.futures.Future[Tensor] = hook(state, HookBucket(bucket))
    result = future.wait()
    if result.data_ptr() != bucket.values.data_ptr():
        bucket.values.copy_(result)
