"""The planning problem: a profile contracted to units, a cluster, and the user's options."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from pipeplan.cluster_data.cluster import SHARDED_RINGS, Cluster
from pipeplan.cluster_data.executor_costs import ExecutorCosts
from pipeplan.errors import InputError, TooFewLayersError
from pipeplan.plan.schedules import DOUBLE_BUFFERED, VIRTUAL, copied_share
from pipeplan.problem.between_cuts import SharedWeight
from pipeplan.problem.options import Options
from pipeplan.problem.units import Flow, FlowArrays, Unit, units_and_flows
from pipeplan.profile_data.profile import Profile
from pipeplan.util.units import show_size


@dataclass(frozen=True)
class CopyWays:
    """The links between the copies of the pipeline, for each worker position in a copy.

    An entry is for the slowest copy. If all workers are equal, there is a single entry."""

    bandwidth: Sequence[float] = (math.inf,)
    """Bandwidth of all-reduces, in bytes/s."""
    latency_s: Sequence[float] = (0.0,)

    def among(self, run: Iterable[int]) -> tuple[float, float]:
        """Bandwidth and latency of the slowest ring across the copies, for some workers of one copy."""
        places = list(run) if len(self.bandwidth) > 1 else [0]
        return min(self.bandwidth[one] for one in places), max(self.latency_s[one] for one in places)


@dataclass(frozen=True)
class Problem:
    """A planning problem: find the best plan of a profile on a cluster under the user's options.

    Raises an `InputError` if the problem obviously has no solution: an unknown layer name, layers that take no time,
    more stages than units or workers.
    """

    profile: Profile
    cluster: Cluster
    options: Options = field(default_factory=Options)
    copies: int = 1
    """Number of copies of the pipeline that run side by side and average their gradients. If there are several,
    `cluster` is the component of one copy."""
    copies_allreduce_s: float = 0.0
    """Time of one all-reduce of all gradients among the copies."""
    copy_ways: CopyWays = CopyWays()
    """The links between the copies."""
    unused: frozenset[int] = frozenset()
    """Workers of `cluster` that no stage may be on."""
    whole: Cluster | None = None
    """The cluster of all copies; None if `cluster` is the whole cluster."""
    units: tuple[Unit, ...] = field(init=False)
    """The units of the model, in topological order."""
    flows: tuple[Flow, ...] = field(init=False)
    """The tensors between the units."""
    shared: tuple[SharedWeight, ...] = field(init=False)
    """The shared weights that several stages may each hold. Empty unless the schedule is synchronous and allows several
    stages."""

    def __post_init__(self) -> None:
        rings = SHARDED_RINGS if self.options.shard_optimizer else 1.0
        if self.cluster.exchange_rings != rings:
            object.__setattr__(self, "cluster", replace(self.cluster, exchange_rings=rings))
        if self.profile.read_s and self.profile.read_s != self.cluster.executor.read_s:
            costs = replace(self.cluster.executor, read_s=self.profile.read_s)
            object.__setattr__(self, "cluster", replace(self.cluster, executor=costs))
        units, flows, shared = units_and_flows(self.profile, self.options)
        if share := self.cluster.executor.activation_share:
            units = tuple(replace(unit, saved_bytes=unit.saved_bytes * (1 + share)) for unit in units)
        object.__setattr__(self, "units", units)
        object.__setattr__(self, "flows", flows)
        object.__setattr__(self, "shared", () if self.options.stages == 1 else shared)
        if self.work_s <= 0:
            raise InputError("the layers of the profile take no time at all: there is nothing to plan")
        stages = self.options.stages
        if stages is not None and stages > len(self.units):
            raise TooFewLayersError(f"{stages} stages asked for, but {self._few_layers}")
        self._check_workers()
        self._check_memory()
        if self.options.shard_optimizer and not self.profile.optimizer_elementwise:
            raise InputError(
                f"--shard-optimizer cuts parameters into parts, but the optimiser {self.profile.optimizer_name} needs "
                "whole ones: leave the option out"
            )

    @property
    def _few_layers(self) -> str:
        """A clause on the number of groups of layers that can each be a separate stage."""
        count = len(self.units)
        if not self.profile.tied or self.options.flushes or len(self.profile.layers) == count:
            return f"the model has only {count} layers to cut between"
        return (
            f"under {self.options.schedule} layers that share weights stay in one stage, with all layers between them, "
            f"which leaves {count} to cut between (a schedule with a flush lets shared weights be in several stages)"
        )

    def _check_memory(self) -> None:
        """Raise an `InputError` if a worker process leaves no memory for a stage, because searches divide by it."""
        if not self.capacity > 0:
            memory, worker = self.memory_of(range(self.cluster.workers)), self.cluster.executor.worker_bytes
            raise InputError(
                f"a device has {show_size(memory)}, but a worker takes {show_size(worker)} before any layer "
                "(--ignore-memory plans without the limit)"
            )

    def _check_workers(self) -> None:
        stages = self.options.stages
        virtual = self.options.flushes and self.options.schedule in VIRTUAL
        if stages is not None and stages > self.cluster.workers and not virtual:
            raise InputError(f"{stages} stages asked for, but the cluster has only {self.cluster.workers} workers")

    @cached_property
    def executor_costs(self) -> ExecutorCosts:
        """The executor's costs, including the correction of updates if the options ask for it."""
        costs = self.cluster.executor
        return costs if self.options.correction == "none" else costs.with_correction()

    @property
    def state_ratio(self) -> float:
        """Bytes of the optimiser's state per byte of parameters, corrected for `Options.copies_per_version`.

        That option charges a copy of the optimiser's step for every version, but the newest version has no such copy.
        The ratio subtracts this copy.
        """
        return self.profile.optimizer_state_ratio - (self.options.copies_per_version - 1)

    @property
    def divided_ratio(self) -> float:
        """Bytes of the optimiser's state that replicas divide, per byte of parameters.

        Replicas do not divide the optimiser steps that a correction keeps."""
        return self.profile.optimizer_state_ratio if self.options.shard_optimizer else 0.0

    @property
    def copy_state_ratio(self) -> float:
        """Lower bound on the optimiser's state in all workers of one copy together, in bytes per byte of parameters.

        If replicas divide the state, the other copies hold a part of it, which the bound subtracts from `state_ratio`.
        """
        return self.state_ratio - self.divided_ratio * (1 - 1 / self.copies)

    @property
    def training(self) -> bool:
        """Whether the plan is for training, and not for inference."""
        return not self.options.inference

    @property
    def passes(self) -> int:
        """Number of passes of a minibatch through a stage: 2 in training, 1 in inference."""
        return 2 if self.training else 1

    @property
    def copied_share(self) -> float:
        """Number of copies of its weights that a stage before the last makes for each minibatch
        (`schedules.copied_share`)."""
        return copied_share(self.options.schedule, self.options.accumulate) if self.training else 0.0

    @property
    def hidden_share(self) -> float:
        """Share of a stage's last backward pass before a flush that can hide its all-reduce.

        The share is 0 if replicas divide the optimiser's state or stages share weights, because the executor then
        starts the all-reduce after the pass.
        """
        return 0.0 if self.shared or self.options.shard_optimizer else self.options.overlap

    @cached_property
    def remembered(self) -> dict[Any, Any]:
        """Values that follow from the units, by their keys (`cost.stage_times.LayerTotals`)."""
        return {}

    @cached_property
    def layer_names(self) -> tuple[str, ...]:
        """Names of all layers, in the order of the units."""
        return tuple(name for unit in self.units for name in unit.layers)

    @cached_property
    def edges(self) -> list[tuple[int, int]]:
        """The edges between units as (producer, consumer), without repetition."""
        return list(dict.fromkeys((flow.producer, consumer) for flow in self.flows for consumer in flow.consumers))

    @property
    def capacity(self) -> float:
        """Bytes that a stage may use on the worker with the least memory; infinite if memory does not limit plans."""
        return self.capacity_of(range(self.cluster.workers))

    def capacity_of(self, workers: Iterable[int]) -> float:
        """Bytes that a stage may use on each of these workers: the smallest device memory minus the worker process."""
        return self.cluster.executor.room_in(self.memory_of(workers))

    def memory_of(self, workers: Iterable[int]) -> float:
        """The smallest device memory among these workers, in bytes; infinite if memory does not limit plans."""
        return self.cluster.memory_of(workers) if self.options.memory else float("inf")

    @cached_property
    def work_s(self) -> float:
        """Forward and backward time of all units for one minibatch on one worker of speed 1, in seconds."""
        return sum(unit.forward_s + unit.backward_s for unit in self.units)

    @property
    def minibatches_in_flight(self) -> int | None:
        """The most minibatches that one copy of the pipeline may have in flight: under 2BW, an update's minibatches."""
        options = self.options
        if options.inference or options.schedule != DOUBLE_BUFFERED or options.accumulate is None:
            return None
        return options.accumulate // self.copies

    @property
    def most_replicas(self) -> int:
        """The most replicas of a stage in one copy of the pipeline."""
        caps = self.options.max_replicas, self.minibatches_in_flight, self.options.max_workers
        return min([self.cluster.workers, *(cap for cap in caps if cap is not None)])

    @property
    def speed_in_use(self) -> float:
        """Upper bound on the total speed of one copy's busy workers. Each busy worker needs a minibatch in flight."""
        total, most = self.cluster.total_speed, self.minibatches_in_flight
        if most is None:
            return total
        return min(total, most * max(device.speed for device in self.cluster.distinct_devices))

    @cached_property
    def parameter_bytes(self) -> float:
        """Bytes of the parameters of all units."""
        return sum(unit.parameter_bytes for unit in self.units)

    @cached_property
    def flow_arrays(self) -> FlowArrays:
        """The flows as arrays."""
        return FlowArrays.of(self.flows)

    def within(self, cluster: Cluster, copies: int = 1, copies_allreduce_s: float = 0.0) -> Problem:
        """This problem on another cluster, or on one of the `copies` equal components of a cluster."""
        # Copied, not constructed again: the units and the flows do not depend on the cluster.
        moved = copy(self)
        cluster = replace(cluster, exchange_rings=self.cluster.exchange_rings)
        whole = (self.whole or self.cluster) if copies > 1 else None
        for name, value in (
            ("cluster", cluster),
            ("copies", copies),
            ("copies_allreduce_s", copies_allreduce_s),
            ("whole", whole),
        ):
            object.__setattr__(moved, name, value)
        moved._check_workers()
        return moved

    def without_memory_limit(self) -> Problem:
        """This problem with devices of unlimited memory."""
        if not self.options.memory:
            return self
        # Copied for the same reason as in `within`.
        free = copy(self)
        object.__setattr__(free, "options", replace(self.options, memory=False))
        return free

    def straight(self) -> Problem:
        """This problem restricted to one unreplicated pipeline."""
        return replace(self, options=replace(self.options, max_replicas=1, stages=None, allow_copies=False, grid=False))


