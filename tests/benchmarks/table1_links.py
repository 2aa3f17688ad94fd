"""The rows of Table 1 in Narayanan et al., PipeDream, SOSP 2019. Minibatch sizes are from the authors' scripts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

from pipeplan.cluster_data import cluster_toml, devices
from pipeplan.cluster_data.cluster import Cluster
from pipeplan.errors import InputError
from pipeplan.profile_data import pipedream
from pipeplan.profile_data.profile import Profile
from pipeplan.util import files

SOURCE = "Narayanan et al., PipeDream: Generalized Pipeline Parallelism for DNN Training, SOSP 2019, Table 1"


@dataclass(frozen=True)
class PublishedRow:
    """One row: a model on a cluster, the paper's configuration, and its speed-up over data parallelism."""

    model: str
    profile: str
    """Name of the model's profile, both the published and the bundled one."""
    minibatch: int
    """Samples per GPU."""
    servers: int
    gpus_per_server: int
    cluster: str
    config: str
    """Replica counts from input to output, or `straight`, as the paper writes it."""
    speedup: float
    """Of an epoch, over data parallelism."""
    to_accuracy: float | None
    """Speed-up in the time to the target accuracy; None where the paper has none."""

    @property
    def name(self) -> str:
        """The row's name on the command line: `vgg16-4x4`."""
        return f"{self.profile}-{self.shape}"

    @property
    def shape(self) -> str:
        """Servers and GPUs per server, as the paper writes them: `4x4`."""
        return f"{self.servers}x{self.gpus_per_server}"

    @property
    def workers(self) -> int:
        """Number of GPUs."""
        return self.servers * self.gpus_per_server

    @property
    def replicas(self) -> tuple[int, ...]:
        """Replicas of every stage; `straight` has one stage per worker."""
        if self.config == "straight":
            return (1,) * self.workers
        return tuple(int(count) for count in self.config.split("-"))


ROWS = (
    PublishedRow("VGG-16", "vgg16", 64, 4, 4, "A", "15-1", 5.28, 5.28),
    PublishedRow("VGG-16", "vgg16", 64, 2, 8, "B", "15-1", 2.98, 2.46),
    PublishedRow("ResNet-50", "resnet50", 128, 4, 4, "A", "16", 1.0, 1.0),
    PublishedRow("ResNet-50", "resnet50", 128, 2, 8, "B", "16", 1.0, 1.0),
    PublishedRow("AlexNet", "alexnet", 256, 4, 4, "A", "15-1", 4.92, None),
    PublishedRow("AlexNet", "alexnet", 256, 2, 8, "B", "15-1", 2.04, None),
    PublishedRow("GNMT-16", "gnmt16", 64, 1, 4, "A", "straight", 1.46, 2.2),
    PublishedRow("GNMT-16", "gnmt16", 64, 4, 4, "A", "straight", 2.34, 2.92),
    PublishedRow("GNMT-16", "gnmt16", 64, 2, 8, "B", "straight", 3.14, 3.14),
    PublishedRow("GNMT-8", "gnmt8", 64, 1, 4, "A", "straight", 1.5, 1.5),
    PublishedRow("GNMT-8", "gnmt8", 64, 3, 4, "A", "straight", 2.95, 2.95),
    PublishedRow("GNMT-8", "gnmt8", 64, 2, 8, "B", "16", 1.0, 1.0),
    PublishedRow("AWD-LM", "awd-lm", 80, 1, 4, "A", "straight", 4.25, 4.25),
    PublishedRow("S2VT", "s2vt", 80, 4, 1, "C", "2-1-1", 3.01, 3.01),
)

FITTED = {"A": "vgg16-4x4", "B": "vgg16-2x8"}
"""By cluster, the row whose published speed-up the rate of its all-reduces is fitted to."""


def row_named(name: str) -> PublishedRow | None:
    """The row of a name; None where there is none."""
    return next((row for row in ROWS if row.name == name), None)


# Profiles for the rows: those that PipeDream's authors measured, or bundled estimates where these are missing.

MEASURED_AT = {"vgg16": 128, "alexnet": 256, "resnet50": 128, "gnmt8": 32, "gnmt16": 128}
"""Minibatch size of the published profiles. Their format does not state it.

The first dimension of their tensors shows it: the decoder's state of GNMT-8 has 131,072 bytes, 32 vectors of 1024
numbers of 4 bytes, that of GNMT-16 524,288 (docs/estimate.md).
"""


@dataclass(frozen=True)
class ProfileSource:
    """A profile for one row, at the row's minibatch size."""

    profile: Profile
    published: bool
    """Whether PipeDream's authors measured it. Otherwise it is a bundled estimate."""
    measured_at: int
    """The minibatch size of the measurement, before times were scaled in proportion."""

    @property
    def text(self) -> str:
        """A few words on the origin: `published at 128, scaled to 64`."""
        kind = "published" if self.published else "estimated"
        scaled = self.measured_at != self.profile.minibatch
        return f"{kind} at {self.measured_at}" + (f", scaled to {self.profile.minibatch}" if scaled else "")


def folder_of(reference: Path | None) -> Path | None:
    """The folder `pipedream` inside a folder of reference data. Raises `InputError` where it has no profile."""
    if reference is None:
        return None
    folder = reference / "pipedream"
    if not any((folder / f"{name}.txt").is_file() for name in MEASURED_AT):
        raise InputError(
            f"{reference} has no pipedream/vgg16.txt or the like: give the folder above PipeDream's profiles"
        )
    return folder


def profile_of(row: PublishedRow, folder: Path | None) -> ProfileSource:
    """The profile of a row at the row's minibatch size: from `folder`, else the bundled one."""
    file = folder / f"{row.profile}.txt" if folder is not None else None
    if file is not None and file.is_file():
        size = MEASURED_AT[row.profile]
        profile = pipedream.read_pipedream_profile(file, size, "V100")
        return ProfileSource(profile.rescaled(row.minibatch), True, size)
    profile = Profile.load(files.bundled_folder("profiles") / f"{row.profile}-v100.json")
    return ProfileSource(profile.rescaled(row.minibatch), False, profile.minibatch)


# Link efficiencies: the share of its nominal rate that each link reaches, by cluster, level and operation.
#
# One published figure per cluster depends on them in a known way: the speed-up of VGG-16's 15-1 over data parallelism.
# The step time of 15-1 is bound by compute and does not depend on the all-reduce between servers. The step time of data
# parallelism depends on that all-reduce and on no other link: its next forward pass waits for the update, so that the
# all-reduce, of 2 (D-1)/D · w / (B · share) seconds, hides behind the backward pass alone, and the last bucket of
# gradients behind nothing (the DDP overlap in docs/cost-model.md):
#
# step time = (f + b + u + exposed(share)) / D
#
# The share of the all-reduce between servers is fitted by bisection, as the step time falls while the share grows. All
# other shares are stated, with their source, because no published figure determines them.

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
