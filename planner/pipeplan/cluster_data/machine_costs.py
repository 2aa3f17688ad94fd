"""The measured costs of the executor on this machine: a file in the user's cache folder, read without torch.

The file is a JSON object. The fields `machine`, `torch` and `pipeplan` identify the measured system. If one of them has
changed, the figures are not used, and `pipeplan profile` measures again.
"""

from __future__ import annotations

import importlib.metadata
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct

from pipeplan._version import __version__
from pipeplan.cluster_data.cluster import Cluster
from pipeplan.cluster_data.executor_costs import ExecutorCosts
from pipeplan.errors import InputError
from pipeplan.profile_data.profile import Profile
from pipeplan.util.files import read_document, write_json
from pipeplan.util.typed import Amount, decode

FORMAT, VERSION = "pipeplan-executor-costs", 7
SWITCH = "PIPEPLAN_EXECUTOR_COSTS"
"""Environment variable. With the value `off`, the executor is not measured, and earlier measurements are not used."""


@dataclass(frozen=True)
class IdleCores:
    """Idle time of cores if there are more workers than cores, because a worker waits although another core is idle.

    The idle share falls with the square root of each worker's work per minibatch: the longer a worker computes, the
    less often it waits for a core while another core is idle (docs/cost-model.md, "Shared cores").
    """

    cores: int
    share: float
    """Share of the cores that is idle, measured with one more worker than cores."""
    work_s: float
    """Each worker's work per minibatch during that measurement, in seconds."""

    def share_at(self, workers: int, work_s: float | None = None) -> float:
        """The idle share for `workers` workers, each with `work_s` seconds of work per minibatch; None for the measured
        work."""
        if workers <= self.cores:
            return 0.0
        return self.share * math.sqrt(min(1.0, self.work_s / work_s)) if work_s else self.share


@dataclass(frozen=True)
class MachineCosts:
    """The costs of the executor on this machine, and the joint throughput of several busy workers."""

    costs: ExecutorCosts
    """The costs of a worker while other workers are busy."""
    throughput: Mapping[int, float]
    """By number of workers, their throughput if all compute at the same time, relative to a single worker."""
    when: str
    """UTC time of the measurement, in ISO 8601."""
    disturbed: bool = False
    """Whether other programs used the machine during the measurement."""
    alone_pass_s: float | None = None
    """The cost `pass_s` of a worker that has the machine to itself; None if it equals `costs.pass_s`."""
    idle: IdleCores | None = None
    """Idle time of cores that workers share; None if it was not measured."""

    def costs_of(self, workers: int) -> ExecutorCosts:
        """The costs of one of `workers` workers."""
        if workers > 1 or self.alone_pass_s is None:
            return self.costs
        return replace(self.costs, pass_s=self.alone_pass_s)

    def together(self, workers: int) -> float:
        """Throughput of `workers` workers while all cores compute, relative to a single worker.

        The throughput is linear between measured numbers of workers, and constant beyond the largest measured
        number."""
        below = max((count for count in self.throughput if count <= workers), default=0)
        above = min((count for count in self.throughput if count >= workers), default=below)
        if not below:
            return float(workers)
        low, high = self.throughput[below], self.throughput[above]
        share = (workers - below) / (above - below) if above > below else 0.0
        return max(1.0, low + share * (high - low))

    def done_by(self, workers: int, work_s: float | None = None) -> float:
        """Throughput of `workers` workers relative to a single worker, including idle cores; each has `work_s` of work
        per minibatch."""
        return self.together(workers) * self.in_use(workers, work_s)

    def in_use(self, workers: int, work_s: float | None = None) -> float:
        """Share of the cores that `workers` workers use, each with `work_s` seconds of work per minibatch."""
        return 1.0 - (self.idle.share_at(workers, work_s) if self.idle else 0.0)

    def to_json(self) -> dict[str, Any]:
        """The content of the file."""
        return {
            "format": FORMAT,
            "version": VERSION,
            **_made_with(),
            "when": self.when,
            "disturbed": self.disturbed,
            "executor": self.costs.to_json(),
            "throughput": {str(count): value for count, value in self.throughput.items()},
            "alone_pass_s": self.alone_pass_s,
            "idle": None if self.idle is None else asdict(self.idle),
        }


class ExecutorCostsFile(Struct):
    """The file of the measurements."""

    format: Literal["pipeplan-executor-costs"]
    version: Literal[7]
    machine: str
    torch: str
    pipeplan: str
    when: str
    disturbed: bool
    executor: ExecutorCosts
    throughput: dict[str, Amount]
    alone_pass_s: Amount | None = None
    idle: IdleCores | None = None


def enabled() -> bool:
    """Whether the executor's costs are measured and used."""
    return os.environ.get(SWITCH, "").lower() not in ("off", "0", "no")


