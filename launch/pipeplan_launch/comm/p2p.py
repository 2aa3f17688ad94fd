"""Point-to-point messages between neighbouring stages: activations forwards, gradients backwards.

Messages go over Gloo, in CPU memory; a stage on a GPU copies through pinned memory. Every tensor of every minibatch has
its own tag, so receives can be posted in advance, in any order. A send returns at once, and the transport keeps its
tensors until they have left.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from pipeplan_launch.devices.backend import backend_of
from pipeplan_launch.errors import PeerLost
from pipeplan_launch.plan.communication_order import Direction


@dataclass(frozen=True)
class MessageTensor:
    """Shape and dtype of one tensor of a message."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Size of the tensor, in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


TAGS_OF_MESSAGE = 1024
"""Number of tags per message if a worker runs several stages, whose messages have different numbers of tensors."""
_TAGS = 2**31 - 1
_SOURCE_LOCATION = re.compile(r"^\[[^]]*:\d+\] ")


MessageKey = tuple[Direction, int]
"""(direction, number of the minibatch)."""
Mailbox = dict[MessageKey, list[Tensor]]
"""Messages between stages of one worker that are sent but not taken yet, by direction and number."""


@dataclass
class PostedMessage:
    """A message whose send or receive has been posted, with its tensors."""

    key: MessageKey
    peer: int
    tensors: Sequence[Tensor]
    works: list[dist.Work] = field(default_factory=list)

    def settle(self) -> None:
        """Wait until the message has left or arrived. On a GPU only the computing stream waits."""
        for work in self.works:
            work.wait()


class Transport:
    """The messages that one stage of a worker sends and receives. Not thread-safe."""

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
        mailbox: Mailbox | None = None,
    ) -> None:
        """`stages`: the number of stages of the pipeline if a worker runs several of them, else 1. `gradients`: the
        process group for gradients; None if `group` carries all messages. `mailbox`: shared by all stages of the
        worker, which pass messages to each other through it without a copy.
        """
        self._worker_name = f"stage {stage} (rank {rank})"
        self._stage, self._stages, self._rank = stage, stages, rank
        self._device, self._backend = device, backend_of(device)
        returning = group if gradients is None else gradients
        self._groups = {Direction.ACTIVATIONS: group, Direction.GRADIENTS: returning}
        self._receiving: dict[MessageKey, PostedMessage] = {}
        self._sending: dict[MessageKey, PostedMessage] = {}
        self._mailbox = {} if mailbox is None else mailbox

    def post(self, direction: Direction, minibatch: int, source: int, layout: Sequence[MessageTensor]) -> None:
        """Post the receive of a message; `take` waits for it later."""
        earlier = self._receiving.get((direction, minibatch))
        if source == self._rank or (earlier is not None and earlier.peer == source):
            return  # this worker sends it, or an earlier segment posted the receive and ended before this minibatch
        tensors = [self._backend.host_tensor(spec.shape, spec.dtype) for spec in layout]
        self._receiving[direction, minibatch] = transfer = PostedMessage((direction, minibatch), source, tensors)
        with receiving(self._worker_name, direction, minibatch, source):
            for tensor, tag in self._tagged(direction, self._number(minibatch), tensors):
                transfer.works.append(started(dist.irecv(tensor, source, self._groups[direction], tag)))

    def take(self, direction: Direction, minibatch: int) -> list[Tensor]:
        """Wait for a posted message; returns its tensors. Raises `PeerLost` if it does not arrive."""
        if (here := self._mailbox.pop((direction, self._number(minibatch)), None)) is not None:
            return here
        transfer = self._receiving.pop((direction, minibatch))
        with receiving(self._worker_name, direction, minibatch, transfer.peer):
            transfer.settle()
        return [tensor.to(self._device, non_blocking=True) for tensor in transfer.tensors]

    def send(self, direction: Direction, minibatch: int, destination: int, tensors: Sequence[Tensor]) -> None:
        """Start sending tensors, which must not be modified until `settle` or `drain`."""
        number = self._number(minibatch, direction)
        if destination == self._rank:
            self._mailbox[direction, number] = [tensor.detach() for tensor in tensors]
            return
        posted = [self._to_wire(tensor.detach()) for tensor in tensors]
        self._sending[direction, minibatch] = transfer = PostedMessage((direction, minibatch), destination, posted)
        with sending(self._worker_name, direction, minibatch, destination):
            for tensor, tag in self._tagged(direction, number, transfer.tensors):
                transfer.works.append(started(dist.isend(tensor, destination, self._groups[direction], tag)))

    def settle(self, direction: Direction, minibatch: int) -> None:
        """Wait until a message has left, if it was sent. The message's memory may then be reused."""
        transfer = self._sending.pop((direction, minibatch), None)
        if transfer is None:
            return
        with sending(self._worker_name, direction, minibatch, transfer.peer):
            transfer.settle()

    def drain(self) -> None:
        """Wait until all sent messages have left."""
        for direction, minibatch in list(self._sending):
            self.settle(direction, minibatch)

    def _number(self, minibatch: int, sent: Direction | None = None) -> int:
        """The number of a message that this stage receives, or sends in the direction `sent`.

        The number includes the receiving stage, so that stages of one worker do not take each other's messages.
        """
        if self._stages == 1:
            return minibatch
        step = 0 if sent is None else 1 if sent is Direction.ACTIVATIONS else -1
        return minibatch * self._stages + self._stage + step

    def _tagged(self, direction: Direction, number: int, tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, int]]:
        """The tensors of a message that are not empty, each with its tag. Tags repeat after 2**31; only messages in
        transit at the same time must differ.
        """
        # All messages have the same number of tags, so that tags of two stages differ.
        count = len(tensors) if self._stages == 1 else max(len(tensors), TAGS_OF_MESSAGE)
        for index, tensor in enumerate(tensors):
            if tensor.numel():
                yield tensor, ((number * count + index) * len(Direction) + direction) % _TAGS

    def _to_wire(self, tensor: Tensor) -> Tensor:
        if not self._backend.copies_to_host:
            return tensor.contiguous()
        in_host = self._backend.host_tensor(tuple(tensor.shape), tensor.dtype)
        return in_host.copy_(tensor)  # blocks until the GPU has written the copy, because Gloo reads it at once


