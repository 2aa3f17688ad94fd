"""What share of its nominal rate every link reaches, per cluster, level and operation, and where each figure is from.

One figure a cluster was published that depends on them in a known way: how much faster VGG-16's 15-1 is than data
parallelism. The pace of 15-1 does not depend on the all-reduce between servers (it computes). That of data parallelism
does, and on no other link: its next forward pass waits for the update, so that its all-reduce, in all
2 (D-1)/D · w / (B · share), hides behind the backward pass alone, and the last bucket of gradients behind nothing
(`pipeplan.awaited`):

    pace = (f + b + u + exposed(share)) / D

So the share of the all-reduce between servers is fitted: solved for by halving, as the pace falls while the share
grows. Nothing else can be; all other shares are stated, with their source.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

from pipeplan import cluster_file, devices
from pipeplan.cluster_data import Cluster
from pipeplan.errors import InputError
from pipeplan.reproduce.published import Published

ALLREDUCE, MESSAGES = "all-reduce", "send/recv"
STEPS = 40
"""Halvings: to a share of 1e-12."""
LEAST = 0.01

GLOO_RATE = 1.073e9
"""Bytes/s each way that a Gloo process reached over TCP."""
_GLOO = (
    "PipeDream sends by Gloo (its driver_configs); 1.073 GB/s each way between two processes over TCP and 40 Gbit/s"
    " (pytorch/gloo issue 248)"
)
_NOMINAL = "the nominal rate, as no measurement on this cluster was found"
_NCCL = "NCCL over TCP reached 60% of 32 Gbit/s (NVIDIA/nccl issue 209)"


Gain = Callable[[Published, Sequence["Efficiency"]], float]


@dataclass(frozen=True)
class Efficiency:
    """Of one operation on the links of one level."""

    cluster: str
    level: str
    operation: str
    nominal: float
    """Bytes/s, each direction."""
    share: float
    """What is reached of it."""
    how: str
    """`fitted` or `stated`."""
    source: str

    @property
    def rate(self) -> float:
        """Bytes/s that are reached."""
        return self.nominal * self.share


def stated() -> tuple[Efficiency, ...]:
    """All but those that are fitted, whose nominal rate stands here until they are."""
    found = []
    for name in ("A", "B", "C"):
        for level in _loaded(name).levels:
            if level.count == 1:
                continue
            share, source = (0.6, _NCCL) if name == "C" else (1.0, _NOMINAL)
            found.append(Efficiency(name, level.name, ALLREDUCE, level.bandwidth, share, "stated", source))
            share = min(1.0, GLOO_RATE / level.bandwidth)
            found.append(Efficiency(name, level.name, MESSAGES, level.bandwidth, share, "stated", _GLOO))
    return tuple(found)


def cluster_of(row: Published, known: Sequence[Efficiency]) -> Cluster:
    """The cluster of a row with these shares; devices other than a V100 at the ratio of their peaks."""
    cluster = _loaded(row.cluster)
    if row.servers != cluster.servers:
        cluster = cluster.with_servers(row.servers)
    shares = {(one.level, one.operation): one.share for one in known if one.cluster == row.cluster}
    levels = tuple(
        replace(
            level,
            allreduce_efficiency=shares.get((level.name, ALLREDUCE), level.allreduce_efficiency),
            sendrecv_efficiency=shares.get((level.name, MESSAGES), level.sendrecv_efficiency),
        )
        for level in cluster.levels
    )
    return replace(cluster, levels=levels, device=replace(cluster.device, speed=speed_of(row.cluster)))


@cache
def _loaded(name: str) -> Cluster:
    return cluster_file.load(name)


@cache
def speed_of(cluster: str) -> float:
    """Of its devices beside a V100: all profiles are a V100's, and cluster C has other cards."""
    if cluster != "C":
        return 1.0
    peaks = [devices.load(name).peaks["float32"] for name in ("titan-x", "v100")]
    return peaks[0] / peaks[1]


def between_servers(known: Sequence[Efficiency], cluster: str, share: float, source: str) -> tuple[Efficiency, ...]:
    """The same with another share for the all-reduce between the servers of a cluster."""
    top = _loaded(cluster).levels[-1].name
    return tuple(
        replace(one, share=share, how="fitted", source=source)
        if (one.cluster, one.level, one.operation) == (cluster, top, ALLREDUCE)
        else one
        for one in known
    )


def solve_share(wanted: float, gain: Callable[[float], float], steps: int = STEPS) -> float | None:
    """The share at which a gain that falls as the share grows is the wanted one; None where none up to 1 gives it."""
    low, high = LEAST, 1.0
    if not gain(high) <= wanted <= gain(low):
        return None
    for _ in range(steps):
        middle = (low + high) / 2
        low, high = (middle, high) if gain(middle) > wanted else (low, middle)
    return (low + high) / 2


def fit(rows: Mapping[str, Published], gain: Gain) -> tuple[Efficiency, ...]:
    """All shares, those of the all-reduce between servers fitted to one row for each cluster in `rows`.

    `gain` predicts what a row's configuration gains over data parallelism. Raises an `InputError` where a row cannot
    be met with any share: then its profile is not of this model.
    """
    known = stated()
    for cluster, row in rows.items():
        source = f"{row.model} {row.shape}: {row.config} is {row.speedup:g}× data parallelism"
        share = solve_share(row.speedup, partial(_tried, gain, row))
        if share is None:
            raise InputError(f"no efficiency of the links of cluster {cluster} gives {source}: is its profile of that?")
        known = between_servers(known, cluster, share, source)
    return known


def _tried(gain: Gain, row: Published, share: float) -> float:
    """The gain of a row on a cluster whose all-reduce between servers has that share."""
    return gain(row, between_servers(stated(), row.cluster, share, ""))
