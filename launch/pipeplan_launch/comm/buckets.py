"""Flat buckets in which the gradients of a stage are all-reduced among its replicas.

A bucket closes once it holds `BUCKET_BYTES`. The buckets are in the order in which the backward pass fills them. The
first bucket is smaller, so that the first all-reduce starts early. torch's DDP has the same sizes (Li et al., PyTorch
Distributed, VLDB 2020).

A bucket holds a complex gradient as pairs of real numbers, so every exchange and compression sees real numbers only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pipeplan_launch.errors import LaunchError

FIRST_BUCKET_BYTES = 2**20
BUCKET_BYTES = 25 * 2**20


def as_real(tensor: Tensor) -> Tensor:
    """A complex tensor viewed as real numbers, with a last dimension of two. Other tensors are returned unchanged."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


class Bucket:
    """The gradients of some parameters of one dtype on one device. The memory is allocated once."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], index: int, is_last: bool) -> None:
        """`index`: position among the buckets. `is_last`: whether it is the last bucket of an update."""
        first = next(iter(parameters.values()))
        shapes = [as_real(parameter.detach()).shape for parameter in parameters.values()]
        sizes = [shape.numel() for shape in shapes]
        total = sum(sizes)
        self.index, self.is_last = index, is_last
        self.parameters = dict(parameters)
        self.flat = torch.zeros(total + len(parameters), dtype=first.dtype.to_real(), device=first.device)
        """All gradients one after another, then one flag per parameter: the number of replicas with a gradient."""
        self.values, self.flags = self.flat[:total], self.flat[total:]
        parts = zip(parameters, torch.split(self.values, sizes), shapes, strict=True)
        self.real_views = {name: part.view(shape) for name, part, shape in parts}
        """View of each parameter's gradient in `flat`, as real numbers (`as_real`)."""
        is_complex = first.dtype.is_complex
        self.views = {n: torch.view_as_complex(one) if is_complex else one for n, one in self.real_views.items()}
        """View of each parameter's gradient in `flat`, in the parameter's shape and type."""
        self.filled: set[str] = set()
        """Parameters whose gradient this replica has written."""

    @property
    def is_full(self) -> bool:
        """Whether this replica has written a gradient for every parameter."""
        return len(self.filled) == len(self.views)

    def complete(self) -> None:
        """Set the flags, and set gradients that were not written to zero. The bucket may then be sent."""
        self.flags.fill_(1.0)
        if self.is_full:
            return
        for number, (name, view) in enumerate(self.views.items()):
            if name not in self.filled:
                view.zero_()
                self.flags[number] = 0.0

    def present(self) -> Mapping[str, Tensor]:
        """The averaged gradients after the exchange. Parameters without a gradient on any replica are left out."""
        if self.is_full:  # reading the flags would wait for the GPU
            return self.views
        counts = self.flags.tolist()
        return {name: view for (name, view), count in zip(self.views.items(), counts, strict=True) if count > 0}


@dataclass(frozen=True)
class UpdateGroup:
    """A group of minibatches whose gradients make one update. The group is the same on all replicas of the stage."""

    total: float = 1.0
    """Sum of the shares of the group's minibatches over all replicas, as expected when the segment began."""
    number: int = 0
    """Number of updates that the stage has made before this one, since the job began."""
    ends_segment: bool = False
    """Whether the group is the last group of the segment. The exchange then sends everything that it held back."""


class BucketExchange:
    """Averages a bucket over replicas, in place of a plain sum. A separate thread calls it, in bucket order."""

    scale = 1.0
    """Factor that gradients are multiplied by before the exchange."""

    def __call__(self, bucket: Bucket, update: UpdateGroup) -> None:
        """Replace `bucket.values` by a value that all replicas share, and `bucket.flags` by their sum over replicas."""
        raise NotImplementedError

    def draws(self, bucket: Bucket, update: UpdateGroup) -> bool:
        """Whether averaging this bucket draws random numbers from the process's global generator."""
        return False

    def reset(self) -> None:
        """Drop the gradients that were held back."""


def make_buckets(parameters: Mapping[str, nn.Parameter], bucket_bytes: int | None = None) -> list[Bucket]:
    """The buckets of a stage, in the order in which the backward pass completes them.

    `parameters`: in the order of their first use in the forward pass. A bucket holds one dtype on one device.
    `bucket_bytes`: one size for all buckets; None for `FIRST_BUCKET_BYTES` and `BUCKET_BYTES`. Emulated stages set it,
    because each of their bytes represents several bytes of the model.
    """
    first_bytes, later_bytes = (bucket_bytes or FIRST_BUCKET_BYTES), (bucket_bytes or BUCKET_BYTES)
    closed: list[list[str]] = []
    filling: dict[tuple[torch.dtype, torch.device], tuple[list[str], int]] = {}
    for name, parameter in reversed(list(parameters.items())):
        kind, size = (parameter.dtype, parameter.device), parameter.numel() * parameter.element_size()
        if size == 0:
            continue
        # Popped and inserted again, so that the kinds stay in the order of their latest gradient.
        names, room = filling.pop(kind, ([], later_bytes if closed else first_bytes))
        names.append(name)
        if size < room:
            filling[kind] = (names, room - size)
        else:
            closed.append(names)
    closed += [names for names, _ in filling.values()]
    last = len(closed) - 1
    return [Bucket({n: parameters[n] for n in names}, index, index == last) for index, names in enumerate(closed)]


def refuse_sparse(name: str, gradient: Tensor) -> None:
    """Raise `LaunchError` for a sparse gradient, which cannot be averaged among replicas."""
    if gradient.layout is not torch.strided:
        raise LaunchError(
            f"the gradient of {name!r} is sparse, which a stage with replicas does not support, nor one that shares it "
            "with another stage: build its layer with sparse=False, or solve for a plan without replicas of it"
        )
