"""The points of a sweep: all combinations of the values of its axes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from pipeplan.cluster_data import variants
from pipeplan.cluster_data.cluster import Cluster
from pipeplan.errors import InputError
from pipeplan.from_options.build_problem import Request
from pipeplan.plan.schedules import INFERENCE, SCHEDULES
from pipeplan.util.text import did_you_mean
from pipeplan.util.units import show_rate, show_size

MOST_POINTS = 10_000
BEST = "best"
"""The word for a schedule that pipeplan chooses."""


@dataclass(frozen=True)
class SweepAxes:
    """The values of each quantity that a sweep varies; an empty list leaves the quantity unchanged."""

    bandwidths: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Bandwidths in bytes/s, by the name of the level."""
    memory: Sequence[int] = ()
    """Memory of a device, in bytes."""
    microbatch: Sequence[int] = ()
    """Microbatch sizes in samples."""
    schedules: Sequence[str] = ()
    """Names of schedules; if empty, pipeplan chooses the schedule, as in `pipeplan solve`."""


class SweepPoint(Request):
    """One problem of a sweep. Solving it checks whether it is valid."""

    @property
    def schedule(self) -> str:
        """Name of the schedule; `best` if pipeplan chooses it."""
        return INFERENCE if self.options.get("inference") else self.options.get("schedule") or BEST

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
        """Samples per second if all workers computed without pause."""
        return self.profile.minibatch * self.cluster.total_speed / self._work_s

    @property
    def _work_s(self) -> float:
        backward = 0.0 if self.options.get("inference") else 1.0
        return math.fsum(layer.forward_s + backward * layer.backward_s for layer in self.profile.layers)

    def settings(self) -> dict[str, str]:
        """The settings that may differ between points, as text by short names; workers come first."""
        rates = {f"{name} links": show_rate(rate) for name, rate in self.bandwidths.items() if rate}
        return (
            {"servers": str(self.cluster.servers), "workers": str(self.cluster.workers)}
            | rates
            | {
                "memory": show_size(self.memory_bytes),
                "microbatch": str(self.microbatch or "best"),
                "schedule": self.schedule,
            }
        )


def sweep_points(shared: SweepPoint, clusters: Sequence[Cluster], axes: SweepAxes) -> list[SweepPoint]:
    """All combinations in the order of the lists, with the other settings of `shared`. The last axis varies fastest.

    Raises `InputError` for an unknown level or schedule, an invalid microbatch size, or too many combinations.
    """
    number = len(clusters) * math.prod(
        max(1, len(values)) for values in (*axes.bandwidths.values(), axes.memory, axes.microbatch, axes.schedules)
    )
    if number > MOST_POINTS:
        raise InputError(f"{number} combinations are too many: at most {MOST_POINTS}")
    for schedule in axes.schedules:
        if schedule not in SCHEDULES:
            raise InputError(f"there is no schedule {schedule!r}; {did_you_mean(schedule, SCHEDULES)}")
    return [
        replace(shared, cluster=cluster, microbatch=size, options=shared.options | schedule)
        for cluster in _clusters(clusters, axes)
        for size in (axes.microbatch or (None,))
        for schedule in ([{"schedule": name} for name in axes.schedules] or [{}])
    ]


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