def receiving(worker: str, direction: Direction, minibatch: int, peer: int) -> AbstractContextManager[None]:
    """`peer_loss_explained` for a message that `worker` receives."""
    message = f"the {direction.name.lower()} of minibatch {minibatch} from rank {peer}"
    return peer_loss_explained(f"{worker} waited for {message}, which did not come", peer)


def sending(worker: str, direction: Direction, minibatch: int, peer: int) -> AbstractContextManager[None]:
    """`peer_loss_explained` for a message that `worker` sends."""
    message = f"the {direction.name.lower()} of minibatch {minibatch} to rank {peer}"
    return peer_loss_explained(f"{worker} could not deliver {message}", peer)


@contextmanager
def peer_loss_explained(message: str, *peers: int, only_connections: bool = False) -> Iterator[None]:
    """Turn errors of torch.distributed into `PeerLost`, with one line that begins with `message`.

    `peers`: the ranks that this worker waits for, as far as they are known. `only_connections`: turn only connection
    errors, because the code may also fail for other reasons.
    """
    try:
        yield
    except (RuntimeError, OSError) as error:
        if only_connections and not isinstance(error, dist.DistError) and not _of_gloo(error):
            raise
        raise PeerLost(f"{message}: {error_cause(error)}", peers) from error


def _of_gloo(error: Exception) -> bool:
    """Whether an error comes from Gloo. Gloo has no error class, but its errors begin with a location in its source."""
    place = _SOURCE_LOCATION.match(str(error))
    return place is not None and "gloo" in place[0]


def started(work: dist.Work | None) -> dist.Work:
    """`work`, which is None only in a process outside the group."""
    assert work is not None
    return work


def error_cause(error: BaseException) -> str:
    """The cause of a Gloo or system error, without Gloo's source location and general advice."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    line = str(error).strip().partition("\n")[0]
    return _SOURCE_LOCATION.sub("", line).partition(". This is typically")[0]
