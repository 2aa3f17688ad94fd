"""Flat buckets, in which the gradients of a stage travel among its replicas.

A bucket closes once it holds so many bytes. The buckets are in the order in which backward fills them, and the first
one is small, so that something travels early. The sizes are those of torch's DDP (Li et al., PyTorch Distributed,
VLDB 2020).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

FIRST_BUCKET_BYTES = 2**20
BUCKET_BYTES = 25 * 2**20


def close_at(size: int) -> None:
    """Have the buckets made from now on close at so many bytes, all of them: where bytes stand for more than one."""
    global FIRST_BUCKET_BYTES, BUCKET_BYTES
    FIRST_BUCKET_BYTES = BUCKET_BYTES = size


class Bucket:
    """Some parameters of one type on one device. Its memory is allocated once."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], index: int, is_last: bool) -> None:
        """`index`: its place among the buckets. `is_last`: whether it is the last to travel."""
        first = next(iter(parameters.values()))
        total = sum(parameter.numel() for parameter in parameters.values())
        self.index, self.is_last = index, is_last
        self.parameters = dict(parameters)
        self.flat = torch.zeros(total + len(parameters), dtype=first.dtype, device=first.device)
        """The gradients, one after another, then one number a parameter: how many replicas have one."""
        self.values, self.flags = self.flat[:total], self.flat[total:]
        sizes = [parameter.numel() for parameter in parameters.values()]
        self.views = {
            name: view.view(parameter.shape)
            for (name, parameter), view in zip(parameters.items(), torch.split(self.values, sizes), strict=True)
        }
        """Where each parameter's gradient lies in `flat`, in the parameter's shape."""
        self.filled: set[str] = set()
        """Parameters whose gradient this replica has put in."""

    @property
    def is_full(self) -> bool:
        """Whether this replica has put in a gradient for every parameter."""
        return len(self.filled) == len(self.views)

    def complete(self) -> None:
        """Zeros for what was not put in, and the flags: the bucket may travel."""
        self.flags.fill_(1.0)
        if self.is_full:
            return
        for number, (name, view) in enumerate(self.views.items()):
            if name not in self.filled:
                view.zero_()
                self.flags[number] = 0.0

    def present(self) -> Mapping[str, Tensor]:
        """After the exchange: what is left of the gradients, for the parameters for which any replica has one."""
        if self.is_full:  # and so without reading the flags, for which a GPU would have to be waited for
            return self.views
        counts = self.flags.tolist()
        return {name: view for (name, view), count in zip(self.views.items(), counts, strict=True) if count > 0}


@dataclass(frozen=True)
class Round:
    """One group of minibatches, whose gradients make one update. The same on all replicas of the stage."""

    total: float = 1.0
    """The shares of all its minibatches, on all replicas, as far as was known when the segment began."""
    number: int = 0
    """Updates of this stage before it, since the job began."""
    whole: bool = False
    """Whether nothing may be held back: it is the segment's last."""


class Exchange(Protocol):
    """A way other than a plain sum to average a bucket over replicas. Called in a thread of its own, in order."""

    scale: float
    """What gradients are multiplied by beforehand."""

    def __call__(self, bucket: Bucket, of: Round) -> None:
        """Make `bucket.values` what all replicas agree on, and `bucket.flags` their sum over the replicas."""
        ...

    def draws(self, bucket: Bucket, of: Round) -> bool:
        """Whether averaging this bucket will take random numbers from the generator that all of the process shares."""
        ...

    def reset(self) -> None:
        """Forget what was held back."""
        ...


def make_buckets(parameters: Mapping[str, nn.Parameter]) -> list[Bucket]:
    """Buckets for the parameters of a stage, which are given in the order of their first use in the forward pass.

    A bucket holds one type on one device. They come in the order in which backward puts the last gradient into each.
    """
    closed: list[list[str]] = []
    filling: dict[tuple[torch.dtype, torch.device], tuple[list[str], int]] = {}
    for name, parameter in reversed(list(parameters.items())):
        kind, size = (parameter.dtype, parameter.device), parameter.numel() * parameter.element_size()
        if size == 0:
            continue
        # Taken out and put back in, so that the kinds stay in the order of their latest gradient.
        names, room = filling.pop(kind, ([], BUCKET_BYTES if closed else FIRST_BUCKET_BYTES))
        names.append(name)
        if size < room:
            filling[kind] = (names, room - size)
        else:
            closed.append(names)
    closed += [names for names, _ in filling.values()]
    last = len(closed) - 1
    return [Bucket({n: parameters[n] for n in names}, index, index == last) for index, names in enumerate(closed)]


def places(buckets: Sequence[Bucket]) -> dict[str, Bucket]:
    """Which bucket each parameter's gradient goes into."""
    return {name: bucket for bucket in buckets for name in bucket.views}
