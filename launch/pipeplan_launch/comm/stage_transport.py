"""The messages of one stage on a worker that runs several: views of the worker's one transport.

A message's number tells the stage that receives it, so that stages of one worker do not take each other's messages. A
message from one stage to another of the same worker is handed over as it is, without a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from pipeplan_launch.comm.p2p import MessageTensor, Transport
from pipeplan_launch.plan.communication_order import Direction

Mailbox = dict[tuple[Direction, int], list[Tensor]]
"""Messages among the stages of one worker that have been sent and not taken yet, by direction and number."""


class StageTransport:
    """One stage's view of the transport of a worker that runs several stages."""

    in_order = False
    streams: Any = None

    def __init__(self, transport: Transport, mailbox: Mailbox, rank: int, stage: int, stages: int) -> None:
        """`mailbox`: that of the worker, which its stages share. `stages`: number of stages of the pipeline."""
        self._transport, self._mailbox = transport, mailbox
        self._rank, self._stage, self._stages = rank, stage, stages
        self._from_here: set[tuple[Direction, int]] = set()
        """Messages that another stage of this worker sends, and that are expected."""

    def post(self, direction: Direction, minibatch: int, source: int, layout: Sequence[MessageTensor]) -> None:
        """Post the receive of a message; `take` waits for it later."""
        if source == self._rank:
            self._from_here.add((direction, minibatch))
        else:
            self._transport.post(direction, self._number(minibatch, self._stage), source, layout)

    def take(self, direction: Direction, minibatch: int) -> list[Tensor]:
        """Wait for a posted message; returns its tensors. One of this worker's own is there already."""
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