def cache_file() -> Path:
    """The file of the measurements."""
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(root) / "pipeplan" / "executor-costs.json"


def machine_costs() -> MachineCosts | None:
    """The measurements on this machine with these versions; None if there are no valid ones."""
    path = cache_file()
    if not enabled() or not path.is_file():
        return None
    try:
        file = decode(read_document(path, FORMAT, VERSION), ExecutorCostsFile)
        if any(getattr(file, name) != value for name, value in _made_with().items()):
            return None
        throughput = {int(count): value for count, value in file.throughput.items()}
        return MachineCosts(file.executor, throughput, file.when, file.disturbed, file.alone_pass_s, file.idle)
    except (InputError, ValueError):
        return None  # A damaged file is measured again.


def save(measured: MachineCosts) -> None:
    """Write the file of the measurements. Raises an `InputError` if the file cannot be written."""
    write_json(cache_file(), measured.to_json())


def with_machine_costs(cluster: Cluster) -> Cluster:
    """A cluster of this machine's CPU workers, with the measured costs; unchanged if nothing was measured."""
    measured = machine_costs() if shares_processors(cluster) else None
    if measured is None:
        return cluster
    workers = cluster.workers
    cluster = _with_cores(cluster, measured.done_by(workers))
    return replace(cluster, executor=measured.costs_of(workers))


def whole_cores(cluster: Cluster) -> Cluster:
    """The cluster with whole cores instead of a measured throughput, for layers that were measured under load."""
    cores = cluster.device.cores
    if float(cores).is_integer() or not cluster.uniform:
        return cluster
    return _with_cores(cluster, math.ceil(cores))


def _shared_out(cluster: Cluster, profile: Profile) -> Cluster:
    """The cluster with the number of cores that its workers effectively have, if it has this machine's measured costs.

    Layer times that were measured under load already include the slowdown from other workers. No layer time includes
    idle cores, because these depend on the work of a minibatch.
    """
    measured, loaded = machine_costs(), profile.provenance.processes > 1
    whole = whole_cores(cluster) if loaded else cluster
    workers = cluster.workers
    if measured is None or replace(cluster.executor, step_s=0.0, read_s=0.0) != measured.costs_of(workers):
        return whole
    costs = measured.costs
    layers_s = profile.total_s + sum(layer.update_s for layer in profile.layers)
    work_s = layers_s / workers + 2 * costs.pass_s + 4 * costs.message_s
    if not loaded:
        return _with_cores(cluster, measured.done_by(workers, work_s))
    cores = measured.idle.cores if measured.idle else whole.device.cores or workers
    return _with_cores(cluster, cores * measured.in_use(workers, work_s))


def _with_cores(cluster: Cluster, cores: float) -> Cluster:
    shared = round(cores, 3) if cores < cluster.workers_per_server else 0
    return replace(cluster, device=replace(cluster.device, cores=shared))


def shares_processors(cluster: Cluster) -> bool:
    """Whether the workers of a cluster are processes on the processors of one machine."""
    return cluster.device.kind == "cpu" and cluster.servers == 1 and cluster.uniform


def as_charged(profile: Profile, cluster: Cluster, busy: int) -> tuple[Profile, Cluster]:
    """The profile with times for `busy` busy workers, and the cluster with the costs to charge in addition.

    Times under load include the mutual slowdown of workers. Times of a calibrated profile include the executor's work.
    """
    if shares_processors(cluster):
        profile = profile.under_load(busy)
    if profile.provenance.kind == "calibrated":
        return profile, without_costs(cluster)
    cluster = _shared_out(cluster, profile)
    if profile.step_s:
        cluster = replace(cluster, executor=replace(cluster.executor, step_s=profile.step_s))
    return profile, cluster


def with_one_worker(cluster: Cluster) -> Cluster:
    """The cluster with one worker of a machine, which shares its cores with no other worker."""
    levels = tuple(replace(level, count=1) for level in cluster.levels)
    measured, costs = machine_costs(), cluster.executor
    if measured is not None and costs == measured.costs:
        costs = measured.costs_of(1)
    return replace(cluster, levels=levels, device=replace(cluster.device, cores=0), executor=costs)


def without_costs(cluster: Cluster) -> Cluster:
    """The cluster without the measured times of the executor, for layers whose times include them."""
    return whole_cores(replace(cluster, executor=cluster.executor.memory_only()) if cluster.executor else cluster)


def _made_with() -> dict[str, str]:
    """The fields that identify the measured system: processor, cores that this process may use, and versions."""
    from pipeplan.cluster_data.local import local_processors

    here = local_processors()
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch = ""
    return {"machine": f"{here.name}, {here.cores} cores", "torch": torch, "pipeplan": __version__}
