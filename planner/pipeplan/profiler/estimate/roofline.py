"""How long a device takes for some work: the roofline, with what share of each roof is reached.

time = kernels · kernel_s + max(FLOPs · padding / (peak · compute share), bytes / (bandwidth · memory share))

S. Williams, A. Waterman and D. Patterson, Roofline, Communications of the ACM 52(4), 2009. Padding: matrix products are
computed in tiles, and what is in a tile's corner beyond the matrix is computed for nothing (NVIDIA, Matrix
Multiplication Background User's Guide, "tile quantization").
"""

from __future__ import annotations

from collections.abc import Iterable

from pipeplan.cluster_data.devices import DeviceModel
from pipeplan.profiler.estimate.work import Transformed, Work


def total(works: Iterable[Work], device: DeviceModel) -> float:
    """Seconds for some operators, one after another."""
    return sum(seconds(work, device) for work in works)


def seconds(work: Work, device: DeviceModel) -> float:
    """Seconds for one operator."""
    arithmetic = _arithmetic(work, device)
    share = device.shares[work.kind]
    peak = device.peaks[arithmetic] * share.compute
    rate = device.bandwidth * share.memory
    elementwise = device.bandwidth * device.shares["elementwise"].memory
    direct = max(work.flops * padding(work.sides, device.tile) / peak, work.bytes / rate)
    if arithmetic in device.channels_last:
        direct += work.converted_bytes / elementwise
    other = work.transformed
    if other is not None and _has_transforms(other, arithmetic, device):
        # Its steps are kernels of their own, so that nothing hides anything. Transforms are elementwise.
        direct = min(direct, other.flops * padding(other.sides, device.tile) / peak + other.bytes / elementwise)
    return work.kernels * device.kernel_s + direct


def _arithmetic(work: Work, device: DeviceModel) -> str:
    wanted = work.arithmetic
    if wanted == "float32":
        wanted = device.float32_as.get(work.kind, wanted)
    # A type that the device has no units for is computed in float32.
    return wanted if wanted in device.peaks else "float32"


def _has_transforms(other: Transformed, arithmetic: str, device: DeviceModel) -> bool:
    has = device.transforms
    return has is not None and has.arithmetic == arithmetic and other.workspace_bytes <= has.workspace_bytes


def padding(sides: tuple[int, int] | None, tile: tuple[int, int]) -> float:
    """What is computed over what is asked for, with tiles laid whichever way wastes less."""
    if sides is None:
        return 1.0
    rows, columns = sides
    ways = [_rounded(rows, one) * _rounded(columns, other) for one, other in (tile, tile[::-1])]
    return min(ways) / (rows * columns)


def _rounded(size: int, step: int) -> int:
    return -(-size // step) * step
