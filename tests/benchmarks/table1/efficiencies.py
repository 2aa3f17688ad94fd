"""Link efficiencies: the share of its nominal rate that each link reaches, by cluster, level and operation.

One published figure per cluster depends on them in a known way: the speed-up of VGG-16's 15-1 over data parallelism.
The pace of 15-1 is bound by compute and does not depend on the all-reduce between servers. The pace of data
parallelism depends on that all-reduce and on no other link: its next forward pass waits for the update, so that the
all-reduce, of 2 (D-1)/D · w / (B · share) seconds, hides behind the backward pass alone, and the last bucket of
gradients behind nothing (the DDP overlap in docs/cost-model.md):

    pace = (f + b + u + exposed(share)) / D

The share of the all-reduce between servers is fitted by bisection, as the pace falls while the share grows. All other
shares are stated, with their source, because no published figure determines them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

from pipeplan.cluster_data import cluster_toml, devices
from pipeplan.cluster_data.cluster import Cluster
from pipeplan.errors import InputError
from table1.published import PublishedRow

ALLREDUCE, MESSAGES = "all-reduce", "send/recv"
STEPS = 40
"""Halvings of the interval, which then has a width of 1e-12."""
SMALLEST_SHARE = 0.01

GLOO_RATE = 1.073e9
"""Bytes/s each way that a Gloo process reached over TCP."""
_GLOO = (
    "PipeDream sends by Gloo (its driver_configs); 1.073 GB/s each way between two processes over TCP and 40 Gbit/s"
    " (pytorch/gloo issue 248)"
)
_NOMINAL = "the nominal rate, as no measurement on this cluster was found"
_NCCL = "NCCL over TCP reached 60% of 32 Gbit/s (NVIDIA/nccl issue 209)"


Gain = Callable[[PublishedRow, Sequence["Efficiency"]], float]


@dataclass(frozen=True)
class Efficiency:
    """The efficiency of one operation on the links of one level."""

    cluster: str
    level: str
    operation: str
    nominal: float
    """Bytes/s in each direction."""
    share: float
    """Reached share of the nominal rate."""
    how: str
    """`fitted` or `stated`."""
    source: str

    @property
    def rate(self) -> float:
        """Reached bytes/s."""
        return self.nominal * self.share


def stated() -> tuple[Efficiency, ...]:
    """The stated efficiencies. The nominal rate stands in for those that are fitted later."""
    efficiencies = []
    for name in ("A", "B", "C"):
        for level in _loaded(name).levels:
            if level.count == 1:
                continue
            share, source = (0.6, _NCCL) if name == "C" else (1.0, _NOMINAL)
            efficiencies.append(Efficiency(name, level.name, ALLREDUCE, level.bandwidth, share, "stated", source))
            share = min(1.0, GLOO_RATE / level.bandwidth)
            efficiencies.append(Efficiency(name, level.name, MESSAGES, level.bandwidth, share, "stated", _GLOO))
    return tuple(efficiencies)


def cluster_of(row: PublishedRow, efficiencies: Sequence[Efficiency]) -> Cluster:
    """The cluster of a row with these efficiencies. Devices other than a V100 have the ratio of the peaks as speed."""
    cluster = _loaded(row.cluster)
    if row.servers != cluster.servers:
        cluster = cluster.with_servers(row.servers)
    shares = {(one.level, one.operation): one.share for one in efficiencies if one.cluster == row.cluster}
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
    return cluster_toml.load_cluster(name)


@cache
def speed_of(cluster: str) -> float:
    """Speed of a cluster's devices relative to a V100, on which all profiles were made. Cluster C has other cards."""
    if cluster != "C":
        return 1.0
    peaks = [devices.load_device(name).peaks["float32"] for name in ("titan-x", "v100")]
    return peaks[0] / peaks[1]


def between_servers(
    efficiencies: Sequence[Efficiency], cluster: str, share: float, source: str
) -> tuple[Efficiency, ...]:
    """A copy with another share for the all-reduce between the servers of a cluster."""
    top = _loaded(cluster).levels[-1].name
    return tuple(
        replace(one, share=share, how="fitted", source=source)
        if (one.cluster, one.level, one.operation) == (cluster, top, ALLREDUCE)
        else one
        for one in efficiencies
    )


def solve_share(wanted: float, gain: Callable[[float], float], steps: int = STEPS) -> float | None:
    """The share at which a gain that falls with the share has the wanted value; None where no share up to 1 does."""
    low, high = SMALLEST_SHARE, 1.0
    if not gain(high) <= wanted <= gain(low):
        return None
    for _ in range(steps):
        middle = (low + high) / 2
        low, high = (middle, high) if gain(middle) > wanted else (low, middle)
    return (low + high) / 2


def fit_efficiencies(rows: Mapping[str, PublishedRow], gain: Gain) -> tuple[Efficiency, ...]:
    """All efficiencies, with the all-reduce between servers fitted to the row of each cluster in `rows`.

    `gain` predicts the speed-up of a row's configuration over data parallelism. Raises `InputError` where no share
    gives the published speed-up, which means that the profile is of another model.
    """
    efficiencies = stated()
    for cluster, row in rows.items():
        source = f"{row.model} {row.shape}: {row.config} is {row.speedup:g}× data parallelism"
        share = solve_share(row.speedup, partial(_gain_at_share, gain, row))
        if share is None:
            raise InputError(f"no efficiency of the links of cluster {cluster} gives {source}: is its profile of that?")
        efficiencies = between_servers(efficiencies, cluster, share, source)
    return efficiencies


def _gain_at_share(gain: Gain, row: PublishedRow, share: float) -> float:
    """The speed-up of a row on a cluster whose all-reduce between servers has that share."""
    return gain(row, between_servers(stated(), row.cluster, share, ""))
