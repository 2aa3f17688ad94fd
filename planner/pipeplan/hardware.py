"""Compares, by their names, the device that a profile was measured on with the devices of a cluster."""

from __future__ import annotations

import re

from pipeplan.cluster_data import Cluster
from pipeplan.profile_data import Profile

_COMMON_WORDS = {
    *("nvidia", "tesla", "geforce", "amd", "intel", "r", "tm", "cpu", "gpu", "gb", "gib", "core", "processor"),
    *("pcie", "sxm", "sxm2", "sxm3", "sxm4", "sxm5"),
}
"""Words in the names of devices that do not distinguish one device from another."""
_KINDS = ("cpu", "cuda")


def mismatch(profile: Profile, cluster: Cluster) -> str:
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
