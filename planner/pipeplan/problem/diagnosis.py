"""The diagnosis of a problem that has no plan: what does not fit, by how much, and which change would help."""

from __future__ import annotations

from dataclasses import dataclass

from pipeplan.plan.plan import Plan
from pipeplan.util.units import show_size


@dataclass(frozen=True)
class OversizedLayers:
    """Layers that must share a stage, and that fit on no device even without other layers."""

    layers: tuple[str, ...]
    needs_bytes: float
    capacity_bytes: float
    """Usable memory of the largest device."""

    @property
    def name(self) -> str:
        """The first layer, which names the group."""
        return self.layers[0]

    @property
    def missing_bytes(self) -> float:
        """Bytes by which the group exceeds the device."""
        return self.needs_bytes - self.capacity_bytes


@dataclass(frozen=True)
class SufficientMemory:
    """The smallest device memory for which a plan exists, and that plan.

    If devices differ, this is the memory of the smallest device. The memory of the others grows in proportion.
    """

    memory_bytes: int
    now_bytes: int
    plan: Plan
    stage: int
    """Number, from 1, of the stage that needs the whole memory."""


@dataclass(frozen=True)
class ClusterGrowth:
    """A number of components of the outermost level of the cluster that would be enough for a plan."""

    unit: str
    """The name of one component: server or worker."""
    count: int
    now: int


@dataclass(frozen=True)
class Diagnosis:
    """The reasons why there is no plan. A field is None or empty if it does not apply, or if nothing was found."""

    device: str
    capacity_bytes: float
    """Usable memory of the largest device if some layer fits on no device; otherwise memory of the smallest device."""
    uniform: bool
    """Whether all devices have the same memory."""
    workers: int
    oversized: tuple[OversizedLayers, ...]
    """The groups of layers that fit on no device, largest first."""
    enough: SufficientMemory | None
    growth: ClusterGrowth | None
    relaxed: tuple[str, ...]
    """Options that prevent a plan: leaving out any one of them makes a plan possible."""
    shared: bool = False
    """Whether the workers share the memory of this machine."""
    unfinished: bool = False
    """Whether the time ran out before every possible remedy was tried."""
    sharding: bool = False
    """Whether a plan fits if its replicas divide the optimiser's state."""
    too_few: tuple[int, int] | None = None
    """(minibatches per update, fewest for which a plan exists) under 2BW; None if this number is not the cause."""
    minibatch: int = 1
    """Samples of a minibatch."""
    pinned: str = ""
    """A clause about a layer pinned to an impossible stage, or two contradicting pins; empty if there are none."""

    @property
    def text(self) -> str:
        """The diagnosis in one line."""
        if self.oversized:
            return self._oversized()
        if self.too_few is not None:
            now, count = self.too_few
            return (
                f"no plan satisfies the constraints on {self.workers} workers: {self.pinned}under 2bw no more "
                f"minibatches are in flight than one update has, which are {now}; "
                f"--batch {count * self.minibatch} would do"
            )
        if self.enough is None and self.unfinished:
            helps = f"leaving out {' or '.join(self.relaxed)} helps" if self.relaxed else "a smaller minibatch may help"
            if self.growth is not None:
                helps = f"{self.growth.count} {self.growth.unit}s instead of {self.growth.now} would do"
            return (
                f"no plan satisfies the constraints and fits in memory on {self.workers} workers: {self.pinned}"
                f"{helps}; there was no time to find out what else would do (give more with --time-limit)"
            )
        if self.enough is None:
            # If no single option is the cause, name the two that are used most.
            options = " or ".join(self.relaxed or ("--stages", "--max-replicas"))
            return f"no plan satisfies the constraints on {self.workers} workers: {self.pinned}relax {options}"
        more = self.enough.memory_bytes - self.capacity_bytes
        line = (
            f"nothing fits in memory: every layer fits alone, but no plan for {self.workers} workers fits in "
            f"{show_size(self.capacity_bytes)} each{'' if self.uniform else ' (the smallest; others in proportion)'}; "
            f"{show_size(more)} more ({show_size(self.enough.memory_bytes)}) would do, needed by stage "
            f"{self.enough.stage} of {_brief(self.enough.plan)}"
        )
        if self.growth is not None:
            line += f", or {self.growth.count} {self.growth.unit}s instead of {self.growth.now}"
        elif self.relaxed:
            line += f", or leaving out {' or '.join(self.relaxed)}"
        if self.sharding:
            line += ", or --shard-optimizer"
        return f"{line}; or a smaller minibatch"

    def _oversized(self) -> str:
        """The line about the largest layer that fits on no device."""
        first = self.oversized[0]
        other_groups = len(self.oversized) - 1
        others = f" (and {other_groups} other layer{'s' * (other_groups > 1)} more than it has)" if other_groups else ""
        advice = "fewer workers, which share this machine's memory" if self.shared else "larger devices"
        return (
            f"nothing fits in memory: layer {first.name!r} alone needs {show_size(first.needs_bytes)}, "
            f"{show_size(first.missing_bytes)} more than the {show_size(self.capacity_bytes)} of one {self.device}"
            f"{others}; use a smaller minibatch or {advice}{', or --shard-optimizer' * self.sharding}"
        )


def _brief(plan: Plan) -> str:
    return plan.config if len(plan.config) <= 30 else f"a plan of {len(plan.stages)} stages"
