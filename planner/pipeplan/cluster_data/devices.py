"""Reads device files: the peak rates of a device, and the share of them that each kind of operator reaches.

docs/file-formats.md describes the format; the bundled files are in profiles/devices/. `device_mismatch` warns if a
profile was measured on another device than those of the cluster.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from pipeplan.cluster_data.cluster import Cluster
from pipeplan.cluster_data.device_document import (
    DEVICE_FORMAT,
    DEVICE_VERSION,
    LEAST_RATE,
    LONGEST_KERNEL_S,
    DeviceFile,
    Share,
    present,
)
from pipeplan.errors import InputError
from pipeplan.profile_data.profile import Profile
from pipeplan.util import files
from pipeplan.util.files import read_toml
from pipeplan.util.text import did_you_mean
from pipeplan.util.typed import decode

LOCAL_DEVICES = ("cpu", "cuda")
"""Values of `--device` that stand for a device of this machine, which is measured and not estimated for."""
_COMMON_WORDS = {
    *("nvidia", "tesla", "geforce", "amd", "intel", "r", "tm", "cpu", "gpu", "gb", "gib", "core", "processor"),
    *("pcie", "sxm", "sxm2", "sxm3", "sxm4", "sxm5"),
}
"""Words in the names of devices that do not distinguish one device from another."""
_KINDS = ("cpu", "cuda")


@dataclass(frozen=True)
class Transforms:
    """Use of Winograd's algorithm or Fourier transforms for convolutions, in the arithmetic for which a library has
    them."""

    arithmetic: str
    workspace_bytes: int
    """Most memory that the transformed tensors of one convolution may take; larger convolutions are computed without
    transforms."""


@dataclass(frozen=True)
class DeviceModel:
    """A device for which the times of layers are estimated."""

    name: str
    kind: str
    """`cuda` or `cpu`, the device type on which the executor would run."""
    memory_bytes: int
    bandwidth: float
    """Peak memory bandwidth, bytes/s."""
    kernel_s: float
    """Least time of one kernel, however small its work."""
    peaks: dict[str, float]
    """Peak FLOP/s by arithmetic (`ARITHMETICS`)."""
    shares: dict[str, Share]
    """Reached shares of the peaks by kind of operator, for all of `OPERATOR_KINDS`."""
    float32_as: dict[str, str]
    """Arithmetic that float32 operators use, by kind, for the kinds that do not use float32 itself."""
    tile: tuple[int, int]
    """Sides of the blocks in which matrix products are computed; the sides of a matrix are rounded up to them."""
    transforms: Transforms | None = None
    channels_last: tuple[str, ...] = ()
    """Arithmetics whose convolutions need tensors with channels last, and convert tensors of other layouts."""
    checked: tuple[str, ...] = ()
    """Sentences on the known errors of estimates for this device."""

    def usable_arithmetic(self, kind: str, arithmetic: str) -> str:
        """The arithmetic by which the device computes an operator of that kind, one of `peaks`."""
        wanted = self.float32_as.get(kind, arithmetic) if arithmetic == "float32" else arithmetic
        # The device computes in float32 if it has no units for the wanted type.
        return wanted if wanted in self.peaks else "float32"


def bundled_device_names() -> list[str]:
    """The devices that come with pipeplan."""
    return sorted(path.stem for path in (files.bundled_folder("profiles") / "devices").glob("*.toml"))


def bundled_model_of(name: str) -> DeviceModel | None:
    """The bundled device that a device's name stands for: `V100 16 GB` is `v100`; None if it is none of them."""
    words = _words(name)
    for stem in bundled_device_names():
        if _words(stem) <= words:
            return load_device(stem)
    return None


def load_device(name: str) -> DeviceModel:
    """The bundled device of that name, or the device in the TOML file at that path.

    Raises an `InputError` where there is neither, or where the file is not a valid device file.
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


def read_device(path: Path) -> DeviceModel:
    """Read and check a device file. Raises an `InputError` that names the file and the field that is wrong."""
    root = read_toml(path, DEVICE_FORMAT, DEVICE_VERSION)
    with root.locating_errors():
        return _device(decode(root, DeviceFile))


def _device(file: DeviceFile) -> DeviceModel:
    if file.bandwidth.rate < LEAST_RATE:
        raise InputError(f"bandwidth: rate: {file.bandwidth.rate:g} bytes/s is less than {LEAST_RATE:g}")
    if file.kernel.time > LONGEST_KERNEL_S:
        raise InputError(f"kernel: time: {file.kernel.time:g} s is more than {LONGEST_KERNEL_S:g} s")
    peaks = {name: peak.flops for name, peak in present(file.peak)}
    float32_as = dict(present(file.float32_as)) if file.float32_as else {}
    float32_as.pop("source", None)
    _check_peaks(file, float32_as, peaks)
    transforms = file.transforms
    return DeviceModel(
        name=file.name,
        kind=file.kind,
        memory_bytes=file.memory,
        bandwidth=float(file.bandwidth.rate),
        kernel_s=float(file.kernel.time),
        peaks=peaks,
        shares=dict(present(file.share)),
        float32_as=float32_as,
        tile=(max(file.tile.sides), min(file.tile.sides)) if file.tile else (1, 1),
        transforms=Transforms(transforms.arithmetic, int(transforms.workspace)) if transforms else None,
        channels_last=file.channels_last.arithmetic if file.channels_last else (),
        checked=file.checked,
    )


def _check_peaks(file: DeviceFile, float32_as: Mapping[str, str], peaks: Collection[str]) -> None:
    """Raise an `InputError` for an arithmetic that the device has no peak rate for."""
    named = [(f"float32_as: {kind}", name) for kind, name in float32_as.items()]
    named += [("transforms: arithmetic", file.transforms.arithmetic)] if file.transforms else []
    named += (
        [("channels_last: arithmetic", name) for name in file.channels_last.arithmetic] if file.channels_last else []
    )
    for where, name in named:
        if name not in peaks:
            raise InputError(f"{where}: there is no peak rate of {name!r}; there are: {', '.join(peaks)}")


def device_mismatch(profile: Profile, cluster: Cluster) -> str:
    """A note for the user where the profile is for none of the cluster's devices; empty where it may be for one.

    Names are compared by their words: a V100 of 16 GB is no A100, and `Tesla V100-SXM2` is a V100.
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
    if kind in _KINDS and kind != other_kind:
        return False
    words, other_words = _words(name), _words(other_name)
    return not words or not other_words or bool(words & other_words)


def _words(name: str) -> set[str]:
    words = re.findall(r"[a-z0-9]+", name.lower())
    return {
        word for word in words if word not in _COMMON_WORDS and not word.isdecimal() and not re.match(r"\d+g", word)
    }
