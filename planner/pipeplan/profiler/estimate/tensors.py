"""Sizes and types of tensors without data."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

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