def contradicting_pins(problem: Problem) -> str:
    """A clause that names two pins that no plan can both satisfy, ending in a semicolon; empty if there are none.

    Pins are contradictory if they put one layer, or layers that must share a stage, into two stages, or if they put a
    layer before another layer that it reads from.
    """
    unit_of = {name: number for number, unit in enumerate(problem.units) for name in unit.layers}
    readers: dict[int, set[int]] = {}
    for producer, consumer in problem.edges:
        readers.setdefault(producer, set()).add(consumer)
    for (first, stage), (second, other) in itertools.permutations(problem.options.pins, 2):
        if first == second and stage < other:
            return f"{first!r} is pinned to stage {stage} and also to stage {other}; "
        if first != second and unit_of[first] == unit_of[second] and stage < other:
            same = f"{second!r}, which must be in the same stage"
            return f"{first!r} is pinned to stage {stage} and {same}, to stage {other}; "
        if stage < other and _leads_to(unit_of[second], unit_of[first], readers):
            return f"{first!r} is pinned to stage {stage} and {second!r}, which comes before it, to stage {other}; "
    return ""


def joins_copies(problem: Problem) -> bool:
    """Whether one ring joins a stage's replicas in all copies of the pipeline, as under a flush."""
    return problem.copies > 1 and problem.training and problem.options.flushes


def _leads_to(start: int, end: int, readers: dict[int, set[int]]) -> bool:
    """Whether there is a path of at least one edge from one unit to another."""
    waiting, seen = [start], {start}
    while waiting:
        for unit in readers.get(waiting.pop(), ()):
            if unit == end:
                return True
            if unit not in seen:
                seen.add(unit)
                waiting.append(unit)
    return False
