"""Time of work on a device by the roofline model, where an operator reaches a share of each roof.

time = kernels · kernel_s + max(FLOPs · padding / (peak · compute share), bytes / (bandwidth · memory share))

Source: S. Williams, A. Waterman and D. Patterson, Roofline, Communications of the ACM 52(4), 2009. The padding arises
because matrix products are computed in whole tiles, which may extend beyond the matrix (NVIDIA, Matrix Multiplication
Background User's Guide, "tile quantization").
"""

from __future__ import annotations

from collections.abc import Iterable

from pipeplan.cluster_data.devices import DeviceModel
from pipeplan.profiler.estimate.work import TransformedWork, Work


def total_seconds(works: Iterable[Work], device: DeviceModel) -> float:
    """Time of operators that run one after another, in seconds."""
    return sum(operator_seconds(work, device) for work in works)


def operator_seconds(work: Work, device: DeviceModel) -> float:
    """Time of one operator, in seconds."""
    arithmetic = device.usable_arithmetic(work.kind, work.arithmetic)
    share = device.shares[work.kind]
    peak = device.peaks[arithmetic] * share.compute
    rate = device.bandwidth * share.memory
    elementwise = device.bandwidth * device.shares["elementwise"].memory
    direct = max(work.flops * tile_padding(work.sides, device.tile) / peak, work.bytes / rate)
    if arithmetic in device.channels_last:
        direct += work.converted_bytes / elementwise
    best, transformed = direct, work.transformed
    if transformed is not None and _has_transforms(transformed, arithmetic, device):
        # The steps are separate kernels, so their times add up. The transforms are elementwise.
        compute_s = transformed.flops * tile_padding(transformed.sides, device.tile) / peak
        best = min(direct, compute_s + transformed.bytes / elementwise)
    return work.kernels * device.kernel_s + best


def _has_transforms(transformed: TransformedWork, arithmetic: str, device: DeviceModel) -> bool:
    limits = device.transforms
    if limits is None or limits.arithmetic != arithmetic:
        return False
    return transformed.workspace_bytes <= limits.workspace_bytes


def tile_padding(sides: tuple[int, int] | None, tile: tuple[int, int]) -> float:
    """Computed elements divided by wanted elements, with the tile in the orientation that wastes less."""
    if sides is None:
        return 1.0
    rows, columns = sides
    areas = [_rounded_up(rows, height) * _rounded_up(columns, width) for height, width in (tile, tile[::-1])]
    return min(areas) / (rows * columns)


def _rounded_up(size: int, step: int) -> int:
    return -(-size // step) * step
