"""Activations and gradients between neighbouring stages.

Point-to-point over Gloo, in CPU memory; a stage on a GPU copies through pinned memory. Every tensor of every minibatch
has a tag of its own, so receives can be posted ahead, in any order, and wait in schedule order. A send returns at once
and keeps its tensor until it is done. Between workers of one machine that compute on its CPU, messages take the shorter
way through shared memory (`pipeplan_launch.links`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum

import torch
import torch.distributed as dist
from torch import Tensor

from pipeplan_launch.doors import Door, near
from pipeplan_launch.errors import PeerLost
from pipeplan_launch.links import Link, Sending
from pipeplan_launch.slots import Slot, Slots, Wire, layout

SHARED_MEMORY = "PIPEPLAN_SHARED_MEMORY"
"""Environment variable; 0 has workers of one machine send through Gloo, as workers of different machines do."""

_TAGS = 2**31 - 1
_CARD_TAG = _TAGS  # of the message that says where a worker can be reached
_CARD_BYTES = 256
_PLACE = re.compile(r"^\[[^]]*:\d+\] ")


class Direction(IntEnum):
    """What a message holds."""

    ACTIVATIONS = 0
    """From a stage to the next."""
    GRADIENTS = 1
    """From a stage to the one before."""


Key = tuple[Direction, int]
"""(direction, minibatch)."""


@dataclass(frozen=True)
class _Transfer:
    """A message on its way: over Gloo, or through a slot of shared memory."""

    peer: int
    tensors: Sequence[Tensor] = ()
    works: list[dist.Work] = field(default_factory=list)
    wires: Sequence[Wire] = ()
    slot: Slot | None = None
    """Where it arrives."""
    sending: Sending | None = None
    """How it leaves."""


class Transport:
    """The messages of one worker. Not for use from several threads."""

    def __init__(
        self,
        stage: int,
        rank: int,
        device: torch.device,
        neighbours: Sequence[int] = (),
        timeout_s: float = 600.0,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """`neighbours`: the ranks that it exchanges messages with. `timeout_s`: for a message of one of them."""
        self._where = f"stage {stage} (rank {rank})"
        self._rank = rank
        self._device = device
        self._neighbours = neighbours
        self._timeout_s = timeout_s
        self._group = group
        self._is_open = False
        self._links: dict[int, Link] = {}
        self._slots = Slots()
        self._receiving: dict[Key, _Transfer] = {}
        self._sending: dict[Key, _Transfer] = {}

    def open(self) -> None:
        """Find out which neighbours are on this machine. They all do this at the same time; again it does nothing."""
        if self._is_open or not self._neighbours:
            return
        door = self._door()
        with explained(f"{self._where} could not reach the ranks {list(self._neighbours)}"):
            cards = self._exchange("" if door is None else door.address)
            if door is not None:
                addresses = {peer: card for peer, card in cards.items() if near(card, door.address)}
                self._links = door.link(self._rank, addresses, self._timeout_s)
                door.close()
        self._is_open = True

    def post(self, direction: Direction, minibatch: int, source: int, wires: Sequence[Wire]) -> None:
        """Post the receive of a message that will be taken later."""
        earlier = self._receiving.get((direction, minibatch))
        if earlier is not None and earlier.peer == source:
            return  # posted by a segment that ended before this minibatch
        with explained(self._missing(direction, minibatch, source)):
            if source in self._links:
                transfer = self._offer(direction, minibatch, source, wires)
            else:
                transfer = self._listen(direction, minibatch, source, wires)
        self._receiving[direction, minibatch] = transfer

    def take(self, direction: Direction, minibatch: int) -> list[Tensor]:
        """Wait for a posted message. Raises `PeerLost` if it does not come."""
        transfer = self._receiving.pop((direction, minibatch))
        with explained(self._missing(direction, minibatch, transfer.peer)):
            if transfer.slot is not None:
                self._links[transfer.peer].wait_for((direction, minibatch))
                return self._slots.tensors(transfer.slot, transfer.wires)
            for work in transfer.works:
                work.wait()
        return [tensor.to(self._device, non_blocking=True) for tensor in transfer.tensors]

    def send(self, direction: Direction, minibatch: int, destination: int, tensors: Sequence[Tensor]) -> None:
        """Start sending; the tensors must not be written until `settle` or `drain`."""
        ready = [self._to_wire(tensor.detach()) for tensor in tensors]
        link = self._links.get(destination)
        with explained(self._undelivered(direction, minibatch, destination)):
            if link is not None:
                transfer = _Transfer(destination, sending=link.send((direction, minibatch), ready))
            else:
                transfer = _Transfer(destination, ready)
                for index, tensor in enumerate(ready):
                    if tensor.numel():
                        tag = _tag(direction, minibatch, index, len(ready))
                        transfer.works.append(_started(dist.isend(tensor, destination, self._group, tag)))
        self._sending[direction, minibatch] = transfer

    def settle(self, direction: Direction, minibatch: int) -> None:
        """Wait until a message has left, if there is one; its memory is then free."""
        transfer = self._sending.pop((direction, minibatch), None)
        if transfer is None:
            return
        with explained(self._undelivered(direction, minibatch, transfer.peer)):
            if transfer.sending is not None:
                self._links[transfer.peer].settle(transfer.sending)
            for work in transfer.works:
                work.wait()

    def drain(self) -> None:
        """Wait until everything sent has left."""
        for direction, minibatch in list(self._sending):
            self.settle(direction, minibatch)

    def _door(self) -> Door | None:
        """Where workers of this machine can reach this one; None where messages are to go over Gloo."""
        if self._on_gpu or not hasattr(os, "memfd_create") or os.environ.get(SHARED_MEMORY) == "0":
            return None
        try:
            return Door()
        except OSError:  # a system that is not quite Linux, or keeps /proc from us
            return None

    def _exchange(self, card: str) -> dict[int, str]:
        """Tell every neighbour where this worker can be reached; returns what they say, by rank."""
        mine = torch.frombuffer(bytearray(card.encode().ljust(_CARD_BYTES, b"\0")), dtype=torch.uint8)
        theirs = {peer: torch.zeros_like(mine) for peer in self._neighbours}
        works = [dist.irecv(theirs[peer], peer, self._group, _CARD_TAG) for peer in self._neighbours]
        works += [dist.isend(mine, peer, self._group, _CARD_TAG) for peer in self._neighbours]
        for work in works:
            _started(work).wait()
        return {peer: bytes(one.tolist()).rstrip(b"\0").decode() for peer, one in theirs.items()}

    def _offer(self, direction: Direction, minibatch: int, source: int, wires: Sequence[Wire]) -> _Transfer:
        size = layout([wire.size for wire in wires])[-1]
        slot = self._slots.take(size)
        self._links[source].offer((direction, minibatch), slot, size)
        return _Transfer(source, wires=wires, slot=slot)

    def _listen(self, direction: Direction, minibatch: int, source: int, wires: Sequence[Wire]) -> _Transfer:
        tensors = [torch.empty(wire.shape, dtype=wire.dtype, pin_memory=self._on_gpu) for wire in wires]
        transfer = _Transfer(source, tensors)
        for index, tensor in enumerate(tensors):
            if tensor.numel():
                tag = _tag(direction, minibatch, index, len(tensors))
                transfer.works.append(_started(dist.irecv(tensor, source, self._group, tag)))
        return transfer

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
    """Turn what torch.distributed, or a link, raises when a peer is lost into one line that begins with `message`."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        raise PeerLost(f"{message}: {reason(error)}") from error


def _started(work: dist.Work | None) -> dist.Work:
    """Only a process outside the group gets none."""
    assert work is not None
    return work


def _tag(direction: Direction, minibatch: int, index: int, count: int) -> int:
    """Tags may repeat after 2**31: only messages under way at the same time must differ."""
    return ((minibatch * count + index) * len(Direction) + direction) % _TAGS


def reason(error: BaseException) -> str:
    """What Gloo, or the system, says went wrong, without where in its source and without its general advice."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    line = str(error).strip().partition("\n")[0]
    return _PLACE.sub("", line).partition(". This is typically")[0]
