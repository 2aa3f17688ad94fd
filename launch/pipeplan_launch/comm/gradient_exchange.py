"""Chooses how the replicas of a stage average their gradients, from the options of the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from pipeplan_launch.comm.buckets import Bucket, BucketExchange, UpdateGroup
from pipeplan_launch.comm.gaia_filter import SignificanceFilter, StepSizes
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.plan.launch_plan import LaunchPlan
from pipeplan_launch.plan.run_options import BFLOAT16, Compression, GradientAveraging

if TYPE_CHECKING:
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

# Compresses gradients among the replicas of a stage by the communication hooks that torch has for its DDP.
#
# A hook takes a `dist.GradBucket`, which only torch's own reducer can make (it has no constructor); `HookBucket` takes
# its place. A hook averages over the replicas, so gradients are multiplied by the number of replicas beforehand.
#
# PowerSGD (Vogels et al., NeurIPS 2019) sends two thin matrices instead of each large gradient. The approximation
# error stays on the replica and is added to its next gradient. The last update of a segment is averaged exactly and
# includes all errors held back. So no gradient is lost, a checkpoint does not have to store the errors, and a resumed
# run is bitwise equal to an uninterrupted one. A segment that a signal ends early loses the errors that are held back
# at that moment.
#
# Hooks wait for each other inside callbacks, for which Gloo has two threads. Several buckets at once could block each
# other, or start their sums in different orders on different replicas. So buckets are sent one after another.


class HookBucket:
    """The part of a `dist.GradBucket` that hooks use."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket, self._buffer = bucket, bucket.values

    def index(self) -> int:
        """Position of the bucket among the stage's buckets."""
        return self._bucket.index

    def is_last(self) -> bool:
        """Whether it is the last bucket of the update."""
        return self._bucket.is_last

    def buffer(self) -> Tensor:
        """All gradients, in one flat tensor."""
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        """Replace the tensor of all gradients."""
        self._buffer = buffer

    def gradients(self) -> list[Tensor]:
        """Each gradient as real numbers. A scalar gets one dimension, because hooks read the size of the first
        dimension.
        """
        return [view if view.dim() else view.view(1) for view in self._bucket.real_views.values()]

    def parameters(self) -> list[Tensor]:
        """The parameters to which the gradients belong."""
        return list(self._bucket.parameters.values())


class Bfloat16Exchange(BucketExchange):
    """Sends and sums gradients as bfloat16."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self.scale = group, float(group.size())

    def __call__(self, bucket: Bucket, update: UpdateGroup) -> None:
        """Average a bucket."""
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

        _run(bf16_compress_hook, self._group, bucket)
        dist.all_reduce(bucket.flags, group=self._group)


class PowerSGDExchange(BucketExchange):
    """Sends each gradient as two thin matrices, if these have at most half of its size."""

    def __init__(self, group: dist.ProcessGroup, rank: int, exact: int) -> None:
        """`rank`: columns of the matrices. `exact`: number of the job's first updates that are averaged exactly."""
        self._group, self.scale = group, float(group.size())
        self._rank, self._exact = rank, exact
        self._state: PowerSGDState | None = None

    def __call__(self, bucket: Bucket, update: UpdateGroup) -> None:
        """Average a bucket."""
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import powerSGD_hook

        if self._is_exact(update):
            self._add_held_back_error(bucket)
            _run(allreduce_hook, self._group, bucket)
        else:
            state = self._state or self._new_state(update)
            _run(powerSGD_hook, state, bucket)
            _redraw_zero_columns(state.q_memory_dict[bucket.index], update.number)
        dist.all_reduce(bucket.flags, group=self._group)

    def draws(self, bucket: Bucket, update: UpdateGroup) -> bool:
        """Whether torch's hook draws first matrices for the bucket. It then seeds and restores the global generator."""
        return not self._is_exact(update) and (self._state is None or bucket.index not in self._state.q_memory_dict)

    def reset(self) -> None:
        """Drop the errors that were held back, and the matrices with which the next update would begin."""
        self._state = None

    def _is_exact(self, update: UpdateGroup) -> bool:
        return update.ends_segment or update.number < self._exact

    def _add_held_back_error(self, bucket: Bucket) -> None:
        held = None if self._state is None else self._state.error_dict.pop(bucket.index, None)
        if held is not None:
            bucket.values.add_(held)
        if bucket.is_last:
            self.reset()

    def _new_state(self, update: UpdateGroup) -> PowerSGDState:
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

        self._state = state = PowerSGDState(
            self._group,
            matrix_approximation_rank=self._rank,
            start_powerSGD_iter=2,  # torch's minimum, because its DDP reorders buckets after the first update
            orthogonalization_epsilon=1e-8,  # avoids 0 / 0 for parameters without a gradient
            random_seed=update.number % 2**32,
        )
        state.iter = state.start_powerSGD_iter
        return state


def compressed_exchange(group: dist.ProcessGroup, how: Compression) -> Bfloat16Exchange | PowerSGDExchange:
    """The exchange that compresses the gradients of one stage's replicas."""
    return Bfloat16Exchange(group) if how.kind == BFLOAT16 else PowerSGDExchange(group, how.rank, how.exact)


def _redraw_zero_columns(starting: Tensor, seed: int) -> None:
    """Replace zero columns of the next update's first matrix by random numbers, the same on all replicas.

    A column is zero if no minibatch of this group used the parameter. Such a column would stay zero for ever, and its
    part of the gradient would never be sent.
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


def choose_exchange(
    averaging: GradientAveraging,
    plan: LaunchPlan,
    stage: int,
    rank: int,
    group: dist.ProcessGroup | None,
    optimizer: Optimizer | None,
    weighted: bool = False,
) -> BucketExchange | None:
    """The exchange that a worker of a stage uses in place of the exact mean.

    Returns None for the exact mean: if no option asks for an exchange, if the stage has one replica (`group` is None),
    and for `--significance` if all replicas are on one server. Raises `LaunchError` if the exchange holds gradients
    back and minibatches are `weighted`, because the gradients' scale is then known only after the exchange.
    """
    if group is None or optimizer is None:
        return None
    is_powersgd = averaging.compression is not None and averaging.compression.kind == "powersgd"
    if weighted and (averaging.significance is not None or is_powersgd):
        option = "--significance" if averaging.significance is not None else "--compress powersgd"
        raise LaunchError(
            f"{option} holds parts of gradients back for later updates, whose minibatches have other weights under the "
            "job's loss_weight: run with --compress bf16, or with neither"
        )
    if averaging.compression is not None:
        return compressed_exchange(group, averaging.compression)
    servers = plan.workers_by_server(stage)
    if averaging.significance is None or len(servers) == 1:
        return None
    return SignificanceFilter(servers, group, averaging.significance, StepSizes(optimizer))


def note_on_unused_option(averaging: GradientAveraging, plan: LaunchPlan) -> str | None:
    """Message about an averaging option that changes nothing under this plan; None if there is no such option."""
    stages = range(len(plan.pipeline))
    if averaging.compression is not None and all(len(stage.workers) == 1 for stage in plan.pipeline):
        return "--compress changes nothing, as no stage of the plan has replicas"
    if averaging.shards_optimizer and all(len(stage.workers) == 1 for stage in plan.pipeline):
        return "--shard-optimizer changes nothing, as no stage of the plan has replicas"
    if averaging.significance is not None and all(len(plan.workers_by_server(stage)) == 1 for stage in stages):
        return "--significance changes nothing, as no stage of the plan has replicas on several servers"
    return None
