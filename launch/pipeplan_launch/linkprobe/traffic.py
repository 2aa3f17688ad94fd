"""One message, or one all-reduce, as the executor makes them, and their times over sizes.

Messages go through the executor's own transport, both ways at once, with the next receive posted ahead: as between two
stages of a pipeline. All-reduces are torch.distributed's. What carries both is what carries them in a run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Protocol

import torch
import torch.distributed as dist

from pipeplan_launch.slots import Wire
from pipeplan_launch.transport import Direction, Transport

FEWEST, MOST = 3, 40
"""Repeats of one size."""
WARM = 1
CONNECT = 1
"""Operations that nobody times: the first one may have to connect, for seconds where NCCL does."""
ELEMENT_BYTES = 4


class Operation(Protocol):
    """What is timed."""

    def once(self) -> None:
        """Do it, and wait until it is done."""

    def end(self) -> None:
        """It was done for the last time."""


Agree = Callable[[float], float]
"""The largest of the values that all workers give; all wait for each other there."""


class Exchange:
    """Messages of one size with one peer."""

    def __init__(self, transport: Transport, rank: int, peer: int, size: int, first: int, device: torch.device) -> None:
        """`first`: the number of the first message, the same at both ends and never used before."""
        numbers = size // ELEMENT_BYTES
        self._transport, self._peer, self._next, self._device = transport, peer, first, device
        self._wire = Wire((numbers,), torch.float32)
        self._message = torch.ones(numbers, device=device)
        lower = rank < peer
        self._out = Direction.ACTIVATIONS if lower else Direction.GRADIENTS
        self._in = Direction.GRADIENTS if lower else Direction.ACTIVATIONS
        transport.post(self._in, first, peer, [self._wire])

    def once(self) -> None:
        """Send one and take one."""
        self._transport.post(self._in, self._next + 1, self._peer, [self._wire])
        self._swap()

    def end(self) -> None:
        """Take the last one that was posted."""
        self._swap()

    def _swap(self) -> None:
        number = self._next
        self._next += 1
        self._transport.send(self._out, number, self._peer, [self._message])
        self._transport.take(self._in, number)
        self._transport.settle(self._out, number)
        _wait_for(self._device)


class Direct:
    """Messages of one size with one peer, by the process group: what joins two GPUs, where the transport's way is
    through the memory of the host."""

    def __init__(self, rank: int, peer: int, size: int, device: torch.device, group: dist.ProcessGroup | None) -> None:
        numbers = size // ELEMENT_BYTES
        self._peer, self._device, self._group = peer, device, group
        self._out, self._in = torch.ones(numbers, device=device), torch.empty(numbers, device=device)

    def once(self) -> None:
        """Send one and take one."""
        both = [
            dist.P2POp(dist.isend, self._out, self._peer, self._group),
            dist.P2POp(dist.irecv, self._in, self._peer, self._group),
        ]
        for work in dist.batch_isend_irecv(both):
            work.wait()
        _wait_for(self._device)

    def end(self) -> None:
        """Nothing is under way."""


class Reduction:
    """All-reduces of one size in one group."""

    def __init__(self, group: dist.ProcessGroup, size: int, device: torch.device) -> None:
        self._group, self._device = group, device
        self._values = torch.zeros(size // ELEMENT_BYTES, device=device)

    def once(self) -> None:
        """One of them."""
        dist.all_reduce(self._values, group=self._group)
        _wait_for(self._device)

    def end(self) -> None:
        """Nothing is under way."""


@dataclass(frozen=True)
class Limits:
    """When to stop with larger sizes."""

    seconds: float
    """For all sizes together, about."""
    enough_s: float = float("inf")
    """A size whose time is longer than this is the last."""


def over_sizes(
    sizes: Sequence[int], limits: Limits, agree: Agree, make: Callable[[int, int], Operation | None]
) -> tuple[tuple[tuple[int, float], ...], int]:
    """((bytes, median seconds) by size, operations counted): what every worker does at the same time.

    `make(size, number)` gives this worker's operation, of which `number` counts those before it, or None if it has no
    part in this: it then waits. All workers stop after the same size: how long to go on is agreed.
    """
    samples: list[tuple[int, float]] = []
    number, spent = 0, 0.0
    for done, size in enumerate(sizes):
        operation = make(size, number)
        if not done:
            _times(operation, CONNECT)
        agree(0.0)
        slowest = agree(max(_times(operation, WARM), default=0.0))
        # Larger sizes take most of the time: what the smaller ones may have is the same for each.
        repeats = min(MOST, max(FEWEST, int(limits.seconds / (2 * len(sizes)) / max(slowest, 1e-9))))
        times = _times(operation, repeats)
        if operation is not None:
            operation.end()
            samples.append((size, median(times)))
        # Others may still be at it, and what this worker did next would disturb them.
        typical = agree(median(times) if times else 0.0)
        number += WARM + repeats + 1 + (0 if done else CONNECT)
        spent += slowest + typical * repeats
        following = typical * (WARM + FEWEST + 1) * (4 if size >= 2**18 else 1.5)
        if typical > limits.enough_s or (done > 0 and spent + following > limits.seconds):
            break
    return tuple(samples), number


def _times(operation: Operation | None, repeats: int) -> list[float]:
    if operation is None:
        return []
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        operation.once()
        times.append(time.perf_counter() - began)
    return times


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
