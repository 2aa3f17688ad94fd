"""What one operator has to do, in numbers that no device changes.

Sizes and types of tensors without data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class Transformed:
    """A convolution as products of transformed tiles, in three steps, each of them kernels of their own: transform
    both tensors, multiply, transform back."""

    flops: float
    """Of the multiplication."""
    bytes: float
    """Read and written by all three steps."""
    workspace_bytes: float
    """The transformed tensors."""
    sides: tuple[int, int]
    """Rows and columns of its matrix products."""


@dataclass(frozen=True)
class Work:
    """One operator, or one part of one."""

    kind: str
    """One of `pipeplan.cluster_data.devices.OPERATOR_KINDS`."""
    arithmetic: str
    """The type that it computes in, one of `pipeplan.cluster_data.devices.ARITHMETICS`."""
    flops: float = 0.0
    """Two per multiply-add; those of operators that memory bounds are left at 0."""
    bytes: float = 0.0
    """Read and written, each tensor once."""
    sides: tuple[int, int] | None = None
    """Rows and columns of the matrix product that it is, where it is one."""
    kernels: int = 1
    """How many run one after another."""
    converted_bytes: float = 0.0
    """Read and written to convert its tensors to channels last, for arithmetic that wants them so."""
    transformed: Transformed | None = None
    """The same by another algorithm, which a device may have and which may be faster."""


_NAMES = {
    torch.float64: "float64",
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}


def size_of(*values: Any) -> float:
    """Bytes in all the tensors of some values; of what is expanded, only what is there."""
    return float(sum(min(one.nbytes, one.untyped_storage().nbytes()) for one in tensors(values)))


def tensors(values: Any) -> list[Tensor]:
    """All tensors in nested values."""
    return [one for one in tree_leaves(values) if isinstance(one, Tensor)]


def arithmetic(*values: Any) -> str:
    """The type that is computed in: that of the first tensor of floating-point numbers, else float32."""
    for one in tensors(values):
        if one.is_floating_point():
            return _NAMES.get(one.dtype, "float32")
    return "float32"


def cast(tensor: Tensor) -> Tensor:
    """As autocast would hand it to an operator that it runs in the smaller type."""
    if torch.is_autocast_enabled("cpu") and tensor.dtype == torch.float32:
        return tensor.to(torch.get_autocast_dtype("cpu"))
    return tensor
