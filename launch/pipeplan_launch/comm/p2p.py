"""Point-to-point messages between neighbouring stages: activations forwards, gradients backwards.

Messages go over Gloo, in CPU memory; a stage on a GPU copies through pinned memory. Every tensor of every minibatch has
its own tag, so receives can be posted in advance, in any order. A send returns at once, and the transport keeps its
tensors until they have left.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeplan_launch.devices.backend import backend_of
from pipeplan_launch.errors import PeerLost
from pipeplan_launch.plan.communication_order import Direction

# The tensors of a message between stages, and their places in one block of memory.

ALIGNMENT = 64
"""Alignment of each tensor of a message, in bytes: the alignment of torch's own CPU tensors."""


@dataclass(frozen=True)
class MessageTensor:
    """Shape and dtype of one tensor of a message."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Size of the tensor, in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def tensor_offsets(sizes: Sequence[int]) -> list[int]:
    """Byte offset of each tensor of a message, given their sizes in bytes, followed by the end of the message."""
    offsets = [0]
    for size in sizes:
        offsets.append(offsets[-1] + -(-size // ALIGNMENT) * ALIGNMENT)
    return offsets


# Rings of memory for received messages: the message of a replica's k-th minibatch lies in slot k mod n.
#
# The memory is allocated when a slot is first used, and never freed during training. So a pipeline in its steady state
# allocates nothing, and the allocator need not know which streams use the memory.

MessageKey = tuple[Direction, int]
"""(direction, number of the minibatch)."""


@dataclass
class RingSlot:
    """The memory of one message."""

    memory: Tensor
    key: MessageKey | None = None
    """The message that is in the slot, or was last in it."""
    free: list[Any] = field(default_factory=list)
    """Marks of the computing stream after which the slot may be written again."""
    is_read: bool = True
    """Whether the last reader of the message has been handed to the computing stream."""

    def reserve(self, layout: Sequence[MessageTensor]) -> bool:
        """Make the slot large enough for a message. Returns whether new memory was allocated."""
        size = tensor_offsets([spec.size for spec in layout])[-1]
        if len(self.memory) >= size:
            return False
        self.memory = torch.empty(size, dtype=torch.uint8, device=self.memory.device)
        return True

    def tensors(self, layout: Sequence[MessageTensor]) -> list[Tensor]:
        """The message's tensors, in the slot's memory."""
        offsets = tensor_offsets([spec.size for spec in layout])
        return [
            self.memory[offset : offset + spec.size].view(spec.dtype).view(spec.shape)
            for spec, offset in zip(layout, offsets, strict=False)
        ]


class ReceiveRing:
    """The slots of one direction on one worker."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._slots: dict[int, RingSlot] = {}

    def slot(self, number: int) -> RingSlot:
        """The slot with this number."""
        slot = self._slots.get(number)
        if slot is None:
            slot = self._slots[number] = RingSlot(torch.empty(0, dtype=torch.uint8, device=self._device))
        return slot

    def holding(self, key: MessageKey) -> RingSlot | None:
        """The slot that holds a message."""
        return next((slot for slot in self._slots.values() if slot.key == key), None)


TAGS_OF_MESSAGE = 1024
"""Number of tags per message if a worker runs several stages, whose messages have different numbers of tensors."""
_TAGS = 2**31 - 1
_SOURCE_LOCATION = re.compile(r"^\[[^]]*:\d+\] ")


Key = tuple[Direction, int]
"""(direction, minibatch)."""


@dataclass(frozen=True)
class _Transfer:
    """A message in transit."""

    peer: int
    tensors: Sequence[Tensor]
    works: list[dist.Work] = field(default_factory=list)


