"""Activations and gradients between neighbouring stages.

Point-to-point over Gloo, in CPU memory; a stage on a GPU copies through pinned memory. Every tensor of every minibatch
has a tag of its own, so receives can be posted ahead, in any order, and wait in schedule order. A send returns at once
and keeps its tensor until it is done.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum

import torch
import torch.distributed as dist
from torch import Tensor

from pipeplan_launch.errors import LaunchError

_TAGS = 2**31
_PLACE = re.compile(r"^\[[^]]*:\d+\] ")


class Direction(IntEnum):
    """What a message holds."""

    ACTIVATIONS = 0
    """From a stage to the next."""
    GRADIENTS = 1
    """From a stage to the one before."""


@dataclass(frozen=True)
class Wire:
    """Shape and type of one tensor of a message."""

    shape: tuple[int, ...]
    dtype: torch.dtype


Key = tuple[Direction, int]
"""(direction, minibatch)."""


@dataclass(frozen=True)
class _Transfer:
    peer: int
    tensors: list[Tensor]
    works: list[dist.Work]


class Transport:
    """The messages of one worker. Not for use from several threads."""

    def __init__(self, stage: int, rank: int, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        self._where = f"stage {stage} (rank {rank})"
        self._device = device
        self._group = group
        self._receiving: dict[Key, _Transfer] = {}
        self._sending: dict[Key, _Transfer] = {}

    def post(self, direction: Direction, minibatch: int, source: int, wires: Sequence[Wire]) -> None:
        """Post the receive of a message that will be taken later."""
        tensors = [torch.empty(wire.shape, dtype=wire.dtype, pin_memory=self._on_gpu) for wire in wires]
        transfer = self._receiving[direction, minibatch] = _Transfer(source, tensors, [])
        with explained(self._missing(direction, minibatch, source)):
            for index, tensor in enumerate(tensors):
                if tensor.numel():
                    tag = _tag(direction, minibatch, index, len(tensors))
                    transfer.works.append(_started(dist.irecv(tensor, source, self._group, tag)))

    def take(self, direction: Direction, minibatch: int) -> list[Tensor]:
        """Wait for a posted message. Raises `LaunchError` if it does not come."""
        transfer = self._receiving.pop((direction, minibatch))
        with explained(self._missing(direction, minibatch, transfer.peer)):
            for work in transfer.works:
                work.wait()
        if self._on_gpu:
            return [tensor.to(self._device, non_blocking=True) for tensor in transfer.tensors]
        return transfer.tensors

    def send(self, direction: Direction, minibatch: int, destination: int, tensors: Sequence[Tensor]) -> None:
        """Start sending; the tensors must not be written until `settle` or `drain`."""
        ready = [self._to_wire(tensor.detach()) for tensor in tensors]
        transfer = self._sending[direction, minibatch] = _Transfer(destination, ready, [])
        with explained(self._undelivered(direction, minibatch, destination)):
            for index, tensor in enumerate(ready):
                if tensor.numel():
                    tag = _tag(direction, minibatch, index, len(ready))
                    transfer.works.append(_started(dist.isend(tensor, destination, self._group, tag)))

    def settle(self, direction: Direction, minibatch: int) -> None:
        """Wait until a message has left, if there is one; its memory is then free."""
        transfer = self._sending.pop((direction, minibatch), None)
        if transfer is None:
            return
        with explained(self._undelivered(direction, minibatch, transfer.peer)):
            for work in transfer.works:
                work.wait()

    def drain(self) -> None:
        """Wait until everything sent has left."""
        for direction, minibatch in list(self._sending):
            self.settle(direction, minibatch)

    @property
    def _on_gpu(self) -> bool:
        return self._device.type == "cuda"

    def _to_wire(self, tensor: Tensor) -> Tensor:
        if not self._on_gpu:
            return tensor.contiguous()
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return pinned.copy_(tensor)  # blocks until the GPU has written it: Gloo reads at once

    def _missing(self, direction: Direction, minibatch: int, peer: int) -> str:
        what = f"the {direction.name.lower()} of minibatch {minibatch} from rank {peer}"
        return f"{self._where} waited for {what}, which did not come"

    def _undelivered(self, direction: Direction, minibatch: int, peer: int) -> str:
        return f"{self._where} could not deliver the {direction.name.lower()} of minibatch {minibatch} to rank {peer}"


@contextmanager
def explained(message: str) -> Iterator[None]:
    """Turn what torch.distributed raises when a peer is lost into one line that begins with `message`."""
    try:
        yield
    except RuntimeError as error:
        raise LaunchError(f"{message}: {reason(error)}") from error


def _started(work: dist.Work | None) -> dist.Work:
    """Only a process outside the group gets none."""
    assert work is not None
    return work


def _tag(direction: Direction, minibatch: int, index: int, count: int) -> int:
    """Tags may repeat after 2**31: only messages under way at the same time must differ."""
    return ((minibatch * count + index) * len(Direction) + direction) % _TAGS


def reason(error: BaseException) -> str:
    """What Gloo says went wrong, without where in its source and without its general advice."""
    line = str(error).strip().partition("\n")[0]
    return _PLACE.sub("", line).partition(". This is typically")[0]
