"""Averages the gradients of a stage's replicas at every update, and the replicas' buffers at the end of a segment.

Gradients are all-reduced in flat buckets (`buckets`). torch's DDP cannot be used: with several minibatches in flight,
its hooks miss the second backward pass. The all-reduces of a group of minibatches start

- bucket by bucket, if the previous all-reduce is done: as soon as the backward pass of this replica's last minibatch
  of the group has filled a bucket. Plain data parallelism and schedules with a flush do this;
- at action R (see `schedule`) if the previous all-reduce still runs, as in stages whose updates are late. There
  the all-reduce has a whole round to finish, and an earlier start would need a second set of buckets.

If transfers are in the common order (`ordered_transport`), the host hands over all all-reduces of a group together, at
their place in that order, after R. The host is ahead of the device. So on the device an all-reduce still starts in the
middle of the backward pass, when its bucket is full.

In all cases all replicas start the all-reduces in the same order. At R, gradients that are missing become zeros and
the remaining buckets are sent; action U waits for all of them.

A gradient is multiplied by share / total as it is written to its bucket. `share` is its minibatch's part of the group's
samples and `total` the sum of these shares over the group, so the sum over replicas is the mean over samples. The total
is not known in advance if the segment is ended early or the job weighs minibatches by their targets. So the shares are
also summed over the replicas, and the mean is corrected.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_until_done
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeplan_launch.comm.buckets import (
    Bucket,
    BucketExchange,
    UpdateGroup,
    as_real,
    make_buckets,
    refuse_sparse,
)
from pipeplan_launch.devices.backend import Lane, Streams
from pipeplan_launch.errors import LaunchError


class GradientReducer:
    """Averages the gradients of one group of minibatches after another over the replicas of a stage."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        group: dist.ProcessGroup | None,
        exchange: BucketExchange | None = None,
        streams: Streams | None = None,
        stages: int = 1,
        bucket_bytes: int | None = None,
    ) -> None:
        """`parameters`: the trained parameters, in the order of their first use. `group`: the stage's replicas, None if
        there is only one. `exchange`: None for the exact mean. `streams`: the device's streams, if all-reduces are
        handed over only at `launch`; None if they start as early as they can. `stages`: the number of stages in the
        group, if several have a copy of the parameters; their means are summed. `bucket_bytes`: as for `make_buckets`.
        """
        self._bucket_bytes = bucket_bytes
        self._stages = stages
        self._streams = streams
        self._to_launch: list[tuple[Tensor, Any]] = []
        """Tensors whose all-reduce waits for `launch`. A mark on the computing stream shows when each tensor is
        full."""
        self._parameters = dict(parameters)
        self._group, self._exchange = group, exchange
        self._thread = None if exchange is None else ThreadPoolExecutor(1, "averaging")
        self._buckets: list[Bucket] | None = None  # made at the first update, because a stage may never be trained
        self._bucket_of: dict[str, Bucket] = {}
        self._pending: dict[str, Tensor] = {}
        """Sums of gradients over the minibatches of the group being collected, each multiplied by its share."""
        self._share_sum = 0.0
        """Sum of the shares of the group being collected."""
        self._single_replica_sums: tuple[dict[str, Tensor], float] = ({}, 1.0)
        """(gradients, sum of shares) of a collected group, if the stage has one replica."""
        self._sending: UpdateGroup | None = None
        """The group that is being sent, from its first bucket until `finish`."""
        self.begun_s = 0.0
        """Time at which the first bucket of the latest group was sent, by `time.perf_counter`."""
        self._next_bucket = 0
        """Index of the bucket to send next."""
        self._waits: list[Callable[[], object]] = []
        self._share_total = torch.zeros(1, dtype=torch.float64)
        self._share: float | None = None
        """Share of the minibatch whose backward pass runs, while hooks take its gradients; else None."""
        self._sends = False
        """Whether the hooks write gradients straight into the buckets."""
        self._hooked_leaves: Mapping[str, Tensor] | None = None
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    def reset(self) -> None:
        """Begin a segment: drop the gradients that the exchange still holds back."""
        if self._exchange is not None:
            self._exchange.reset()

    @contextmanager
    def backward(self, leaves: Mapping[str, Tensor], share: float, final: UpdateGroup | None) -> Iterator[None]:
        """Context for the backward pass of one of this replica's minibatches. `leaves`: by parameter name.

        `final`: the group, if this is the replica's last minibatch of the group; else None. After the context the
        caller passes the gradients that are still on the leaves to `add`.
        """
        sends = final is not None and self._group is not None and self._sending is None
        if not sends and not self._pending:  # there is nothing to send or to add to during the pass
            yield
            return
        self._register_hooks(leaves)
        if sends:
            assert final is not None
            self._begin_sending(final, self._share_sum + share)
        self._share, self._sends = share, sends
        try:
            yield
        finally:
            self._share = None

    def add(self, gradients: Mapping[str, Tensor], share: float = 1.0) -> None:
        """Add the gradients of one of this replica's minibatches, by parameter name, to the group being collected.

        `share`: the minibatch's weight in the group's mean. The reducer owns the tensors from now on.
        """
        self._share_sum += share
        for name, gradient in gradients.items():
            if name in self._parameters:
                self._accumulate(name, gradient, share)

    def start(self, update: UpdateGroup) -> None:
        """Send the buckets of the collected group that have not been sent. Missing gradients are sent as zeros."""
        if self._group is None:
            self._single_replica_sums, self._pending = (self._pending, self._share_sum), {}
            self._share_sum = 0.0
            return
        if self._sending is None:
            self._begin_sending(update, self._share_sum)
        for bucket in self._unsent_buckets():
            for name in bucket.views.keys() & self._pending.keys():
                self._write_to_bucket(name, None, 0.0)
            self._send_bucket(bucket)
        self._pending, self._share_sum = {}, 0.0

    def launch(self) -> None:
        """Start the all-reduces of the group that `start` has collected, if they have not started yet."""
        if self._streams is None:
            return
        tensors, self._to_launch = self._to_launch, []
        for tensor, filled in tensors:
            with self._streams.beside(Lane.COLLECTIVES, filled):
                self._start_sum(tensor)

    def finish(self) -> dict[str, Tensor]:
        """Wait for the weighted mean of the group's gradients, by parameter name.

        Parameters for which no replica has a gradient are left out. The next group overwrites the tensors.
        """
        if self._group is None:
            averaged, weight = self._single_replica_sums
            self._single_replica_sums = ({}, 1.0)
            return averaged if weight in (0.0, 1.0) else {name: one.div_(weight) for name, one in averaged.items()}
        assert self._sending is not None
        waits, self._waits = self._waits, []
        for wait in waits:
            wait()
        expected, weight = self._sending.total, float(self._share_total) / self._stages
        self._sending = None
        result: dict[str, Tensor] = {}
        for bucket in self._buckets or ():
            if weight and abs(weight - expected) > 1e-9 * expected:
                bucket.values.mul_(expected / weight)
            result |= bucket.present()
        return result

    def _register_hooks(self, leaves: Mapping[str, Tensor]) -> None:
        """Register hooks through which autograd hands over each gradient of these leaves once it is complete."""
        if leaves is self._hooked_leaves:
            return
        for hook in self._hooks:
            hook.remove()
        self._hooked_leaves = leaves
        self._hooks = [
            leaves[name].register_post_accumulate_grad_hook(partial(self._on_gradient, name))  # type: ignore[no-untyped-call]
            for name in self._parameters
        ]

    def _on_gradient(self, name: str, leaf: Tensor) -> None:
        gradient, share = leaf.grad, self._share
        if share is None or gradient is None:
            return
        leaf.grad = None
        if not self._sends:
            self._accumulate(name, gradient, share)
            return
        self._write_to_bucket(name, gradient, share)
        assert self._buckets is not None
        for bucket in self._unsent_buckets():
            if not bucket.is_full:
                break
            self._send_bucket(bucket)

    def _accumulate(self, name: str, gradient: Tensor, share: float) -> None:
        if self._group is not None:
            refuse_sparse(name, gradient)
        before = self._pending.get(name)
        if before is not None:
            before.add_(gradient, alpha=share)
        else:
            self._pending[name] = gradient if share == 1.0 else gradient.mul_(share)

    def _write_to_bucket(self, name: str, gradient: Tensor | None, share: float) -> None:
        """Write a parameter's collected gradient plus this one into its bucket."""
        bucket, total = self._bucket_of.get(name), self._pending.pop(name, None)
        if bucket is None:
            return  # the parameter has no elements
        assert self._sending is not None
        scale = (1.0 if self._exchange is None else self._exchange.scale) / self._sending.total
        view = bucket.views[name]
        if gradient is not None:
            refuse_sparse(name, gradient)
        if name in bucket.filled:
            if bucket.index < self._next_bucket or gradient is None:
                raise LaunchError(
                    f"the backward pass made the gradient of {name!r} again after it was sent to the other replicas: "
                    "solve for a plan without replicas of its stage"
                )
            view.add_(gradient, alpha=share * scale)
            return
        if total is None:
            assert gradient is not None
            torch.mul(gradient, share * scale, out=view)
        else:
            torch.mul(total if gradient is None else total.add_(gradient, alpha=share), scale, out=view)
        bucket.filled.add(name)

    def _begin_sending(self, update: UpdateGroup, weight: float) -> None:
        """Begin to send a group. `weight`: sum of the shares of this replica's minibatches."""
        if self._buckets is None:
            self._buckets = make_buckets(self._parameters, self._bucket_bytes)
            self._bucket_of = {name: bucket for bucket in self._buckets for name in bucket.views}
        self._sending, self._next_bucket = update, 0
        self.begun_s = time.perf_counter()
        for bucket in self._buckets:
            bucket.filled.clear()
        self._share_total.fill_(weight)
        if self._buckets:
            self._sum(self._share_total)

    def _unsent_buckets(self) -> Sequence[Bucket]:
        return (self._buckets or ())[self._next_bucket :]

    def _send_bucket(self, bucket: Bucket) -> None:
        assert self._sending is not None
        self._next_bucket += 1
        bucket.complete()
        if self._exchange is None:
            self._sum(bucket.flat)
        else:
            assert self._thread is not None
            draws = self._exchange.draws(bucket, self._sending)
            averaging = self._thread.submit(self._exchange, bucket, self._sending)
            if draws:  # a concurrent forward pass would draw different numbers for its dropout
                wait_until_done([averaging])
            self._waits.append(averaging.result)

    def _sum(self, tensor: Tensor) -> None:
        if self._streams is None:
            self._start_sum(tensor)
        else:
            self._to_launch.append((tensor, self._streams.mark()))

    def _start_sum(self, tensor: Tensor) -> None:
        try:
            work = dist.all_reduce(tensor, group=self._group, async_op=True)
        except RuntimeError as error:  # `finish` raises it; in a backward pass it would look like the model's error
            self._waits.append(partial(_raise, error))
        else:
            if work is not None:
                self._waits.append(work.wait)


def _raise(error: Exception) -> None:
    raise error


def _mean(buffer: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The replicas' mean; exactly their value if all agree, because a constant must not drift by rounding."""
    total, high, low = buffer.clone(), buffer.clone(), buffer.clone()
    dist.all_reduce(total, group=group)
    dist.all_reduce(high, op=dist.ReduceOp.MAX, group=group)
    dist.all_reduce(low, op=dist.ReduceOp.MIN, group=group)
    return torch.where(high == low, buffer, total / dist.get_world_size(group))


@torch.no_grad()
def average_buffers(buffers: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Replace each buffer by the replicas' mean (floating-point buffers) or maximum (integer counters).

    Buffers are running statistics and counters. Boolean buffers are left alone.
    """
    for buffer in map(as_real, buffers):
        if buffer.is_floating_point():
            buffer.copy_(_mean(buffer, group))
        elif buffer.dtype == torch.bool:
            continue
        else:
            dist.all_reduce(buffer, op=dist.ReduceOp.MAX, group=group)
