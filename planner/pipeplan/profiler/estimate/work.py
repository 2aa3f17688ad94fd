"""What one operator has to do, in numbers that no device changes."""

from __future__ import annotations

from dataclasses import dataclass


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
    """One of `pipeplan.devices.KINDS`."""
    arithmetic: str
    """The type that it computes in, one of `pipeplan.devices.ARITHMETICS`."""
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
