"""Whether a profile is for the devices of a cluster, as far as their names tell."""

from __future__ import annotations

import re

from pipeplan.cluster_data import Cluster
from pipeplan.profile_data import Profile

_SAYS_LITTLE = {
    *("nvidia", "tesla", "geforce", "amd", "intel", "r", "tm", "cpu", "gpu", "gb", "gib", "core", "processor"),
    *("pcie", "sxm", "sxm2", "sxm3", "sxm4", "sxm5"),
}
"""What devices have in common that are not the same."""
_KINDS = ("cpu", "cuda")


def mismatch(profile: Profile, cluster: Cluster) -> str:
    """What to know where the profile is for another device than any of the cluster's; empty where it may be right.

    Names are compared by their words: a V100 of 16 GB is no A100, and `Tesla V100-SXM2` is a V100.
    """
    origin = profile.provenance
    if any(_alike(origin.device, origin.device_name, device.kind, device.name) for device in cluster.devices):
        return ""
    theirs = ", ".join(dict.fromkeys(device.name for device in cluster.devices))
    mine = origin.device_name or origin.device
    return (
        f"note: the profile is for {mine}, and cluster {cluster.name} has {theirs}: this holds if layers take as long "
        "there; if not, profile on one of them, or for one with --device"
    )


def _alike(kind: str, name: str, other_kind: str, other_name: str) -> bool:
    if kind in _KINDS and kind != other_kind:
        return False
    mine, theirs = _words(name), _words(other_name)
    return not mine or not theirs or bool(mine & theirs)


def _words(name: str) -> set[str]:
    words = re.findall(r"[a-z0-9]+", name.lower())
    return {word for word in words if word not in _SAYS_LITTLE and not word.isdecimal() and not re.match(r"\d+g", word)}
