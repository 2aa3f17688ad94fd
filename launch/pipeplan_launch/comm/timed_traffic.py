"""Measures the times of messages and all-reduces of several sizes, as the executor makes them.

Messages go through the executor's own transport, in both directions at once. The next receive is posted in advance, as
between two stages of a pipeline. All-reduces go through torch.distributed. Both use the backend of a run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

from pipeplan_launch.comm.p2p import MessageTensor, Transport
from pipeplan_launch.devices.backend import backend_of
from pipeplan_launch.plan.communication_order import Direction

FEWEST, MOST = 3, 40
"""Limits of the number of timed repeats of one size."""
WARM = 1
"""Untimed operations of each size, before the timed operations."""
CONNECT = 1
"""Untimed operations before all sizes. The first operation may have to connect, which takes seconds with NCCL."""
ELEMENT_BYTES = 4


class Operation:
    """An operation that is timed."""

    def once(self) -> None:
        """Perform the operation once, and wait until it is done."""
        raise NotImplementedError

    def end(self) -> None:
        """Finish after the last repeat."""


Agree = Callable[[float], float]
"""Function that returns the largest of the values that all workers pass. Workers wait for each other in it."""


class TransportExchange(Operation):
    """Messages of one size with one peer."""

    def __init__(self, transport: Transport, rank: int, peer: int, size: int, first: int, device: torch.device) -> None:
        """`size`: bytes. `first`: number of the first message, the same at both ends and not used before."""
        numbers = size // ELEMENT_BYTES
        self._transport, self._peer, self._next, self._device = transport, peer, first, device
        self._wire = MessageTensor((numbers,), torch.float32)
        self._message = torch.ones(numbers, device=device)
        lower = rank < peer
        self._out = Direction.ACTIVATIONS if lower else Direction.GRADIENTS
        self._in = Direction.GRADIENTS if lower else Direction.ACTIVATIONS
        transport.post(self._in, first, peer, [self._wire])

    def once(self) -> None:
        """Send one message and receive one."""
        self._transport.post(self._in, self._next + 1, self._peer, [self._wire])
        self._swap()

    def end(self) -> None:
        """Complete the receive that was posted last."""
        self._swap()

    def _swap(self) -> None:
        number = self._next
        self._next += 1
        self._transport.send(self._out, number, self._peer, [self._message])
        self._transport.take(self._in, number)
        self._transport.settle(self._out, number)
        _wait_for(self._device)


class ProcessGroupExchange(Operation):
    """Messages of one size with one peer through the process group. They use the link between two GPUs, whereas the
    executor's transport goes through the memory of the host.
    """

    def __init__(self, peer: int, size: int, device: torch.device) -> None:
        numbers = size // ELEMENT_BYTES
        self._peer, self._device = peer, device
        self._out, self._in = torch.ones(numbers, device=device), torch.empty(numbers, device=device)

    def once(self) -> None:
        """Send one message and receive one."""
        both = [dist.P2POp(dist.isend, self._out, self._peer), dist.P2POp(dist.irecv, self._in, self._peer)]
        for work in dist.batch_isend_irecv(both):
            work.wait()
        _wait_for(self._device)


class AllReduce(Operation):
    """All-reduces of one size in one group."""

    def __init__(self, group: dist.ProcessGroup, size: int, device: torch.device) -> None:
        self._group, self._device = group, device
        self._values = torch.zeros(size // ELEMENT_BYTES, device=device)

    def once(self) -> None:
        """Perform one all-reduce."""
        dist.all_reduce(self._values, group=self._group)
        _wait_for(self._device)


@dataclass(frozen=True)
class TimeLimits:
    """Limits after which no larger size is measured."""

    seconds: float
    """Approximate time for all sizes together."""
    enough_s: float = float("inf")
    """If an operation takes longer than this, no larger size is measured."""


def time_over_sizes(
    sizes: Sequence[int], limits: TimeLimits, agree: Agree, make: Callable[[int, int], Operation | None]
) -> tuple[tuple[tuple[int, float], ...], int]:
    """Time an operation over sizes in bytes; all workers call this at the same time.

    `make(size, number)` returns this worker's operation, given the number of operations before it, or None for a worker
    that only waits. All workers agree on the times, so all of them stop after the same size.

    Returns ((bytes, median seconds) for each size, number of operations).
    """
    samples: list[tuple[int, float]] = []
    number, spent = 0, 0.0
    for done, size in enumerate(sizes):
        operation = make(size, number)
        if not done:
            _times(operation, CONNECT)
        agree(0.0)
        slowest = agree(max(_times(operation, WARM), default=0.0))
        # Each size gets an equal share of half of the limit. Large sizes exceed it because of the `FEWEST` repeats.
        repeats = min(MOST, max(FEWEST, int(limits.seconds / (2 * len(sizes)) / max(slowest, 1e-9))))
        times = _times(operation, repeats)
        if operation is not None:
            operation.end()
            samples.append((size, median(times)))
        # Other workers may still be measuring, and this worker's next operation would disturb them.
        typical = agree(median(times) if times else 0.0)
        number += WARM + repeats + 1 + (0 if done else CONNECT)
        spent += slowest + typical * repeats
        following = typical * (WARM + FEWEST + 1) * (4 if size >= 2**18 else 1.5)
        if typical > limits.enough_s or (done > 0 and spent + following > limits.seconds):
            break
    return tuple(samples), number


class TeamTimer:
    """Times the messages and all-reduces of teams of workers. All workers make a timer and call it together."""

    def __init__(self, device: torch.device, everyone: dist.ProcessGroup) -> None:
        self._rank, self._device, self._everyone = dist.get_rank(), device, everyone
        self._transport = Transport(0, self._rank, device, everyone)
        self._number = 0
        """Number of messages so far, equal in all workers, so that no two messages have the same number."""

    def __call__(
        self,
        team: Sequence[int] | None,
        sizes: Sequence[int],
        limits: TimeLimits,
        ring: dist.ProcessGroup | None = None,
        *,
        direct: bool = False,
    ) -> tuple[tuple[int, float], ...]:
        """(bytes, median seconds) for each size that is measured.

        `team`: the team of this worker, a pair unless it all-reduces in `ring`; None if the worker only waits.
        `direct`: pairs exchange messages through the process group.
        """

        def make(size: int, number: int) -> Operation | None:
            if team is None:
                return None
            if ring is not None:
                return AllReduce(ring, size, self._device)
            peer = team[0] if team[1] == self._rank else team[1]
            if direct:
                return ProcessGroupExchange(peer, size, self._device)
            return TransportExchange(self._transport, self._rank, peer, size, self._number + number, self._device)

        samples, messages = time_over_sizes(sizes, limits, self._largest, make)
        self._number += messages
        return samples

    def _largest(self, value: float) -> float:
        tensor = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._everyone)
        return float(tensor)


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
    backend_of(device).synchronise(device)
