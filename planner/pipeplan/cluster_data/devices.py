"""Reads device files: the peak rates of a device, and the share of them that each kind of operator reaches.

docs/file-formats.md describes the format; the bundled files are in profiles/devices/. `device_mismatch` warns if a
profile was measured on another device than those of the cluster.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pipeplan.cluster_data.cluster import Cluster
from pipeplan.errors import InputError
from pipeplan.profile_data.profile import Profile
from pipeplan.util import files
from pipeplan.util.files import LARGEST, Node, read_toml
from pipeplan.util.text import did_you_mean
from pipeplan.util.units import parse_rate, parse_size, parse_time

DEVICE_FORMAT = "pipeplan-device"
DEVICE_VERSION = 1
LOCAL_DEVICES = ("cpu", "cuda")
"""Values of `--device` that stand for a device of this machine, which is measured and not estimated for."""
OPERATOR_KINDS = (
    "matmul",
    "convolution",
    "weight_gradient",
    "recurrent",
    "attention",
    "normalisation",
    "pooling",
    "embedding",
    "elementwise",
)
"""Kinds of operator. `weight_gradient` is the weight gradient of a convolution; `recurrent` is the part of a recurrent
step that cannot start before the previous step is done."""
ARITHMETICS = ("float64", "float32", "tf32", "float16", "bfloat16")
_COMMON_WORDS = {
    *("nvidia", "tesla", "geforce", "amd", "intel", "r", "tm", "cpu", "gpu", "gb", "gib", "core", "processor"),
    *("pcie", "sxm", "sxm2", "sxm3", "sxm4", "sxm5"),
}
"""Words in the names of devices that do not distinguish one device from another."""
_KINDS = ("cpu", "cuda")


@dataclass(frozen=True)
class Share:
    """Shares of the device's peak rates that one kind of operator reaches, each above 0 and at most 1."""

    compute: float
    """Share of the peak FLOP/s."""
    memory: float
    """Share of the peak memory bandwidth."""
    source: str = ""
    """Where the figures come from."""


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
        return _device(root)


def _device(root: Node) -> DeviceModel:
    root.refuse_others(
        {"format", "version", "name", "kind", "memory", "checked", "bandwidth", "kernel", "peak", "share"}
        | {"float32_as", "tile", "transforms", "channels_last"}
    )
    kind = root["kind"].text()
    if kind not in LOCAL_DEVICES:
        root["kind"].fail(f"expected 'cuda' or 'cpu', found {kind!r}")
    peaks = {name: _peak(node) for name, node in _table(root["peak"], ARITHMETICS).items()}
    if "float32" not in peaks:
        root["peak"].fail("the peak rate of 'float32' is missing")
    checked = root.get("checked")
    return DeviceModel(
        name=root["name"].text(),
        kind=kind,
        memory_bytes=parse_size(root["memory"].value, root["memory"].where),
        bandwidth=_sourced(root["bandwidth"], "rate", parse_rate),
        kernel_s=_sourced(root["kernel"], "time", parse_time, zero=True),
        peaks=peaks,
        shares=_shares(root["share"]),
        float32_as=_float32_as(root, peaks),
        tile=_tile(root),
        transforms=_transforms(root, peaks),
        channels_last=_channels_last(root, peaks),
        checked=tuple(operator.text() for operator in checked.items()) if checked else (),
    )


def _sourced(node: Node, field: str, read: Callable[[object, str], float], *, zero: bool = False) -> float:
    """A positive figure in a table of its own, beside the required `source`; 0 is allowed with `zero`."""
    node.refuse_others({field, "source"})
    node["source"].text()
    value = read(node[field].value, node[field].where)
    if not value and not zero:
        node[field].fail("must be above 0")
    if value > LARGEST:
        node[field].fail(f"expected at most {LARGEST:g}, found {value:g}")
    return value


def _peak(node: Node) -> float:
    node.refuse_others({"flops", "source"})
    node["source"].text()
    rate = node["flops"].number()
    if not rate:
        node["flops"].fail("must be above 0 (FLOP/s)")
    return rate


def _shares(node: Node) -> dict[str, Share]:
    tables = _table(node, OPERATOR_KINDS)
    for kind in OPERATOR_KINDS:
        if kind not in tables:
            node.fail(f"the kind {kind!r} is missing")
    return {kind: _share(table) for kind, table in tables.items()}


def _share(node: Node) -> Share:
    node.refuse_others({"compute", "memory", "source"})
    for field in ("compute", "memory"):
        if not 0 < node[field].number() <= 1:
            node[field].fail(f"expected a share above 0 and at most 1, found {node[field].value!r}")
    return Share(node["compute"].number(), node["memory"].number(), node["source"].text())


def _float32_as(root: Node, peaks: dict[str, float]) -> dict[str, str]:
    node = root.get("float32_as")
    if node is None:
        return {}
    table = _table(node, OPERATOR_KINDS, {"source"})
    node["source"].text()
    return {kind: _arithmetic(name, peaks) for kind, name in table.items()}


def _tile(root: Node) -> tuple[int, int]:
    node = root.get("tile")
    if node is None:
        return 1, 1
    node.refuse_others({"sides", "source"})
    node["source"].text()
    sides = [side.integer(minimum=1) for side in node["sides"].items()]
    if len(sides) != 2:
        node["sides"].fail(f"expected two numbers as in [128, 64], found {len(sides)}")
    return max(sides), min(sides)


def _transforms(root: Node, peaks: dict[str, float]) -> Transforms | None:
    node = root.get("transforms")
    if node is None:
        return None
    node.refuse_others({"arithmetic", "workspace", "source"})
    node["source"].text()
    return Transforms(
        _arithmetic(node["arithmetic"], peaks), parse_size(node["workspace"].value, node["workspace"].where)
    )


def _channels_last(root: Node, peaks: dict[str, float]) -> tuple[str, ...]:
    node = root.get("channels_last")
    if node is None:
        return ()
    node.refuse_others({"arithmetic", "source"})
    node["source"].text()
    return tuple(_arithmetic(name, peaks) for name in node["arithmetic"].items())


def _arithmetic(node: Node, peaks: dict[str, float]) -> str:
    """The name of an arithmetic that the device has a peak rate for."""
    if node.text() not in peaks:
        node.fail(f"there is no peak rate of {node.text()!r}; there are: {', '.join(peaks)}")
    return node.text()


def _table(node: Node, names: tuple[str, ...], also: set[str] | None = None) -> dict[str, Node]:
    """The fields of a table whose keys are in `names`. Other keys than these and those in `also` are refused."""
    node.refuse_others({*names, *(also or ())})
    return {key: node[key] for key in node.mapping() if key in names}


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
