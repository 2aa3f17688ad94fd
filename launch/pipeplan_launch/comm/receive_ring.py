"""Rings of memory for received messages: the message of a replica's k-th minibatch lies in slot k mod n.

The memory is allocated once, when a slot is first used, and never freed while training: so nothing has to be recorded
for the allocator, and a pipeline in its steady state allocates nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pipeplan_launch.comm.message_tensor import MessageTensor, tensor_offsets
from pipeplan_launch.plan.one_order import Direction

MessageKey = tuple[Direction, int]
"""(direction, number of the minibatch)."""


@dataclass
class RingSlot:
    """The memory of one message."""

    memory: Tensor
    key: MessageKey | None = None
    """The message that is in it, or was last."""
    free: list[Any] = field(default_factory=list)
    """Marks of the computing stream after which the slot may be written again."""
    is_read: bool = True
    """Whether the last reader of the message has been handed to the computing stream."""

    def reserve(self, layout: Sequence[MessageTensor]) -> bool:
        """Make the slot large enough for a message; returns whether that took other memory."""
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
