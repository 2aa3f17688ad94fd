"""Device files: the peak rates of a device, and the share of these rates that each kind of operator reaches.

The types define the tables and fields of a file; docs/file-formats.md describes them. The bundled files are in
profiles/devices/. `device_mismatch` warns if a profile was measured on a device that the cluster does not have.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal, get_args

from msgspec import Meta, Struct

from pipeplan.cluster_data.cluster import Cluster
from pipeplan.errors import InputError
from pipeplan.profile_data.profile import Profile
from pipeplan.util import files
from pipeplan.util.files import read_toml
from pipeplan.util.text import did_you_mean
from pipeplan.util.typed import LARGEST, WrittenRate, WrittenSize, WrittenTime, decode

DEVICE_FORMAT = "pipeplan-device"
DEVICE_VERSION = 1
Arithmetic = Literal["float64", "float32", "tf32", "float16", "bfloat16"]
ARITHMETICS: tuple[str, ...] = get_args(Arithmetic)
# The limits keep estimated times within the range that a profile can represent.
Part = Annotated[float, Meta(ge=1e-6, le=1)]
Side = Annotated[int, Meta(ge=1, le=1 << 16)]
LEAST_RATE = 1e3
"""Smallest rate of a memory, in bytes/s."""
LONGEST_KERNEL_S = 3600.0
LOCAL_DEVICES = ("cpu", "cuda")
"""Values of `--device` that stand for a device of this machine. Times of such a device are measured, not estimated."""
_COMMON_WORDS = {
    *("nvidia", "tesla", "geforce", "amd", "intel", "r", "tm", "cpu", "gpu", "gb", "gib", "core", "processor"),
    *("pcie", "sxm", "sxm2", "sxm3", "sxm4", "sxm5"),
}
"""Words in device names that do not distinguish devices."""


class Share(Struct, frozen=True, forbid_unknown_fields=True):
    """Shares of the device's peak rates that one kind of operator reaches, each from 1e-6 to 1."""

    compute: Part
    """Share of the peak FLOP/s."""
    memory: Part
    """Share of the peak memory bandwidth."""
    source: str
    """Source of the figures."""


class ShareTables(Struct, forbid_unknown_fields=True):
    """The tables `[share.…]`: one for each kind of operator."""

    matmul: Share
    convolution: Share
    weight_gradient: Share
    """Shares of the weight gradient of a convolution."""
    recurrent: Share
    """Shares of the part of a recurrent step that cannot start before the previous step is done."""
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
    """Peak rate in FLOP/s."""


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

    @property
    def peaks(self) -> dict[str, float]:
        """Peak FLOP/s by arithmetic (`ARITHMETICS`)."""
        tables = ((name, getattr(self.peak, name)) for name in ARITHMETICS)
        return {name: table.flops for name, table in tables if table is not None}

    def share_of(self, kind: str) -> Share:
        """The shares of the peaks that a kind of operator reaches, one of `OPERATOR_KINDS`."""
        share: Share = getattr(self.share, kind)
        return share

    def usable_arithmetic(self, kind: str, arithmetic: str) -> str:
        """The arithmetic that the device uses for an operator of that kind, one of `peaks`."""
        wanted = arithmetic
        if arithmetic == "float32" and self.float32_as is not None:
            wanted = getattr(self.float32_as, kind, None) or arithmetic
        # The device computes in float32 if it has no units for the wanted type.
        return wanted if getattr(self.peak, wanted, None) is not None else "float32"


def bundled_device_names() -> list[str]:
    """The devices that come with pipeplan."""
    return sorted(path.stem for path in (files.bundled_folder("profiles") / "devices").glob("*.toml"))


def bundled_model_of(name: str) -> DeviceFile | None:
    """The bundled device that a device's name stands for (`V100 16 GB` is `v100`); None if there is none."""
    words = _words(name)
    for stem in bundled_device_names():
        if _words(stem) <= words:
            return load_device(stem)
    return None


def load_device(name: str) -> DeviceFile:
    """The bundled device of that name, or the device in the TOML file at that path.

    Raises an `InputError` if there is neither, or if the file is not a valid device file.
    """
    folded = name.lower()
    if folded in bundled_device_names():
        return read_device(files.bundled_folder("profiles") / "devices" / f"{folded}.toml")
    path = Path(name)
    if path.is_file():
        return read_device(path)
    if path.suffix == ".toml" or len(path.parts) > 1:
        raise InputError(f"there is no device file {name}")
    known = [*LOCAL_DEVICES, *bundled_device_names()]
    raise InputError(f"there is no device {name!r}; {did_you_mean(name, known)} (or give a TOML file)")


def read_device(path: Path) -> DeviceFile:
    """Read and check a device file. Raises an `InputError` that names the file and the wrong field."""
    root = read_toml(path, DEVICE_FORMAT, DEVICE_VERSION)
    with root.locating_errors():
        file = decode(root, DeviceFile)
        _check_limits(file)
        return file


def _check_limits(file: DeviceFile) -> None:
    """Raise an `InputError` for a rate or time that is out of range, or a number format without a peak rate."""
    if file.bandwidth.rate < LEAST_RATE:
        raise InputError(f"bandwidth: rate: {file.bandwidth.rate:g} bytes/s is less than {LEAST_RATE:g}")
    if file.kernel.time > LONGEST_KERNEL_S:
        raise InputError(f"kernel: time: {file.kernel.time:g} s is more than {LONGEST_KERNEL_S:g} s")
    named = [(f"float32_as: {kind}", getattr(file.float32_as, kind, None)) for kind in OPERATOR_KINDS]
    named += [("transforms: arithmetic", file.transforms.arithmetic)] if file.transforms else []
    named += [
        ("channels_last: arithmetic", name) for name in (file.channels_last.arithmetic if file.channels_last else ())
    ]
    for where, name in named:
        if name is not None and name not in file.peaks:
            raise InputError(f"{where}: there is no peak rate of {name!r}; there are: {', '.join(file.peaks)}")


def device_mismatch(profile: Profile, cluster: Cluster) -> str:
    """A note for the user if the profile matches none of the cluster's devices; empty if it may match one.

    Names are compared by their words: a V100 of 16 GB is not an A100, but `Tesla V100-SXM2` is a V100.
    """
    origin = profile.provenance
    if any(_may_match(origin.device, origin.device_name, device.kind, device.name) for device in cluster.devices):
        return ""
    available = ", ".join(dict.fromkeys(device.name for device in cluster.devices))
    profiled = origin.device_name or origin.device
    return (
        f"note: the profile is for {profiled}, and cluster {cluster.name} has {available}: the plan is right if layers "
        "take the same time on both; if not, profile on one of them, or for one with --device"
    )


def _may_match(kind: str, name: str, other_kind: str, other_name: str) -> bool:
    if kind in LOCAL_DEVICES and kind != other_kind:
        return False
    words, other_words = _words(name), _words(other_name)
    return not words or not other_words or bool(words & other_words)


def _words(name: str) -> set[str]:
    words = re.findall(r"[a-z0-9]+", name.lower())
    return {
        word for word in words if word not in _COMMON_WORDS and not word.isdecimal() and not re.match(r"\d+g", word)
    }
