"""Memory for tensors that arrive from a worker of the same machine, one message in each slot.

A slot is an anonymous file (memfd): it has no name that could be left behind, and the kernel frees it with the last
process that has it open, however that ends. The receiver maps it, and the tensors of a message lie in it until nothing
refers to them any more; then the slot serves another message, so that a steady pipeline allocates nothing. The sender
does not map it but writes to the file: its own resident memory does not grow.
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
"""Bytes; where each tensor of a message begins, so that vector instructions find it as they do torch's own."""


@dataclass(frozen=True)
class Wire:
    """Shape and type of one tensor of a message."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numbers(self) -> int:
        """Elements of the tensor."""
        return math.prod(self.shape)

    @property
    def size(self) -> int:
        """Bytes of the tensor."""
        return self.numbers * self.dtype.itemsize


@dataclass(eq=False)
class Slot:
    """Room for one message."""

    number: int
    file: int
    """Its file descriptor."""
    memory: mmap.mmap
    known: set[int] = field(default_factory=set)
    """Ranks that have its file open."""
    holder: weakref.ref[memoryview] | None = None
    """What the tensors in it keep alive."""


class Slots:
    """The slots of one receiver."""

    def __init__(self) -> None:
        self._free: list[Slot] = []
        self._made = 0

    def take(self, size: int) -> Slot:
        """A free slot for `size` bytes, the smallest that is less than twice as large, or else a new one."""
        fitting = [slot for slot in list(self._free) if size <= len(slot.memory) <= 2 * _whole_pages(size)]
        if not fitting:
            return self._make(_whole_pages(size))
        slot = min(fitting, key=lambda one: len(one.memory))
        self._free.remove(slot)
        return slot

    def tensors(self, slot: Slot, wires: Sequence[Wire]) -> list[Tensor]:
        """The message in a slot. The slot is free again when its tensors, and all views of them, are gone."""
        memory = memoryview(slot.memory)

        def emptied(_: object) -> None:  # in any thread
            self._free.append(slot)

        slot.holder = weakref.ref(memory, emptied)
        offsets = layout([wire.size for wire in wires])
        return [_tensor(memory, wire, offset) for wire, offset in zip(wires, offsets, strict=False)]

    def _make(self, size: int) -> Slot:
        file = os.memfd_create("pipeplan")
        os.ftruncate(file, size)
        self._made += 1
        return Slot(self._made, file, mmap.mmap(file, size))


def layout(sizes: Sequence[int]) -> list[int]:
    """Where each tensor of a message begins, then where the message ends, in bytes."""
    offsets = [0]
    for size in sizes:
        offsets.append(offsets[-1] + -(-size // ALIGNMENT) * ALIGNMENT)
    return offsets


def write(file: int, tensors: Sequence[Tensor]) -> None:
    """Put a message, of contiguous tensors in CPU memory, into a slot by its file. Raises `OSError`."""
    for tensor, offset in zip(tensors, layout([tensor.nbytes for tensor in tensors]), strict=False):
        if tensor.nbytes:
            data = memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))
            done = 0
            while done < tensor.nbytes:
                done += os.pwrite(file, data[done:], offset + done)


def _tensor(memory: memoryview, wire: Wire, offset: int) -> Tensor:
    if not wire.size:
        return torch.empty(wire.shape, dtype=wire.dtype)
    return torch.frombuffer(memory, dtype=wire.dtype, count=wire.numbers, offset=offset).view(wire.shape)


def _whole_pages(size: int) -> int:
    return max(1, -(-size // mmap.PAGESIZE)) * mmap.PAGESIZE
