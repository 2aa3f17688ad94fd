"""Messages between stages in the common order of a segment (`pipeplan_launch.plan.communication_order`), over NCCL
between GPUs.

The engine hands over this worker's transfers one by one, between its computations, and always from the engine's thread.
The host never waits. Sends and receives have their own streams. A send starts after the computation that made its
message, a receive after the last reader of its slot. The computing stream waits for a message just before its use.
Tensors of a sent message are kept until it has left. On the CPU everything goes over Gloo, and the host has to wait.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeplan_launch.comm.p2p import (
    MessageKey,
    MessageTensor,
    PostedMessage,
    Transport,
    peer_loss_explained,
    receiving,
    sending,
    started,
)
from pipeplan_launch.devices.backend import Lane, backend_of
from pipeplan_launch.plan.communication_order import MOST_UNSETTLED, Direction
from pipeplan_launch.plan.launch_plan import LaunchPlan
from pipeplan_launch.plan.run_options import Edge, edges

# The process groups for messages in the common order: one group for every pair of workers and direction.
#
# All workers make the groups together, in one sorted order. Before training they try each group with a message of one
# number. The trial has the same sorted order on all workers, so it cannot deadlock.

EdgeGroups = Mapping[Edge, Any]
"""The process group of each edge of a run."""


def make_edge_groups(plan: LaunchPlan, backend: str, timeout: timedelta) -> EdgeGroups:
    """Make the groups. All workers of the run call this, also the idle ones."""
    return {edge: dist.new_group(sorted(edge), timeout=timeout, backend=backend) for edge in edges(plan)}


def post_sends(groups: EdgeGroups, tensors: Sequence[Tensor], source: int, destination: int) -> list[dist.Work]:
    """Start sending the tensors of a message. No tensor may be empty."""
    return [started(dist.isend(tensor, destination, groups[source, destination])) for tensor in tensors]


def post_receives(groups: EdgeGroups, tensors: Sequence[Tensor], source: int, destination: int) -> list[dist.Work]:
    """Start receiving the tensors of a message. No tensor may be empty."""
    return [started(dist.irecv(tensor, source, groups[source, destination])) for tensor in tensors]


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


ALIGNMENT = 64
"""Alignment of each tensor of a message, in bytes: the alignment of torch's own CPU tensors."""


@dataclass
class RingSlot:
    """Memory for one received message. A replica's k-th minibatch uses slot k mod n of a ring of n slots.

    The memory is allocated when the slot is first used, and never freed during training. So a pipeline in its steady
    state allocates nothing, and the allocator need not know which streams use the memory.
    """

    memory: Tensor
    key: MessageKey | None = None
    """The latest message in the slot."""
    free: list[Any] = field(default_factory=list)
    """Marks of the computing stream after which the slot may be written again."""
    is_read: bool = True
    """Whether the last reader of the message has been handed to the computing stream."""

    def tensors(self, layout: Sequence[MessageTensor]) -> list[Tensor]:
        """The message's tensors, in the slot's memory. The memory grows if it is too small."""
        offsets = [*itertools.accumulate((-(-spec.size // ALIGNMENT) * ALIGNMENT for spec in layout), initial=0)]
        if len(self.memory) < offsets[-1]:
            self.memory = torch.empty(offsets[-1], dtype=torch.uint8, device=self.memory.device)
        return [
            self.memory[offset : offset + spec.size].view(spec.dtype).view(spec.shape)
            for spec, offset in zip(layout, offsets, strict=False)
        ]


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
        self._slots: dict[tuple[Direction, int], RingSlot] = {}
        """Slots of the rings, by direction and position in the ring."""
        self._receiving: dict[MessageKey, PostedMessage] = {}
        self._ready: dict[MessageKey, tuple[list[Tensor], Any]] = {}
        """Messages that are computed but not posted, each with a mark of the computing stream."""
        self._sent: dict[tuple[Direction, int], deque[PostedMessage]] = {}

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
        """Take the tensors of a message; nobody may modify them any more. The order decides when they are sent."""
        contiguous = [tensor.detach().contiguous() for tensor in tensors]
        self._ready[direction, minibatch] = contiguous, self.streams.mark()

    def start_send(self, direction: Direction, minibatch: int, destination: int) -> None:
        """Post a send, at its place in the order."""
        key = (direction, minibatch)
        tensors, made = self._ready.pop(key)
        earlier = self._sent.setdefault((direction, destination), deque())
        with sending(self._worker_name, direction, minibatch, destination):
            while len(earlier) >= MOST_UNSETTLED:
                earlier.popleft().settle()
            with self.streams.beside(Lane.SENDS, made):
                works = post_sends(self._groups, [one for one in tensors if one.numel()], self._rank, destination)
        earlier.append(PostedMessage(key, destination, tensors, works))

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
        key, place = (direction, minibatch), (direction, position % slots)
        if place not in self._slots:
            self._slots[place] = RingSlot(torch.empty(0, dtype=torch.uint8, device=self._device))
        slot = self._slots[place]
        with receiving(self._worker_name, direction, minibatch, source):
            assert slot.is_read, f"slot {position % slots} is written before {slot.key} was read"
            self._settle_passed_on(slot)
            memory, tensors = slot.memory, slot.tensors(layout)
            if slot.memory is not memory:
                slot.free.append(self.streams.mark())  # computing may still use what the new memory held before
            slot.key, slot.is_read = key, False
            with self.streams.beside(Lane.RECEIVES, *slot.free):
                works = post_receives(self._groups, [one for one in tensors if one.numel()], source, self._rank)
        slot.free = []
        self._receiving[key] = PostedMessage(key, source, tensors, works)

    def take(self, direction: Direction, minibatch: int) -> list[Tensor]:
        """The tensors of a message. The computing stream waits for it. Raises `PeerLost` if it does not arrive."""
        received = self._receiving.pop((direction, minibatch))
        with receiving(self._worker_name, direction, minibatch, received.peer):
            received.settle()
        # `data`, because autograd must not count the next message in this slot as a change of these tensors.
        return [tensor.data for tensor in received.tensors]

    def release(self, direction: Direction, minibatch: int) -> None:
        """Note that the computing stream has all readers of a message. A message that was not received is ignored."""
        slot = next((slot for slot in self._slots.values() if slot.key == (direction, minibatch)), None)
        if slot is not None and not slot.is_read:
            slot.is_read = True
            slot.free.append(self.streams.mark())

    def settle(self, direction: Direction, minibatch: int) -> None:
        """Wait until a message has left, if its send was posted."""
        for sent in self._sent.values():
            for one in [one for one in sent if one.key == (direction, minibatch)]:
                sent.remove(one)
                with sending(self._worker_name, direction, minibatch, one.peer):
                    one.settle()

    def drain(self) -> None:
        """Wait until all sent messages have left."""
        for sent in self._sent.values():
            while sent:
                self.settle(*sent[0].key)
        assert not self._ready, "a message was made and never sent"

    def _settle_passed_on(self, slot: RingSlot) -> None:
        """Make the slot wait for sent messages that still use its memory: a stage may pass on what it received."""
        if slot.key is None:
            return
        begin, end = slot.memory.data_ptr(), slot.memory.data_ptr() + slot.memory.nbytes
        for sent in self._sent.values():
            for one in [one for one in sent if one.key == slot.key]:
                if any(begin <= tensor.data_ptr() < end for tensor in one.tensors):
                    sent.remove(one)
                    one.settle()
                    slot.free.append(self.streams.mark())


AnyTransport = Transport | OrderedTransport
"""The transport of a stage, of either kind."""
