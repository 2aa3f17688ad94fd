"""The tables and fields of a device file, as their types state them; docs/file-formats.md describes them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args

from msgspec import Meta, Struct

from pipeplan.util.typed import LARGEST, WrittenRate, WrittenSize, WrittenTime

DEVICE_FORMAT = "pipeplan-device"
DEVICE_VERSION = 1
Arithmetic = Literal["float64", "float32", "tf32", "float16", "bfloat16"]
ARITHMETICS: tuple[str, ...] = get_args(Arithmetic)
# The limits keep estimated times far from what a profile cannot hold.
Part = Annotated[float, Meta(ge=1e-6, le=1)]
Side = Annotated[int, Meta(ge=1, le=1 << 16)]
LEAST_RATE = 1e3
"""Least bytes/s of a memory."""
LONGEST_KERNEL_S = 3600.0


class Share(Struct, frozen=True, forbid_unknown_fields=True):
    """Shares of the device's peak rates that one kind of operator reaches, each from 1e-6 to 1."""

    compute: Part
    """Share of the peak FLOP/s."""
    memory: Part
    """Share of the peak memory bandwidth."""
    source: str
    """Where the figures come from."""


class ShareTables(Struct, forbid_unknown_fields=True):
    """The tables `[share.…]`: one for each kind of operator."""

    matmul: Share
    convolution: Share
    weight_gradient: Share
    """The weight gradient of a convolution."""
    recurrent: Share
    """The part of a recurrent step that cannot start before the previous step is done."""
    attention: Share
    normalisation: Share
    pooling: Share
    embedding: Share
    elementwise: Share


OPERATOR_KINDS = ShareTables.__struct_fields__
"""Kinds of operator."""


class _Sourced(Struct, kw_only=True, forbid_unknown_fields=True):
    source: str


class RateTable(_Sourced, kw_only=True, forbid_unknown_fields=True):
    """The table `[bandwidth]`."""

    rate: WrittenRate


class TimeTable(_Sourced, kw_only=True, forbid_unknown_fields=True):
    """The table `[kernel]`."""

    time: WrittenTime


class PeakTable(_Sourced, kw_only=True, forbid_unknown_fields=True):
    """A table `[peak.…]`."""

    flops: Annotated[float, Meta(ge=1e3, le=LARGEST)]
    """FLOP/s."""


class PeakTables(Struct, kw_only=True, forbid_unknown_fields=True):
    """The tables `[peak.…]`: one for each arithmetic that the device has."""

    float64: PeakTable | None = None
    float32: PeakTable
    tf32: PeakTable | None = None
    float16: PeakTable | None = None
    bfloat16: PeakTable | None = None


class Float32Table(_Sourced, kw_only=True, forbid_unknown_fields=True):
    """The table `[float32_as]`."""

    matmul: Arithmetic | None = None
    convolution: Arithmetic | None = None
    weight_gradient: Arithmetic | None = None
    recurrent: Arithmetic | None = None
    attention: Arithmetic | None = None
    normalisation: Arithmetic | None = None
    pooling: Arithmetic | None = None
    embedding: Arithmetic | None = None
    elementwise: Arithmetic | None = None


class TileTable(_Sourced, kw_only=True, forbid_unknown_fields=True):
    """The table `[tile]`."""

    sides: tuple[Side, Side]


class TransformsTable(_Sourced, kw_only=True, forbid_unknown_fields=True):
    """The table `[transforms]`."""

    arithmetic: Arithmetic
    workspace: WrittenSize


class ChannelsTable(_Sourced, kw_only=True, forbid_unknown_fields=True):
    """The table `[channels_last]`."""

    arithmetic: tuple[Arithmetic, ...]


class DeviceFile(Struct, kw_only=True, forbid_unknown_fields=True):
    """A device file."""

    format: Literal["pipeplan-device"]
    version: Literal[1]
    name: str
    kind: Literal["cpu", "cuda"]
    memory: WrittenSize
    checked: tuple[str, ...] = ()
    bandwidth: RateTable
    kernel: TimeTable
    peak: PeakTables
    share: ShareTables
    float32_as: Float32Table | None = None
    tile: TileTable | None = None
    transforms: TransformsTable | None = None
    channels_last: ChannelsTable | None = None


def present(table: Struct) -> Iterator[tuple[str, Any]]:
    """The fields of a table that are there, with their values."""
    for name in table.__struct_fields__:
        value = getattr(table, name)
        if value is not None:
            yield name, value
