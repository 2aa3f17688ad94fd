"""Shared-memory slots for messages from workers of the same machine, one message per slot.

A slot is an anonymous file (memfd). It has no name that could be left behind, and the kernel frees it with the last
process that has it open, however that process ends. The receiver maps the file, and the tensors of a message lie in it
until nothing refers to them. The slot then serves another message, so a steady pipeline allocates nothing. The sender
writes to the file without mapping it, so its own resident memory does not grow.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

ALIGNMENT = 64
"""Alignment of each tensor of a message, in bytes: the alignment of torch's own CPU tensors."""


@dataclass(frozen=True)
class MessageTensor:
    """Shape and dtype of one tensor of a message."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numbers(self) -> int:
        """Number of elements of the tensor."""
        return math.prod(self.shape)

    @property
    def size(self) -> int:
        """Size of the tensor, in bytes."""
        return self.numbers * self.dtype.itemsize


@dataclass(eq=False)
class Slot:
    """Memory for one message."""

    number: int
    file: int
    """The slot's file descriptor."""
    memory: mmap.mmap
    known: set[int] = field(default_factory=set)
    """Ranks that have the slot's file open."""
    holder: weakref.ref[memoryview] | None = None
    """The buffer that the tensors in the slot keep alive."""


class SlotPool:
    """All slots of one receiver."""

    def __init__(self) -> None:
        self._free: list[Slot] = []
        self._made = 0

    def take(self, size: int) -> Slot:
        """A slot for `size` bytes: the smallest free one that is at most twice as large, or else a new one."""
        fitting = [slot for slot in list(self._free) if size <= len(slot.memory) <= 2 * _whole_pages(size)]
        if not fitting:
            return self._make(_whole_pages(size))
        slot = min(fitting, key=lambda one: len(one.memory))
        self._free.remove(slot)
        return slot

    def tensors(self, slot: Slot, layout: Sequence[MessageTensor]) -> list[Tensor]:
        """The tensors of the message in a slot. The slot is free again when they and all their views are gone."""
        memory = memoryview(slot.memory)

        def free(_: object) -> None:  # called in any thread
            self._free.append(slot)

        slot.holder = weakref.ref(memory, free)
        offsets = tensor_offsets([spec.size for spec in layout])
        return [_tensor(memory, spec, offset) for spec, offset in zip(layout, offsets, strict=False)]

    def _make(self, size: int) -> Slot:
        file = os.memfd_create("pipeplan")
        os.ftruncate(file, size)
        self._made += 1
        return Slot(self._made, file, mmap.mmap(file, size))


def tensor_offsets(sizes: Sequence[int]) -> list[int]:
    """Byte offset of each tensor of a message, given their sizes in bytes, followed by the end of the message."""
    offsets = [0]
    for size in sizes:
        offsets.append(offsets[-1] + -(-size // ALIGNMENT) * ALIGNMENT)
    return offsets


def write_message(file: int, tensors: Sequence[Tensor]) -> None:
    """Write a message into a slot's file. Its tensors must be contiguous and in CPU memory. Raises `OSError`."""
    for tensor, offset in zip(tensors, tensor_offsets([tensor.nbytes for tensor in tensors]), strict=False):
        if tensor.nbytes:
            data = memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))
            done = 0
            while done < tensor.nbytes:
                done += os.pwrite(file, data[done:], offset + done)


def _tensor(memory: memoryview, spec: MessageTensor, offset: int) -> Tensor:
    if not spec.size:
        return torch.empty(spec.shape, dtype=spec.dtype)
    return torch.frombuffer(memory, dtype=spec.dtype, count=spec.numbers, offset=offset).view(spec.shape)


def _whole_pages(size: int) -> int:
    return max(1, -(-size // mmap.PAGESIZE)) * mmap.PAGESIZE
