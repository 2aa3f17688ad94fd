"""The work of one operator, in numbers that do not depend on the device, and the sizes and types of its tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class TransformedWork:
    """A convolution as products of transformed tiles.

    It runs in three steps, each with kernels of its own: transform both tensors, multiply, transform back.
    """

    flops: float
    """FLOPs of the multiplication."""
    bytes: float
    """Bytes that the three steps read and write."""
    workspace_bytes: float
    """Bytes of the transformed tensors."""
    sides: tuple[int, int]
    """Rows and columns of the matrix products."""


@dataclass(frozen=True)
class Work:
    """One operator, or one part of one."""

    kind: str
    """One of `pipeplan.cluster_data.device_document.OPERATOR_KINDS`."""
    arithmetic: str
    """The type that it computes in, one of `pipeplan.cluster_data.device_document.ARITHMETICS`."""
    flops: float = 0.0
    """FLOPs, two per multiply-add; 0 for operators that memory bounds."""
    bytes: float = 0.0
    """Bytes read and written, each tensor once."""
    sides: tuple[int, int] | None = None
    """Rows and columns of the matrix product; None if the operator is none."""
    kernels: int = 1
    """Number of kernels that run one after another."""
    converted_bytes: float = 0.0
    """Bytes read and written to convert tensors to channels last, for arithmetic that needs this layout."""
    transformed: TransformedWork | None = None
    """This work by another algorithm, which may be faster on a device that has it."""


_NAMES = {
    torch.float64: "float64",
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}


def bytes_of(*values: Any) -> float:
    """Bytes of all tensors in nested values. An expanded tensor counts with the size of its storage."""
    return float(sum(min(tensor.nbytes, tensor.untyped_storage().nbytes()) for tensor in tensors_in(values)))


def tensors_in(values: Any) -> list[Tensor]:
    """All tensors in nested values."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def arithmetic_of(*values: Any) -> str:
    """Name of the type that an operator computes in: that of the first floating-point tensor, else float32."""
    for tensor in tensors_in(values):
        if tensor.is_floating_point():
            return _NAMES.get(tensor.dtype, "float32")
    return "float32"


def autocast_tensor(tensor: Tensor) -> Tensor:
    """The tensor as autocast would pass it to an operator that runs in the smaller type."""
    if torch.is_autocast_enabled("cpu") and tensor.dtype == torch.float32:
        return tensor.to(torch.get_autocast_dtype("cpu"))
    return tensor
