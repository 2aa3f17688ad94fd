"""Messages between stages in the common order of a segment (`pipeplan_launch.plan.communication_order`), over NCCL
between GPUs.

The engine hands over this worker's transfers one by one, between its computations, and always from its own thread. The
host waits for nothing. On streams of their own, a send starts after the computation that made its message, and a
receive after the last reader of its slot. The computing stream waits for a received message just before it is used. The
tensors of a message are kept until it has left. A stage on the CPU does the same over Gloo, where the host has to wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeplan_launch.comm.p2p import (
    MessageKey,
    MessageTensor,
    ReceiveRing,
    RingSlot,
    StageTransport,
    Transport,
    message_not_received,
    message_undelivered,
    peer_loss_explained,
)
from pipeplan_launch.devices.backend import Lane, backend_of
from pipeplan_launch.plan.communication_order import MOST_UNSETTLED, Direction
from pipeplan_launch.plan.launch_plan import LaunchPlan
from pipeplan_launch.plan.run_options import Edge, edges

# The process groups over which messages travel in the common order: one for every pair of workers and direction.
#
# All workers make the groups together, in one sorted order, and try each group with a message of one number before
# training. The trial uses the same sorted order on all workers, so it cannot deadlock either.

EdgeGroups = Mapping[Edge, Any]
"""The process group of each edge of a run."""


def make_edge_groups(plan: LaunchPlan, backend: str, timeout: timedelta) -> EdgeGroups:
    """Make the groups. All workers of the run call this, also the idle ones."""
    return {edge: dist.new_group(sorted(edge), timeout=timeout, backend=backend) for edge in edges(plan)}


def post_sends(groups: EdgeGroups, tensors: Sequence[Tensor], source: int, destination: int) -> list[dist.Work]:
    """Start sending the tensors of a message. No tensor may be empty."""
    return [_started(dist.isend(tensor, destination, groups[source, destination])) for tensor in tensors]


def post_receives(groups: EdgeGroups, tensors: Sequence[Tensor], source: int, destination: int) -> list[dist.Work]:
    """Start receiving the tensors of a message. No tensor may be empty."""
    return [_started(dist.irecv(tensor, source, groups[source, destination])) for tensor in tensors]


def try_edges(groups: EdgeGroups, rank: int, device: torch.device) -> None:
    """Send a number over each edge of this worker, in sorted order, so that NCCL connects before training begins.

    Raises `RuntimeError` if a message does not arrive, or arrives with a wrong number.
    """
    for source, destination in sorted(groups):
        number = source * 7919 + destination + 1
        if rank == source:
            tensor = torch.full((1,), number, dtype=torch.int64, device=device)
            works = post_sends(groups, [tensor], source, destination)
        elif rank == destination:
            tensor = torch.zeros(1, dtype=torch.int64, device=device)
            works = post_receives(groups, [tensor], source, destination)
        else:
            continue
        for work in works:
            work.wait()
        if int(tensor) != number:
            raise RuntimeError(f"a message from rank {source} to rank {destination} came wrong")


def _started(work: dist.Work | None) -> dist.Work:
    """`work`, which is None only in a process outside the group."""
    assert work is not None
    return work


@dataclass
class _Received:
    """A message whose receive has been posted."""

    source: int
    slot: RingSlot
    layout: Sequence[MessageTensor]
    works: list[dist.Work]


@dataclass
class _Sent:
    """A message whose send has been posted, with its tensors."""

    key: MessageKey
    destination: int
    tensors: Sequence[Tensor]
    works: list[dist.Work]


class OrderedTransport:
    """The messages that one worker sends and receives in the common order. Not thread-safe."""

    in_order = True

    def __init__(
        self, stage: int, rank: int, device: torch.device, groups: EdgeGroups, meet: Callable[[], None]
    ) -> None:
        """`meet`: waits until all workers of the run have called it, after the edges have been tried."""
        self._worker_name = f"stage {stage} (rank {rank})"
        self._rank, self._device, self._groups, self._meet = rank, device, groups, meet
        self._backend = backend_of(device)
        self.streams = self._backend.streams(device)
        self._is_open = False
        self._rings = {direction: ReceiveRing(device) for direction in Direction}
        self._receiving: dict[MessageKey, _Received] = {}
        self._ready: dict[MessageKey, tuple[list[Tensor], Any]] = {}
        """Messages that are computed but not posted, each with a mark of the computing stream."""
        self._sent: dict[tuple[Direction, int], deque[_Sent]] = {}

    def open(self) -> None:
        """Try all edges. All workers of stages call this together; a second call does nothing."""
        if self._is_open:
            return
        with peer_loss_explained(f"{self._worker_name} could not exchange a first message with its neighbours"):
            try_edges(self._groups, self._rank, self._device)
            self._backend.synchronise(self._device)
            self._meet()
        self._is_open = True

    def post(self, direction: Direction, minibatch: int, source: int, layout: Sequence[MessageTensor]) -> None:
        """Do nothing: the order decides when a receive is posted."""

    def send(self, direction: Direction, minibatch: int, destination: int, tensors: Sequence[Tensor]) -> None:
        """Take the tensors of a message. The order decides when they are sent. They must not be modified any more."""
        contiguous = [tensor.detach().contiguous() for tensor in tensors]
        self._ready[direction, minibatch] = contiguous, self.streams.mark()

    def start_send(self, direction: Direction, minibatch: int, destination: int) -> None:
        """Post a send, at its place in the order."""
        key = (direction, minibatch)
        tensors, made = self._ready.pop(key)
        earlier = self._sent.setdefault((direction, destination), deque())
        with peer_loss_explained(
            message_undelivered(self._worker_name, direction, minibatch, destination), destination
        ):
            while len(earlier) >= MOST_UNSETTLED:
                self._settle(earlier.popleft())
            with self.streams.beside(Lane.SENDS, made):
                works = post_sends(self._groups, [one for one in tensors if one.numel()], self._rank, destination)
        earlier.append(_Sent(key, destination, tensors, works))

    def start_receive(
        self,
        direction: Direction,
        minibatch: int,
        source: int,
        layout: Sequence[MessageTensor],
        position: int,
        slots: int,
    ) -> None:
        """Post a receive, at its place in the order, into slot `position` mod `slots` of the direction's ring."""
        key = (direction, minibatch)
        slot = self._rings[direction].slot(position % slots)
        with peer_loss_explained(message_not_received(self._worker_name, direction, minibatch, source), source):
            assert slot.is_read, f"slot {position % slots} is written before {slot.key} was read"
            self._settle_passed_on(slot)
            if slot.reserve(layout):
                slot.free.append(self.streams.mark())  # computing may still use what the memory held before
            slot.key, slot.is_read = key, False
            tensors = [tensor for tensor in slot.tensors(layout) if tensor.numel()]
            with self.streams.beside(Lane.RECEIVES, *slot.free):
                works = post_receives(self._groups, tensors, source, self._rank)
        slot.free = []
        self._receiving[key] = _Received(source, slot, layout, works)

    def take(self, direction: Direction, minibatch: int) -> list[Tensor]:
        """The tensors of a message. The computing stream waits for it. Raises `PeerLost` if it does not arrive."""
        received = self._receiving.pop((direction, minibatch))
        with peer_loss_explained(
            message_not_received(self._worker_name, direction, minibatch, received.source), received.source
        ):
            for work in received.works:
                work.wait()
        # `data`, because autograd must not count the next message in this slot as a change of these tensors.
        return [tensor.data for tensor in received.slot.tensors(received.layout)]

    def release(self, direction: Direction, minibatch: int) -> None:
        """Note that all readers of a received message have been handed to the computing stream, if it was received."""
        slot = self._rings[direction].holding((direction, minibatch))
        if slot is not None and not slot.is_read:
            slot.is_read = True
            slot.free.append(self.streams.mark())

    def settle(self, direction: Direction, minibatch: int) -> None:
        """Wait until a message has left, if its send was posted."""
        for (way, destination), sent in self._sent.items():
            for one in [one for one in sent if way is direction and one.key == (direction, minibatch)]:
                sent.remove(one)
                with peer_loss_explained(
                    message_undelivered(self._worker_name, direction, minibatch, destination), destination
                ):
                    self._settle(one)

    def drain(self) -> None:
        """Wait until all sent messages have left. Messages of minibatches that never began are forgotten."""
        for (direction, destination), sent in self._sent.items():
            while sent:
                one = sent.popleft()
                with peer_loss_explained(
                    message_undelivered(self._worker_name, direction, one.key[1], destination), destination
                ):
                    self._settle(one)
        assert not self._ready, "a message was made and never sent"

    def _settle(self, sent: _Sent) -> None:
        """Let the computing stream wait until a message has left. Its tensors may then be reused."""
        for work in sent.works:
            work.wait()

    def _settle_passed_on(self, slot: RingSlot) -> None:
        """Let the slot wait for the messages of its minibatch that may have been sent from its memory."""
        if slot.key is None:
            return
        begin, end = slot.memory.data_ptr(), slot.memory.data_ptr() + slot.memory.nbytes
        for sent in self._sent.values():
            for one in [one for one in sent if one.key == slot.key]:
                if any(begin <= tensor.data_ptr() < end for tensor in one.tensors):
                    sent.remove(one)
                    self._settle(one)
                    slot.free.append(self.streams.mark())


AnyTransport = Transport | StageTransport | OrderedTransport
"""The messages of a stage."""
