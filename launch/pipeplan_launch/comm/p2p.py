"""Point-to-point messages between neighbouring stages: activations forwards, gradients backwards.

Messages go over Gloo, in CPU memory; a stage on a GPU copies through pinned memory. Every tensor of every minibatch has
its own tag, so receives can be posted in advance, in any order. A send returns at once and keeps its tensors until they
have left. Workers on the CPU of one machine use a shared-memory channel instead (`pipeplan_launch.comm.shared_memory`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from pipeplan_launch.comm.ring_buffer import MessageTensor, Slot, SlotPool, tensor_offsets
from pipeplan_launch.comm.shared_memory import LocalListener, PendingSend, SharedMemoryChannel, can_connect_locally
from pipeplan_launch.devices.backend import backend_of
from pipeplan_launch.errors import PeerLost
from pipeplan_launch.plan.one_order import Direction

SHARED_MEMORY = "PIPEPLAN_SHARED_MEMORY"
"""Environment variable. With 0, workers of one machine send through Gloo, like workers of different machines."""

TAGS_OF_MESSAGE = 1024
"""Tags of a message where a worker runs several stages, whose messages have different numbers of tensors."""
_TAGS = 2**31 - 1
_ADDRESS_TAG = _TAGS  # tag of the message with a worker's shared-memory address
_ADDRESS_BYTES = 256
_SOURCE_LOCATION = re.compile(r"^\[[^]]*:\d+\] ")


Key = tuple[Direction, int]
"""(direction, minibatch)."""


@dataclass(frozen=True)
class _Transfer:
    """A message in transit, over Gloo or through a slot of shared memory."""

    peer: int
    tensors: Sequence[Tensor] = ()
    works: list[dist.Work] = field(default_factory=list)
    layout: Sequence[MessageTensor] = ()
    slot: Slot | None = None
    """The slot that receives the message; None for Gloo and for messages that this worker sends."""
    sending: PendingSend | None = None
    """The send through shared memory; None for Gloo and for messages that this worker receives."""


class Transport:
    """The messages that one worker sends and receives. Not thread-safe."""

    in_order = False
    """Whether the engine hands over transfers in the one order of a segment (`ordered_transport`)."""

    def __init__(
        self,
        stage: int,
        rank: int,
        device: torch.device,
        neighbours: Sequence[int] = (),
        timeout_s: float = 600.0,
        group: dist.ProcessGroup | None = None,
        stages: int = 1,
        gradients: dist.ProcessGroup | None = None,
    ) -> None:
        """`neighbours`: ranks that exchange messages with this one. `timeout_s`: how long to wait for one message.
        `stages`: the number of stages where `stage_transport` numbers messages by stage too, else 1. `gradients`: a
        process group whose connections carry gradients; None where those of `group` carry all messages.
        """
        self._worker_name = f"stage {stage} (rank {rank})"
        self._stages = stages
        self._rank = rank
        self._device, self._backend = device, backend_of(device)
        self._neighbours = neighbours
        self._timeout_s = timeout_s
        self._group = group
        returning = group if gradients is None else gradients
        self._groups = {Direction.ACTIVATIONS: group, Direction.GRADIENTS: returning}
        self._is_open = False
        self._channels: dict[int, SharedMemoryChannel] = {}
        self._slots = SlotPool()
        self._receiving: dict[Key, _Transfer] = {}
        self._sending: dict[Key, _Transfer] = {}

    def open(self) -> None:
        """Connect to the neighbours on this machine. All neighbours call this together; a second call does nothing."""
        if self._is_open or not self._neighbours:
            return
        listener = self._open_listener()
        with peer_loss_explained(
            f"{self._worker_name} could not reach the ranks {list(self._neighbours)}", *self._neighbours
        ):
            addresses = self._exchange_addresses("" if listener is None else listener.address)
            if listener is not None:
                local = {
                    peer: address
                    for peer, address in addresses.items()
                    if can_connect_locally(address, listener.address)
                }
                self._channels = listener.connect(self._rank, local, self._timeout_s)
                listener.close()
        self._is_open = True

    def post(self, direction: Direction, minibatch: int, source: int, layout: Sequence[MessageTensor]) -> None:
        """Post the receive of a message; `take` waits for it later."""
        earlier = self._receiving.get((direction, minibatch))
        if earlier is not None and earlier.peer == source:
            return  # an earlier segment posted it and ended before this minibatch
        with peer_loss_explained(self._not_received(direction, minibatch, source), source):
            if source in self._channels:
                transfer = self._offer_slot(direction, minibatch, source, layout)
            else:
                transfer = self._post_gloo(direction, minibatch, source, layout)
        self._receiving[direction, minibatch] = transfer

    def take(self, direction: Direction, minibatch: int) -> list[Tensor]:
        """Wait for a posted message; returns its tensors. Raises `PeerLost` if it does not come."""
        transfer = self._receiving.pop((direction, minibatch))
        with peer_loss_explained(self._not_received(direction, minibatch, transfer.peer), transfer.peer):
            if transfer.slot is not None:
                self._channels[transfer.peer].wait_for((direction, minibatch))
                return self._slots.tensors(transfer.slot, transfer.layout)
            for work in transfer.works:
                work.wait()
        return [tensor.to(self._device, non_blocking=True) for tensor in transfer.tensors]

    def send(self, direction: Direction, minibatch: int, destination: int, tensors: Sequence[Tensor]) -> None:
        """Start sending tensors. They must not be modified until `settle` or `drain`."""
        ready = [self._to_wire(tensor.detach()) for tensor in tensors]
        channel = self._channels.get(destination)
        with peer_loss_explained(self._undelivered(direction, minibatch, destination), destination):
            if channel is not None:
                transfer = _Transfer(destination, sending=channel.send((direction, minibatch), ready))
            else:
                transfer = _Transfer(destination, ready)
                for index, tensor in enumerate(ready):
                    if tensor.numel():
                        tag = _tag(direction, minibatch, index, self._tags_of_message(len(ready)))
                        transfer.works.append(_started(dist.isend(tensor, destination, self._groups[direction], tag)))
        self._sending[direction, minibatch] = transfer

    def settle(self, direction: Direction, minibatch: int) -> None:
        """Wait until a message has left, if it was sent. Its memory may then be reused."""
        transfer = self._sending.pop((direction, minibatch), None)
        if transfer is None:
            return
        with peer_loss_explained(self._undelivered(direction, minibatch, transfer.peer), transfer.peer):
            if transfer.sending is not None:
                self._channels[transfer.peer].settle(transfer.sending)
            for work in transfer.works:
                work.wait()

    def drain(self) -> None:
        """Wait until all sent messages have left."""
        for direction, minibatch in list(self._sending):
            self.settle(direction, minibatch)

    def _open_listener(self) -> LocalListener | None:
        """The socket to which workers of this machine connect; None where all messages go over Gloo."""
        if self._backend.copies_to_host or not hasattr(os, "memfd_create") or os.environ.get(SHARED_MEMORY) == "0":
            return None
        try:
            return LocalListener()
        except OSError:  # the system lacks abstract Unix sockets, or /proc is not readable
            return None

    def _exchange_addresses(self, address: str) -> dict[int, str]:
        """Send this worker's address to every neighbour; returns the neighbours' addresses by rank, "" for none."""
        mine = torch.frombuffer(bytearray(address.encode().ljust(_ADDRESS_BYTES, b"\0")), dtype=torch.uint8)
        theirs = {peer: torch.zeros_like(mine) for peer in self._neighbours}
        works = [dist.irecv(theirs[peer], peer, self._group, _ADDRESS_TAG) for peer in self._neighbours]
        works += [dist.isend(mine, peer, self._group, _ADDRESS_TAG) for peer in self._neighbours]
        for work in works:
            _started(work).wait()
        return {peer: bytes(one.tolist()).rstrip(b"\0").decode() for peer, one in theirs.items()}

    def _offer_slot(
        self, direction: Direction, minibatch: int, source: int, layout: Sequence[MessageTensor]
    ) -> _Transfer:
        size = tensor_offsets([spec.size for spec in layout])[-1]
        slot = self._slots.take(size)
        self._channels[source].offer((direction, minibatch), slot, size)
        return _Transfer(source, layout=layout, slot=slot)

    def _post_gloo(
        self, direction: Direction, minibatch: int, source: int, layout: Sequence[MessageTensor]
    ) -> _Transfer:
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
        """Tags that are set aside for a message: one number for all messages, so that those of two stages differ."""
        return tensors if self._stages == 1 else max(tensors, TAGS_OF_MESSAGE)

    def _to_wire(self, tensor: Tensor) -> Tensor:
        if not self._backend.copies_to_host:
            return tensor.contiguous()
        in_host = self._backend.host_tensor(tuple(tensor.shape), tensor.dtype)
        return in_host.copy_(tensor)  # blocks until the GPU has written the copy, because Gloo reads it at once


def message_not_received(worker: str, direction: Direction, minibatch: int, peer: int) -> str:
    """The beginning of the line for a message that did not come to `worker`."""
    message = f"the {direction.name.lower()} of minibatch {minibatch} from rank {peer}"
    return f"{worker} waited for {message}, which did not come"


def message_undelivered(worker: str, direction: Direction, minibatch: int, peer: int) -> str:
    """The beginning of the line for a message that `worker` could not deliver."""
    return f"{worker} could not deliver the {direction.name.lower()} of minibatch {minibatch} to rank {peer}"


@contextmanager
def peer_loss_explained(message: str, *peers: int) -> Iterator[None]:
    """Turn errors of torch.distributed and of channels into `PeerLost`, with one line that begins with `message`.

    `peers`: ranks of the workers on which this one waits, as far as they are known.
    """
    try:
        yield
    except (RuntimeError, OSError) as error:
        raise PeerLost(f"{message}: {error_cause(error)}", peers) from error


def _started(work: dist.Work | None) -> dist.Work:
    """`work`, which is None only in a process outside the group."""
    assert work is not None
    return work


def _tag(direction: Direction, minibatch: int, index: int, count: int) -> int:
    """The tag of one tensor of a message. Tags repeat after 2**31; only messages in transit together must differ."""
    return ((minibatch * count + index) * len(Direction) + direction) % _TAGS


def error_cause(error: BaseException) -> str:
    """The cause in an error of Gloo or of the system, without Gloo's source location and general advice."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    line = str(error).strip().partition("\n")[0]
    return _SOURCE_LOCATION.sub("", line).partition(". This is typically")[0]
