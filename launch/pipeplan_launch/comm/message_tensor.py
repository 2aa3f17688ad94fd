"""The tensors of a message between stages, and their places in one block of memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

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
