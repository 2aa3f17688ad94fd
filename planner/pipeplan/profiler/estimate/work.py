"""The work of one operator, the sizes and types of its tensors, and its time on a device by the roofline model.

time = kernels · kernel_s + max(FLOPs · padding / (peak · compute share), bytes / (bandwidth · memory share))

Source: S. Williams, A. Waterman and D. Patterson, Roofline, Communications of the ACM 52(4), 2009. The padding arises
because matrix products are computed in whole tiles, which may extend beyond the matrix (NVIDIA, Matrix Multiplication
Background User's Guide, "tile quantization").
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from pipeplan.cluster_data.devices import DeviceFile

_NAMES = {torch.float64: "float64", torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


@dataclass(frozen=True)
class TransformedWork:
    """A convolution as products of transformed tiles.

    It runs in three steps with separate kernels: transform both tensors, multiply, transform back.
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
    """The work of one operator, or of a part of an operator."""

    kind: str
    """One of `pipeplan.cluster_data.devices.OPERATOR_KINDS`."""
    arithmetic: str
    """The number type of its arithmetic, one of `pipeplan.cluster_data.devices.ARITHMETICS`."""
    flops: float = 0.0
    """FLOPs, two per multiply-add; 0 for operators whose time is limited by memory."""
    bytes: float = 0.0
    """Bytes read and written, each tensor once."""
    sides: tuple[int, int] | None = None
    """Rows and columns of the matrix product; None if the operator is not a matrix product."""
    kernels: int = 1
    """Number of kernels that run one after another."""
    converted_bytes: float = 0.0
    """Bytes read and written to convert tensors to channels last, for arithmetic that needs this layout."""
    transformed: TransformedWork | None = None
    """This work by another algorithm, which may be faster on a device that supports it."""


def bytes_of(*values: Any) -> float:
    """Bytes of all tensors in nested values. An expanded tensor counts with the size of its storage."""
    return float(sum(min(tensor.nbytes, tensor.untyped_storage().nbytes()) for tensor in tensors_in(values)))


def tensors_in(values: Any) -> list[Tensor]:
    """All tensors in nested values."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def arithmetic_of(*values: Any) -> str:
    """Name of the type that an operator computes in: the type of the first floating-point tensor, else float32."""
    for tensor in tensors_in(values):
        if tensor.is_floating_point():
            return _NAMES.get(tensor.dtype, "float32")
    return "float32"


def autocast_tensor(tensor: Tensor) -> Tensor:
    """The tensor as autocast passes it to an operator that runs in the smaller type."""
    if torch.is_autocast_enabled("cpu") and tensor.dtype == torch.float32:
        return tensor.to(torch.get_autocast_dtype("cpu"))
    return tensor


def total_seconds(works: Iterable[Work], device: DeviceFile) -> float:
    """Time of operators that run one after another, in seconds."""
    return sum(operator_seconds(work, device) for work in works)


def operator_seconds(work: Work, device: DeviceFile) -> float:
    """Time of one operator, in seconds."""
    arithmetic = device.usable_arithmetic(work.kind, work.arithmetic)
    share, tile = device.share_of(work.kind), device.tile.sides if device.tile else (1, 1)
    peak = device.peaks[arithmetic] * share.compute
    rate = device.bandwidth.rate * share.memory
    elementwise = device.bandwidth.rate * device.share.elementwise.memory
    direct = max(work.flops * tile_padding(work.sides, tile) / peak, work.bytes / rate)
    if device.channels_last is not None and arithmetic in device.channels_last.arithmetic:
        direct += work.converted_bytes / elementwise
    best, transformed, limits = direct, work.transformed, device.transforms
    fits = transformed and limits and transformed.workspace_bytes <= limits.workspace
    if transformed and limits and fits and limits.arithmetic == arithmetic:
        # The steps are separate kernels, so their times add up. The transforms are elementwise.
        compute_s = transformed.flops * tile_padding(transformed.sides, tile) / peak
        best = min(direct, compute_s + transformed.bytes / elementwise)
    return work.kernels * device.kernel.time + best


def tile_padding(sides: tuple[int, int] | None, tile: tuple[int, int]) -> float:
    """Computed elements divided by wanted elements, with the tile in the orientation that wastes less."""
    if sides is None:
        return 1.0
    rows, columns = sides
    areas = [_rounded_up(rows, height) * _rounded_up(columns, width) for height, width in (tile, tile[::-1])]
    return min(areas) / (rows * columns)


def _rounded_up(size: int, step: int) -> int:
    return -(-size // step) * step
