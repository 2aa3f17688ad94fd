"""Says why no plan satisfies the constraints: what does not fit by how much, and what would do."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from pipeplan import alter
from pipeplan.cluster_data import Cluster
from pipeplan.cuts import Cuts, enumerate_cuts
from pipeplan.errors import InputError
from pipeplan.evaluate import evaluate
from pipeplan.plan import Plan, data_parallel
from pipeplan.problem import Options, Problem, Unit
from pipeplan.solvers import dp
from pipeplan.units import show_size

_PRECISION = 1.001
"""Of the memory that would do, before it is brought down to what the plan found with it really needs."""
_MOST_MEMORY = 2.0**60
"""Of one device; with so much it is not the reason."""
_MOST_GROWTH = 64
"""Clusters up to so many times as large are tried."""
_MOST_WORKERS = 4096
_MOST_CUTS = 2000
"""Beyond these, the cuts of one order of the layers, as `solve` takes them."""

# What a user may have asked for, with the value that asks for nothing.
_CONSTRAINTS = (
    ("--stages", "stages", None),
    ("--max-replicas", "max_replicas", None),
    ("--max-stages", "max_stages", None),
    ("--max-workers", "max_workers", None),
    ("--pin", "pins", ()),
    ("--together", "together", ()),
    ("--no-cut-after", "no_cut_after", ()),
    ("--grid", "grid", False),
)


@dataclass(frozen=True)
class Oversized:
    """Layers that must share a stage and fit on no device, even alone."""

    layers: tuple[str, ...]
    needs_bytes: float
    capacity_bytes: float
    """Of the largest device."""

    @property
    def name(self) -> str:
        """The first of them, by which people know them."""
        return self.layers[0]

    @property
    def missing_bytes(self) -> float:
        """How much the device lacks."""
        return self.needs_bytes - self.capacity_bytes


@dataclass(frozen=True)
class Enough:
    """The least memory of the smallest device with which there is a plan, and that plan.

    Where devices differ, all of them grow in proportion.
    """

    memory_bytes: int
    now_bytes: int
    plan: Plan
    stage: int
    """Of the plan, from 1: the one that needs all of that memory."""


@dataclass(frozen=True)
class Growth:
    """How many components of the outermost level would do."""

    unit: str
    """What one of them is: a server, or a worker."""
    count: int
    now: int


@dataclass(frozen=True)
class Diagnosis:
    """Why there is no plan. What could not be found, or does not apply, is None or empty."""

    device: str
    capacity_bytes: float
    """Memory of the device concerned: the largest where a layer fits on none alone, else the smallest."""
    uniform: bool
    """Whether all devices have the same memory."""
    workers: int
    oversized: tuple[Oversized, ...]
    """Largest first."""
    enough: Enough | None
    growth: Growth | None
    relaxed: tuple[str, ...]
    """The options that, any one of them left out, make room for a plan."""
    shared: bool = False
    """Whether the workers share the memory of this machine."""
    pinned: str = ""
    """What is pinned to a stage that there cannot be."""

    @property
    def text(self) -> str:
        """One line."""
        if self.oversized:
            return self._oversized()
        if self.enough is None:
            # Without a single culprit, the two that are asked for most.
            which = " or ".join(self.relaxed or ("--stages", "--max-replicas"))
            return f"no plan satisfies the constraints on {self.workers} workers: {self.pinned}relax {which}"
        more = self.enough.memory_bytes - self.capacity_bytes
        line = (
            f"nothing fits in memory: every layer fits alone, but no plan for {self.workers} workers fits in "
            f"{show_size(self.capacity_bytes)} each{'' if self.uniform else ' (the smallest; others in proportion)'}; "
            f"{show_size(more)} more ({show_size(self.enough.memory_bytes)}) would do, needed by stage "
            f"{self.enough.stage} of {_short(self.enough.plan)}"
        )
        if self.growth is not None:
            line += f", or {self.growth.count} {self.growth.unit}s instead of {self.growth.now}"
        elif self.relaxed:
            line += f", or leaving out {' or '.join(self.relaxed)}"
        return f"{line}; or a smaller minibatch"

    def _oversized(self) -> str:
        first = self.oversized[0]
        more = len(self.oversized) - 1
        others = f" (and {more} other layer{'s' * (more > 1)} more than it has)" if more else ""
        advice = "fewer workers, which share this machine's memory" if self.shared else "larger devices"
        return (
            f"nothing fits in memory: layer {first.name!r} alone needs {show_size(first.needs_bytes)}, "
            f"{show_size(first.missing_bytes)} more than the {show_size(self.capacity_bytes)} of one {self.device}"
            f"{others}; use a smaller minibatch or {advice}"
        )


def why_infeasible(problem: Problem, cuts: Cuts) -> str:
    """One line: the layer that is too large for a device on its own, or the memory that would be enough."""
    return _diagnose(problem, cuts).text


def diagnose(problem: Problem, maximum_cuts: int) -> Diagnosis:
    """Why a problem has no plan."""
    return _diagnose(problem, enumerate_cuts(problem, maximum_cuts))


def _diagnose(problem: Problem, cuts: Cuts) -> Diagnosis:
    devices = problem.cluster.devices
    largest = max(devices, key=lambda device: device.memory_bytes)
    smallest = min(devices, key=lambda device: device.memory_bytes)
    oversized = _oversized(problem, float(largest.memory_bytes)) if problem.options.memory else ()
    return Diagnosis(
        device=largest.name if oversized else smallest.name,
        capacity_bytes=float((largest if oversized else smallest).memory_bytes),
        uniform=largest.memory_bytes == smallest.memory_bytes,
        workers=problem.cluster.workers,
        oversized=oversized,
        enough=_enough_memory(problem, cuts, smallest.memory_bytes),
        growth=None if oversized else _enough_servers(problem, cuts),
        relaxed=() if oversized else _relaxed(problem),
        shared=problem.cluster.name == "local" and problem.cluster.workers > 1 and smallest.kind == "cpu",
        pinned=_pinned(problem),
    )


def _oversized(problem: Problem, capacity: float) -> tuple[Oversized, ...]:
    needed = [(alone_bytes(problem, unit), unit.layers) for unit in problem.units]
    found = [Oversized(layers, size, capacity) for size, layers in needed if size > capacity]
    return tuple(sorted(found, key=lambda one: -one.needs_bytes))


def alone_bytes(problem: Problem, unit: Unit) -> float:
    """Bytes of a worker that holds this unit only, one minibatch in flight, without communication buffers."""
    inside = set(unit.layers)
    profile = replace(
        problem.profile,
        layers=tuple(layer for layer in problem.profile.layers if layer.name in inside),
        tensors=tuple(
            replace(tensor, consumers=tuple(name for name in tensor.consumers if name in inside))
            for tensor in problem.profile.tensors
            if tensor.producer in inside
        ),
        together=(),
    )
    layers = tuple(layer.name for layer in profile.layers)
    # A layer of no time at all makes no problem of its own, but may need memory.
    timed = replace(profile, layers=tuple(replace(layer, forward_s=1.0) for layer in profile.layers))
    options = Options(inference=problem.options.inference, together=(layers,))
    plan = data_parallel(layers, 1, inference=problem.options.inference)
    return evaluate(plan, Problem(timed, problem.cluster, options)).stages[0].memory_bytes


def _enough_memory(problem: Problem, cuts: Cuts, capacity: int) -> Enough | None:
    """The least memory, to a thousandth, with which some plan exists; None where memory is not the reason."""
    if not problem.options.memory:
        return None

    def larger(factor: float) -> Problem:
        return problem.within(alter.with_more_memory(problem.cluster, factor))

    low, high = 1.0, 1.0
    most = _MOST_MEMORY / max(device.memory_bytes for device in problem.cluster.devices)
    while high < most:
        high = min(2 * high, most)
        if dp.feasible(larger(high), cuts):
            break
        low = high
    else:
        return None
    while high / low > _PRECISION:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if dp.feasible(larger(middle), cuts) else (middle, high)
    plan = dp.solve(larger(high), cuts).plan
    if plan is None:
        return None
    shares = _shares_of_memory(plan, larger(high))
    # What that plan really needs, where it is the plan and not the search that decides.
    enough = math.ceil(capacity * high * min(1.0, max(shares)))
    return Enough(enough, capacity, plan, shares.index(max(shares)) + 1)


def _shares_of_memory(plan: Plan, problem: Problem) -> list[float]:
    """Of every stage: what it needs of the memory of its smallest device."""
    sizes = [stage.memory_bytes for stage in evaluate(plan, problem).stages]
    return [size / problem.cluster.memory_of(stage.workers) for size, stage in zip(sizes, plan.stages, strict=True)]


def _enough_servers(problem: Problem, cuts: Cuts) -> Growth | None:
    """The fewest components of the outermost level with which there is a plan: idle workers are allowed, so that more
    of them never do harm."""
    now = problem.cluster.levels[-1].count

    def feasible(count: int) -> bool:
        return dp.feasible(problem.within(alter.grown(problem.cluster, count)), cuts)

    try:
        count = _least(now, feasible, _most_components(problem.cluster))
    except InputError:
        return None
    return None if count is None else Growth(alter.unit_of_growth(problem.cluster), count, now)


def _most_components(cluster: Cluster) -> int:
    now = cluster.levels[-1].count
    return min(now * _MOST_GROWTH, max(now, _MOST_WORKERS * now // cluster.workers))


def _least(none: int, feasible: Callable[[int], bool], most: int) -> int | None:
    """The least count above `none`, which is too few, and up to `most` that will do, by doubling and halving."""
    low, high = none, none
    while high < most:
        high = min(2 * high, most)
        if feasible(high):
            break
        low = high
    else:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if feasible(middle) else (middle, high)
    return high


def _relaxed(problem: Problem) -> tuple[str, ...]:
    """The options of the user that, any one of them left out, leave a plan."""
    found = []
    for flag, name, nothing in _CONSTRAINTS:
        if getattr(problem.options, name) == nothing:
            continue
        without: dict[str, Any] = {name: nothing}
        relaxed = replace(problem, options=replace(problem.options, **without))
        # Layers that may be parted again make new cuts.
        if dp.feasible(relaxed, enumerate_cuts(relaxed, _MOST_CUTS)):
            found.append(flag)
    return tuple(found)


def _pinned(problem: Problem) -> str:
    """The layer that is pinned beyond the stages that there can be."""
    most = min(problem.cluster.workers, len(problem.units))
    far = next((f"{name!r} is pinned to stage {stage}" for name, stage in problem.options.pins if stage > most), "")
    return f"{far}, and there can be {most} at most; " if far else ""


def _short(plan: Plan) -> str:
    return plan.config if len(plan.config) <= 30 else f"a plan of {len(plan.stages)} stages"