class Transport:
    """The messages that one worker sends and receives. Not thread-safe."""

    in_order = False
    """Whether the engine hands over transfers in the common order of a segment (`ordered_transport`)."""

    def __init__(
        self,
        stage: int,
        rank: int,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
        stages: int = 1,
        gradients: dist.ProcessGroup | None = None,
    ) -> None:
        """`stages`: the number of stages if `StageTransport` numbers messages by stage too, else 1. `gradients`: a
        process group whose connections carry gradients; None if the connections of `group` carry all messages.
        """
        self._worker_name = f"stage {stage} (rank {rank})"
        self._stages = stages
        self._rank = rank
        self._device, self._backend = device, backend_of(device)
        returning = group if gradients is None else gradients
        self._groups = {Direction.ACTIVATIONS: group, Direction.GRADIENTS: returning}
        self._receiving: dict[Key, _Transfer] = {}
        self._sending: dict[Key, _Transfer] = {}

    def post(self, direction: Direction, minibatch: int, source: int, layout: Sequence[MessageTensor]) -> None:
        """Post the receive of a message; `take` waits for it later."""
        earlier = self._receiving.get((direction, minibatch))
        if earlier is not None and earlier.peer == source:
            return  # an earlier segment posted it and ended before this minibatch
        with peer_loss_explained(self._not_received(direction, minibatch, source), source):
            self._receiving[direction, minibatch] = self._posted(direction, minibatch, source, layout)

    def take(self, direction: Direction, minibatch: int) -> list[Tensor]:
        """Wait for a posted message; returns its tensors. Raises `PeerLost` if it does not arrive."""
        transfer = self._receiving.pop((direction, minibatch))
        with peer_loss_explained(self._not_received(direction, minibatch, transfer.peer), transfer.peer):
            for work in transfer.works:
                work.wait()
        return [tensor.to(self._device, non_blocking=True) for tensor in transfer.tensors]

    def send(self, direction: Direction, minibatch: int, destination: int, tensors: Sequence[Tensor]) -> None:
        """Start sending tensors. They must not be modified until `settle` or `drain`."""
        transfer = _Transfer(destination, [self._to_wire(tensor.detach()) for tensor in tensors])
        with peer_loss_explained(self._undelivered(direction, minibatch, destination), destination):
            for index, tensor in enumerate(transfer.tensors):
                if tensor.numel():
                    tag = _tag(direction, minibatch, index, self._tags_of_message(len(tensors)))
                    transfer.works.append(_started(dist.isend(tensor, destination, self._groups[direction], tag)))
        self._sending[direction, minibatch] = transfer

    def settle(self, direction: Direction, minibatch: int) -> None:
        """Wait until a message has left, if it was sent. Its memory may then be reused."""
        transfer = self._sending.pop((direction, minibatch), None)
        if transfer is None:
            return
        with peer_loss_explained(self._undelivered(direction, minibatch, transfer.peer), transfer.peer):
            for work in transfer.works:
                work.wait()

    def drain(self) -> None:
        """Wait until all sent messages have left."""
        for direction, minibatch in list(self._sending):
            self.settle(direction, minibatch)

    def _posted(self, direction: Direction, minibatch: int, source: int, layout: Sequence[MessageTensor]) -> _Transfer:
        tensors = [self._backend.host_tensor(spec.shape, spec.dtype) for spec in layout]
        transfer = _Transfer(source, tensors)
        for index, tensor in enumerate(tensors):
            if tensor.numel():
                tag = _tag(direction, minibatch, index, self._tags_of_message(len(tensors)))
                transfer.works.append(_started(dist.irecv(tensor, source, self._groups[direction], tag)))
        return transfer

    def _not_received(self, direction: Direction, number: int, peer: int) -> str:
        return message_not_received(self._worker_name, direction, number // self._stages, peer)

    def _undelivered(self, direction: Direction, number: int, peer: int) -> str:
        return message_undelivered(self._worker_name, direction, number // self._stages, peer)

    def _tags_of_message(self, tensors: int) -> int:
        """Number of tags reserved for a message. It is the same for all messages, so that tags of two stages differ."""
        return tensors if self._stages == 1 else max(tensors, TAGS_OF_MESSAGE)

    def _to_wire(self, tensor: Tensor) -> Tensor:
        if not self._backend.copies_to_host:
            return tensor.contiguous()
        in_host = self._backend.host_tensor(tuple(tensor.shape), tensor.dtype)
        return in_host.copy_(tensor)  # blocks until the GPU has written the copy, because Gloo reads it at once


def message_not_received(worker: str, direction: Direction, minibatch: int, peer: int) -> str:
    """The beginning of the error line for a message that did not arrive at `worker`."""
    message = f"the {direction.name.lower()} of minibatch {minibatch} from rank {peer}"
    return f"{worker} waited for {message}, which did not come"


def message_undelivered(worker: str, direction: Direction, minibatch: int, peer: int) -> str:
    """The beginning of the error line for a message that `worker` could not deliver."""
    return f"{worker} could not deliver the {direction.name.lower()} of minibatch {minibatch} to rank {peer}"


@contextmanager
def peer_loss_explained(message: str, *peers: int) -> Iterator[None]:
    """Turn errors of torch.distributed into `PeerLost`, with one line that begins with `message`.

    `peers`: the ranks that this worker waits for, as far as they are known.
    """
    try:
        yield
    except (RuntimeError, OSError) as error:
        raise PeerLost(f"{message}: {error_cause(error)}", peers) from error


@contextmanager
def connection_loss_explained(message: str, *peers: int) -> Iterator[None]:
    """`peer_loss_explained` for code that may also fail by itself: only errors of a connection are turned."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and not _of_gloo(error):
            raise
        raise PeerLost(f"{message}: {error_cause(error)}", peers) from error


def _of_gloo(error: RuntimeError) -> bool:
    """Whether an error comes from Gloo. Its errors have no class of their own, but begin with a place in its source."""
    place = _SOURCE_LOCATION.match(str(error))
    return place is not None and "gloo" in place[0]


def _started(work: dist.Work | None) -> dist.Work:
    """`work`, which is None only in a process outside the group."""
    assert work is not None
    return work


def _tag(direction: Direction, minibatch: int, index: int, count: int) -> int:
    """The tag of one tensor of a message. Tags repeat after 2**31; only messages in transit at the same time must
    differ.
    """
    return ((minibatch * count + index) * len(Direction) + direction) % _TAGS


def error_cause(error: BaseException) -> str:
    """The cause in an error of Gloo or of the system, without Gloo's source location and general advice."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    line = str(error).strip().partition("\n")[0]
    return _SOURCE_LOCATION.sub("", line).partition(". This is typically")[0]


# The messages of one stage, on a worker that runs several stages: a view of the worker's transport.
#
# A message's number includes the receiving stage, so that stages of one worker do not take each other's messages. A
# message between two stages of the same worker is passed on without a copy.


Mailbox = dict[tuple[Direction, int], list[Tensor]]
"""Messages between stages of one worker that are sent but not taken yet, by direction and number."""


class StageTransport:
    """One stage's view of the transport of a worker that runs several stages."""

    in_order = False
    streams: Any = None

    def __init__(self, transport: Transport, mailbox: Mailbox, rank: int, stage: int, stages: int) -> None:
        """`mailbox`: the worker's mailbox, which its stages share. `stages`: number of stages of the pipeline."""
        self._transport, self._mailbox = transport, mailbox
        self._rank, self._stage, self._stages = rank, stage, stages
        self._from_here: set[tuple[Direction, int]] = set()
        """Expected messages that another stage of this worker sends."""

    def post(self, direction: Direction, minibatch: int, source: int, layout: Sequence[MessageTensor]) -> None:
        """Post the receive of a message; `take` waits for it later."""
        if source == self._rank:
            self._from_here.add((direction, minibatch))
        else:
            self._transport.post(direction, self._number(minibatch, self._stage), source, layout)

    def take(self, direction: Direction, minibatch: int) -> list[Tensor]:
        """Wait for a posted message; returns its tensors. A message from this worker's own stages is there already."""
        number = self._number(minibatch, self._stage)
        if (direction, minibatch) in self._from_here:
            self._from_here.discard((direction, minibatch))
            return self._mailbox.pop((direction, number))
        return self._transport.take(direction, number)

    def send(self, direction: Direction, minibatch: int, destination: int, tensors: Sequence[Tensor]) -> None:
        """Start sending tensors. They must not be modified until `settle` or `drain`."""
        number = self._number(minibatch, self._receiver(direction))
        if destination == self._rank:
            self._mailbox[direction, number] = [tensor.detach() for tensor in tensors]
        else:
            self._transport.send(direction, number, destination, tensors)

    def settle(self, direction: Direction, minibatch: int) -> None:
        """Wait until a message has left, if it was sent to another worker."""
        self._transport.settle(direction, self._number(minibatch, self._receiver(direction)))

    def drain(self) -> None:
        """Wait until all messages of the worker have left. Posted receives that were not needed are forgotten."""
        self._from_here.clear()
        self._transport.drain()

    def _receiver(self, direction: Direction) -> int:
        return self._stage + (1 if direction is Direction.ACTIVATIONS else -1)

    def _number(self, minibatch: int, receiver: int) -> int:
        return minibatch * self._stages + receiver
