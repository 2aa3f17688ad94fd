"""Whether two results are the same but for rounding.

Most models compute in stages what they compute whole, bit by bit. Some operators differ in the last bits: sums run in
another order, and attention picks its kernel by the layout of its operands. Three rules decide, each where the one
before it does not:

1. Equal bits are equal.
2. A difference below `RELATIVE` of the largest element is rounding. Where a tensor is changed, its change is compared
   too, because a write that is lost may be far smaller than the tensor's values.
3. Sums that cancel, such as the gradient of a bias before BatchNorm, consist of rounding alone. So the model itself
   runs again, with every parameter changed in its last bit. What that changes (`Noise`) is rounding, times `MARGIN`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pipeplan_launch.runtime.self_check.kept_values import Kept, Unknown
from pipeplan_launch.runtime.self_check.training_state import same_bits

RELATIVE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.complex64: 1e-4, torch.complex128: 1e-9}
"""Largest difference that counts as rounding, relative to the largest element, by type."""
RELATIVE_LOW = 2e-2
"""The same for 16-bit types, and under autocast."""
MARGIN = 30.0
LAST_BITS = 8.0
"""Units in the last place of a tensor's largest element, below which its change is not compared."""


@dataclass(frozen=True)
class Tolerance:
    """The differences that count as rounding in one model."""

    low: bool
    """Whether it computes in 16 bits somewhere."""
    noise: Mapping[str, float] = field(default_factory=dict)
    """Largest change of a result, by its name, where every parameter changed in its last bit."""

    def close(self, one: Tensor, other: Tensor, name: str = "", before: Tensor | None = None) -> bool:
        """Whether two tensors are equal but for rounding; with `before`, also their changes since then.

        A tensor that changed on one side alone is not close.
        """
        if same_bits(one, other):
            return True
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        if before is not None and before.shape == one.shape and same_bits(one, before) != same_bits(other, before):
            return False
        one, other = dense(one), dense(other)
        if not (one.is_floating_point() or one.is_complex()):
            return False
        finite = one.isfinite() & other.isfinite()
        if not bool((finite | (one == other) | (one.isnan() & other.isnan())).all()):
            return False
        difference = _largest((one - other)[finite])
        allowed = self._relative(other) * _largest(other[finite])
        if before is not None and before.shape == other.shape:
            unit = torch.finfo(other.dtype).eps * LAST_BITS * _largest(other[finite])
            allowed = min(allowed, self._relative(other) * _largest((other - dense(before))[finite]) + unit)
        return bool(difference <= max(allowed, MARGIN * self.noise.get(name, 0.0)))

    def _relative(self, tensor: Tensor) -> float:
        return RELATIVE_LOW if self.low else RELATIVE.get(tensor.dtype, RELATIVE_LOW)

    def same_value(self, one: Kept | None, other: Kept | None) -> bool:
        """Whether two kept values are equal, numbers and tensors but for rounding."""
        if one is None or other is None:
            return one is other
        return self._same(one.content, other.content)

    def _same(self, one: Any, other: Any) -> bool:
        if isinstance(one, Unknown) or isinstance(other, Unknown):
            return type(one) is type(other)
        if type(one) is not type(other):
            return False
        if isinstance(one, Kept):
            return self._same(one.content, other.content)
        if isinstance(one, Tensor):
            return self.close(one, other)
        if isinstance(one, list):
            return len(one) == len(other) and all(map(self._same, one, other))
        if isinstance(one, dict):
            return one.keys() == other.keys() and all(self._same(one[key], other[key]) for key in one)
        if isinstance(one, float):
            return math.isclose(one, other, rel_tol=RELATIVE[torch.float32]) or (one != one and other != other)
        return bool(one == other)


def dense(tensor: Tensor) -> Tensor:
    """The tensor itself, or the dense form of a sparse one."""
    return tensor.to_dense() if tensor.layout is not torch.strided else tensor


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def largest_difference(one: Tensor, other: Tensor) -> float:
    """Largest difference of two tensors' elements; infinite where they cannot be compared."""
    one, other = dense(one), dense(other)
    if one.shape != other.shape:
        return float("inf")
    difference = (one.to(torch.float64) - other.to(torch.float64)) if not one.is_complex() else one - other
    return _largest(difference.nan_to_num(0.0, 0.0, 0.0) if not one.is_complex() else difference)


def last_bit_changed(parameter: Tensor, low: bool) -> Tensor:
    """A parameter with every element changed by about one unit in the last place, by fixed random signs."""
    if not parameter.is_floating_point():
        return parameter
    generator = torch.Generator().manual_seed(parameter.numel())
    signs = torch.randint(0, 2, parameter.shape, generator=generator, dtype=torch.int8).to(parameter.dtype) * 2 - 1
    unit = torch.finfo(torch.bfloat16 if low else parameter.dtype).eps
    return parameter * (1 + unit * signs)
