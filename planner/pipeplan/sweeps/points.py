"""The points of a sweep: all combinations of the values of its axes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from pipeplan.cluster_data import variants
from pipeplan.cluster_data.cluster import Cluster
from pipeplan.cluster_data.machine_costs import as_charged
from pipeplan.errors import InputError
from pipeplan.plan.schedules import INFERENCE
from pipeplan.planning.choose_synchrony import BEST
from pipeplan.problem.options import Options
from pipeplan.profile_data.profile import Profile
from pipeplan.util.units import show_rate, show_size

MOST_POINTS = 10_000


@dataclass(frozen=True)
class SweepAxes:
    """The values of each quantity that a sweep varies; an empty list leaves the quantity unchanged."""

    bandwidths: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """By the name of the level, in bytes/s."""
    memory: Sequence[int] = ()
    """Memory of a device, in bytes."""
    minibatch: Sequence[int] = ()
    schedules: Sequence[str] = ()
    """By name; `best` leaves the choice to pipeplan, as in `pipeplan solve`."""


@dataclass(frozen=True)
class SweepPoint:
    """One problem of a sweep. Whether it is a valid problem is checked when it is solved."""

    profile: Profile
    cluster: Cluster
    options: Options
    chooses: bool = False
    """Whether the schedule is left to pipeplan, which takes the synchronous plan unless another is much faster."""

    @property
    def schedule(self) -> str:
        """Name of the schedule; `best` where it is left to pipeplan."""
        if self.options.inference:
            return INFERENCE
        return BEST if self.chooses else self.options.schedule

    @property
    def memory_bytes(self) -> int:
        """Memory of the smallest device, in bytes."""
        return min(device.memory_bytes for device in self.cluster.devices)

    @property
    def bandwidths(self) -> dict[str, float]:
        """Bandwidth of the links of every level, in bytes/s, by the name of the level."""
        return {level.name: level.bandwidth for level in self.cluster.levels}

    @property
    def ideal_rate(self) -> float:
        """Samples per second if all workers computed all the time."""
        return self.profile.minibatch * self.cluster.total_speed / self._work_s

    @property
    def _work_s(self) -> float:
        inference, share = self.options.inference, self.options.update_share
        behind = [0.0 if inference else layer.backward_s + share * layer.update_s for layer in self.profile.layers]
        return math.fsum(layer.forward_s for layer in self.profile.layers) + math.fsum(behind)

    def settings(self) -> dict[str, str]:
        """The settings that may differ between points, formatted for readers, by short names; workers first."""
        rates = {f"{name} links": show_rate(rate) for name, rate in self.bandwidths.items() if rate}
        return (
            {"servers": str(self.cluster.servers), "workers": str(self.cluster.workers)}
            | rates
            | {
                "memory": show_size(self.memory_bytes),
                "minibatch": str(self.profile.minibatch),
                "schedule": self.schedule,
            }
        )


def sweep_points(profile: Profile, clusters: Sequence[Cluster], options: Options, axes: SweepAxes) -> list[SweepPoint]:
    """All combinations in the order of the lists, the last axis varying fastest.

    Raises `InputError` for an unknown level or schedule, an invalid minibatch size, or too many combinations.
    """
    number = len(clusters) * math.prod(
        max(1, len(values)) for values in (*axes.bandwidths.values(), axes.memory, axes.minibatch, axes.schedules)
    )
    if number > MOST_POINTS:
        raise InputError(f"{number} combinations are too many: at most {MOST_POINTS}")
    points = []
    for cluster in _clusters(clusters, axes):
        timed, charged = as_charged(profile, cluster, cluster.workers)
        for size in axes.minibatch or [profile.minibatch]:
            scaled = timed if size == timed.minibatch else timed.rescaled(size)
            for schedule in axes.schedules or [options.schedule]:
                named = options if schedule == BEST else replace(options, schedule=schedule)
                points.append(SweepPoint(scaled, charged, named, chooses=schedule == BEST))
    return points


def _clusters(clusters: Sequence[Cluster], axes: SweepAxes) -> list[Cluster]:
    swept = []
    for cluster in clusters:
        rates = [[(name, rate) for rate in values] for name, values in axes.bandwidths.items()]
        for combination in itertools.product(*rates):
            changed = cluster
            for name, rate in combination:
                changed = variants.with_bandwidth(changed, variants.level_index(changed, name), rate)
            swept += [variants.with_memory(changed, size) for size in axes.memory] if axes.memory else [changed]
    return swept
