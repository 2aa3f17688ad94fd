"""The planning problem: the layers of a profile, contracted to units that may be cut apart, a cluster, and the user's
options."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from pipeplan.cluster_data.cluster import SHARDED_RINGS, Cluster
from pipeplan.errors import InputError
from pipeplan.plan.schedules import (
    ACCUMULATING,
    CORRECTED,
    CORRECTIONS,
    DOUBLE_BUFFERED,
    FLUSHING,
    INTERLEAVED,
    SCHEDULES,
    STASHING,
    VIRTUAL,
    copied_share,
    update_share,
)
from pipeplan.problem.shared_weights import SharedWeight, shared_weights
from pipeplan.profile_data.layers import edges
from pipeplan.profile_data.profile import Profile
from pipeplan.util import graph
from pipeplan.util.numeric_fields import settle_numbers
from pipeplan.util.text import did_you_mean
from pipeplan.util.typed import Amount, Positive
from pipeplan.util.units import show_size

BOUNDARIES = ("single", "parallel")
"""Models of the traffic between two stages (`Options.boundary`)."""


@dataclass(frozen=True)
class Options:
    """Choices of the cost model and constraints on the plan. Raises an `InputError` where they are inconsistent."""

    inference: bool = False
    """Whether the plan is for inference: no backward passes, no gradients, no weight versions."""
    overlap: Amount = 1.0
    """Share of gradient synchronisation that hides behind compute: 1 is all of it, 0 none."""
    memory: bool = True
    """Whether the device's memory limits the plan."""
    stages: Positive | None = None
    """Exact number of stages."""
    max_replicas: Positive | None = None
    """Largest number of replicas of a stage in one copy of the pipeline; 1 asks for a straight pipeline."""
    allow_copies: bool = True
    """Whether whole pipelines may be replicated across the components of the cluster."""
    schedule: str = STASHING
    """Schedule of training, one of `SCHEDULES`. Inference always has the schedule `forward-only`."""
    accumulate: Positive | None = None
    """Minibatches per update, for the schedules that need a number: 2bw and those with a flush. The others update a
    stage once for as many minibatches as it has replicas."""
    virtual_stages: Positive | None = None
    """Stages of each worker under interleaved-1f1b; None for the best number. A worker has two under zb-v."""
    correction: str = "none"
    """What is done about old gradients, one of `CORRECTIONS`. With `ef` every stage keeps the last steps of its
    optimiser, one for each weight version but the newest."""
    recompute: bool = True
    """Whether a stage may drop its activations and run forward again before backward, where memory is short."""
    shard_optimizer: bool = False
    """Whether the replicas of a stage divide the state of the optimiser among them (ZeRO stage 1)."""
    contention: bool = True
    """Whether a network card is charged with the sum of the traffic that crosses it, shared cores with the sum of the
    work on them, and plain data parallelism with the wait for its all-reduce. Otherwise every resource is charged as if
    it were used alone."""
    boundary: str = "single"
    """Traffic between two stages: `single` link at a time, or in `parallel` over as many links as the smaller of the
    two stages has replicas."""
    max_stages: Positive | None = None
    """Largest number of stages."""
    max_workers: Positive | None = None
    """Largest number of busy workers."""
    pins: tuple[tuple[str, Positive], ...] = ()
    """Layers that must be in a given stage, counted from 1."""
    together: tuple[tuple[str, ...], ...] = ()
    """Groups of layers that must share a stage, beside the groups of the profile."""
    no_cut_after: tuple[str, ...] = ()
    """Layers whose output no boundary may cross: they share a stage with all layers that read it."""
    grid: bool = False
    """Whether the plan must be a uniform grid (docs/grid.md): every stage has the same number r of replicas, stage s
    (from 0) is on workers s r … s r + r - 1, and there are no copies. The grid covers whole servers, or any number of
    workers inside one server. Under schedules with a common number of minibatches per update, r divides that number."""

    def __post_init__(self) -> None:
        settle_numbers(self)
        if not 0 <= self.overlap <= 1:
            raise InputError(f"the overlap must lie between 0 and 1, not {self.overlap:g}")
        for what, value in (
            ("number of stages", self.stages),
            ("maximum of replicas", self.max_replicas),
            ("maximum of stages", self.max_stages),
            ("maximum of workers", self.max_workers),
            ("number of minibatches per update", self.accumulate),
        ):
            if value is not None and value < 1:
                raise InputError(f"the {what} must be at least 1, not {value}")
        if self.stages is not None and self.max_stages is not None and self.stages > self.max_stages:
            raise InputError(f"{self.stages} stages asked for, and at most {self.max_stages}")
        if self.schedule not in SCHEDULES:
            raise InputError(f"there is no schedule {self.schedule!r}; {did_you_mean(self.schedule, SCHEDULES)}")
        if self.schedule in ACCUMULATING and self.accumulate is None and not self.inference:
            raise InputError(f"the schedule {self.schedule} needs a number of minibatches per update")
        if self.virtual_stages is not None and (self.schedule != INTERLEAVED or self.inference):
            raise InputError(
                f"virtual stages are those of a worker under {INTERLEAVED}, and the schedule is {self.schedule}"
            )
        if self.correction not in CORRECTIONS:
            raise InputError(
                f"there is no correction {self.correction!r}; {did_you_mean(self.correction, CORRECTIONS)}"
            )
        if self.correction != "none" and (self.inference or self.schedule not in CORRECTED):
            used = "inference" if self.inference else self.schedule
            raise InputError(f"a plan corrects old gradients under {' and '.join(CORRECTED)} only, not for {used}")
        if self.shard_optimizer and self.inference:
            raise InputError("inference has no optimiser whose state could be divided")
        if self.boundary not in BOUNDARIES:
            raise InputError(f"there is no boundary model {self.boundary!r}; {did_you_mean(self.boundary, BOUNDARIES)}")

    @property
    def flushes(self) -> bool:
        """Whether the pipeline drains before every update, so that training is synchronous."""
        return not self.inference and self.schedule in FLUSHING

    @property
    def copies_per_version(self) -> int:
        """Copies of the weights for each weight version: 2 where old gradients are corrected, otherwise 1.

        A corrected stage keeps a step of the optimiser for each version but the newest, which `Problem.state_ratio`
        takes off again.
        """
        return 1 if self.correction == "none" else 2

    @property
    def update_share(self) -> float:
        """Share of an optimiser step that is charged to each minibatch of a worker (`schedules.update_share`)."""
        return 0.0 if self.inference else update_share(self.accumulate if self.schedule in ACCUMULATING else None)


@dataclass(frozen=True)
class Unit:
    """Layers that no cut separates, with the sums of their costs for one minibatch on a device of speed 1."""

    layers: tuple[str, ...]
    """Names of the layers, in the order of the profile."""
    forward_s: float
    backward_s: float
    """Backward time including the optimiser's step; 0 in inference."""
    parameter_bytes: int
    buffer_bytes: int
    saved_bytes: float
    """Bytes kept from forward to backward, with what the allocator takes for them; 0 in inference."""
    update_s: float = 0.0
    """The part of `backward_s` that is the optimiser's step, times `Options.update_share`."""
    workspace_bytes: int = 0
    """The largest workspace of its layers, as they run one after another; 0 in inference."""


@dataclass(frozen=True)
class Flow:
    """A tensor that one unit sends to others. It crosses every cut with its producer inside and a consumer outside."""

    producer: int
    """Index of the unit that computes it."""
    consumers: tuple[int, ...]
    """Indices of the units that read it, in increasing order."""
    bytes: int
    gradient_bytes: int
    """Bytes of its gradient, sent backward; 0 in inference."""


@dataclass(frozen=True)
class FlowArrays:
    """The flows of a problem as arrays, for sums over all of them."""

    producer: NDArray[np.intp]
    consumers: NDArray[np.intp]
    """The consumers of all flows, one flow after another."""
    starts: NDArray[np.intp]
    """Where the consumers of each flow begin."""
    bytes: NDArray[np.float64]
    """Bytes forward and backward, a row for each flow."""

    def crossing(self, stage_of: NDArray[np.intp], stages: int) -> NDArray[np.float64]:
        """Bytes that cross the cut behind each stage, forward and backward, if units are in these stages.

        A tensor counts once for each cut that it crosses.
        """
        crossing = np.zeros((stages + 1, 2))
        if len(self.starts):
            # Differences first, so that a tensor costs the same over any number of cuts.
            first, last = stage_of[self.producer], np.maximum.reduceat(stage_of[self.consumers], self.starts)
            np.add.at(crossing, first, self.bytes)
            np.subtract.at(crossing, np.maximum(first, last), self.bytes)
        return np.cumsum(crossing[:-1], axis=0)


@dataclass(frozen=True)
class Problem:
    """A planning problem: find the best plan of a profile on a cluster under the user's options.

    Raises an `InputError` where the problem has no solution for a reason that is clear at once: an unknown layer name,
    layers that take no time, more stages than units or workers.
    """

    profile: Profile
    cluster: Cluster
    options: Options = field(default_factory=Options)
    copies: int = 1
    """Number of copies of the sought pipeline that run side by side and average their gradients. `cluster` is then the
    component of one copy."""
    copies_allreduce_s: float = 0.0
    """Time of one all-reduce of all gradients among the copies."""
    unused: frozenset[int] = frozenset()
    """Workers of `cluster` that no stage may be on."""
    whole: Cluster | None = None
    """The cluster of all copies; None where `cluster` is the whole."""
    units: tuple[Unit, ...] = field(init=False)
    """The units of the model, in topological order."""
    flows: tuple[Flow, ...] = field(init=False)
    """The tensors between the units."""
    shared: tuple[SharedWeight, ...] = field(init=False)
    """The weights that units share, of which stages may hold copies; none unless the schedule is synchronous."""

    def __post_init__(self) -> None:
        rings = SHARDED_RINGS if self.options.shard_optimizer else 1.0
        if self.cluster.exchange_rings != rings:
            object.__setattr__(self, "cluster", replace(self.cluster, exchange_rings=rings))
        units, flows, shared = _units_and_flows(self.profile, self.options)
        if share := self.cluster.executor.activation_share:
            units = tuple(replace(unit, saved_bytes=unit.saved_bytes * (1 + share)) for unit in units)
        object.__setattr__(self, "units", units)
        object.__setattr__(self, "flows", flows)
        object.__setattr__(self, "shared", shared)
        if self.work_s <= 0:
            raise InputError("the layers of the profile take no time at all: there is nothing to plan")
        stages = self.options.stages
        if stages is not None and stages > len(self.units):
            raise InputError(
                f"{stages} stages asked for, but the model has only {len(self.units)} layers to cut between"
            )
        self._check_workers()
        self._check_memory()

    def _check_memory(self) -> None:
        """A worker must leave memory for a stage, as the searches divide by it."""
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

    @property
    def state_ratio(self) -> float:
        """Bytes of the optimiser's state per byte of parameters, less what `Options.copies_per_version` charges too
        much: the newest version has no step beside it.
        """
        return self.profile.optimizer_state_ratio - (self.options.copies_per_version - 1)

    @property
    def divided_ratio(self) -> float:
        """Bytes of the optimiser's state that replicas divide, per byte of parameters. What a correction keeps is
        charged whole."""
        return self.profile.optimizer_state_ratio if self.options.shard_optimizer else 0.0

    @property
    def copy_state_ratio(self) -> float:
        """Bytes of the optimiser's state that the workers of one copy hold together at least, per byte of parameters:
        `state_ratio`, less what the other copies hold where replicas divide it."""
        return self.state_ratio - self.divided_ratio * (1 - 1 / self.copies)

    @property
    def training(self) -> bool:
        """Whether the plan is for training, not inference."""
        return not self.options.inference

    @property
    def passes(self) -> int:
        """Passes of a minibatch through a stage: forward, and in training backward."""
        return 2 if self.training else 1

    @property
    def copied_share(self) -> float:
        """Copies of its weights that a stage before the last makes for each minibatch (`schedules.copied_share`)."""
        return copied_share(self.options.schedule, self.options.accumulate) if self.training else 0.0

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
        """Bytes that a stage may use on the worker with the least memory; infinite where memory does not limit it."""
        return self.capacity_of(range(self.cluster.workers))

    def capacity_of(self, workers: Iterable[int]) -> float:
        """Bytes that a stage may use on each of these workers: the smallest memory, less the worker's own."""
        return self.cluster.executor.room_in(self.memory_of(workers))

    def memory_of(self, workers: Iterable[int]) -> float:
        """The smallest memory of these workers, in bytes; infinite where memory does not limit the plan."""
        return self.cluster.memory_of(workers) if self.options.memory else float("inf")

    @cached_property
    def work_s(self) -> float:
        """Forward and backward time of all units for one minibatch on one worker of speed 1, in seconds."""
        return sum(unit.forward_s + unit.backward_s for unit in self.units)

    @property
    def minibatches_in_flight(self) -> int | None:
        """The most minibatches that one copy of the pipeline may have in flight: under 2BW those of its update."""
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
        """The most speed that the workers of one copy can have together: each in use has a minibatch in flight."""
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
        consumers = [unit for flow in self.flows for unit in flow.consumers]
        counts = [0, *(len(flow.consumers) for flow in self.flows)]
        return FlowArrays(
            producer=np.array([flow.producer for flow in self.flows], dtype=np.intp),
            consumers=np.array(consumers, dtype=np.intp),
            starts=np.cumsum(counts[:-1], dtype=np.intp),
            bytes=np.array([(flow.bytes, flow.gradient_bytes) for flow in self.flows], dtype=float).reshape(-1, 2),
        )

    def within(self, cluster: Cluster, copies: int = 1, copies_allreduce_s: float = 0.0) -> Problem:
        """This problem on another cluster, or on one of the `copies` equal components of a cluster."""
        # Copied rather than made anew: the units and the flows do not depend on the cluster.
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
        """This problem restricted to one straight pipeline, without any replication."""
        return replace(self, options=replace(self.options, max_replicas=1, stages=None, allow_copies=False, grid=False))


def _units_and_flows(
    profile: Profile, options: Options
) -> tuple[tuple[Unit, ...], tuple[Flow, ...], tuple[SharedWeight, ...]]:
    """The units of a profile, the tensors between them, and the weights that they share; derived once for all options
    that they depend on."""
    arrows = user_groups(profile, options)
    key = "units and flows", tuple(arrows), options.inference, options.update_share
    if key not in profile.derived:
        groups = _contract(profile, arrows)
        unit_of = {name: index for index, group in enumerate(groups) for name in group}
        flows = tuple(_flows(profile, groups, options))
        profile.derived[key] = tuple(_units(profile, groups, options)), flows, shared_weights(profile, unit_of)
    units, flows, shared = profile.derived[key]
    return units, flows, shared


def _contract(profile: Profile, wanted: Iterable[tuple[str, ...]]) -> list[list[str]]:
    """The groups of layers that become units, in topological order; `wanted` are those that the user's options join.

    Layers that must share a stage, and all layers between them, are the strong components of the graph after adding
    edges in both directions between the members of each group.
    """
    arrows = edges(profile.tensors)
    for group in (*profile.together, *wanted):
        for first, second in itertools.pairwise(group):
            arrows += [(first, second), (second, first)]
    return graph.strong_components([layer.name for layer in profile.layers], arrows)


def user_groups(profile: Profile, options: Options) -> list[tuple[str, ...]]:
    """The groups of layers that the options keep in one stage, `together` or `no_cut_after`, and unless the schedule is
    synchronous the layers that share weights.

    Raises an `InputError` where the options name a layer that the profile does not have.
    """
    names = [layer.name for layer in profile.layers]
    for name in itertools.chain(*options.together, options.no_cut_after, (layer for layer, _ in options.pins)):
        if name not in names:
            raise InputError(f"the profile has no layer {name!r}; {did_you_mean(name, names)}")
    uncut = [tensor for tensor in profile.tensors if tensor.producer in options.no_cut_after]
    # Workers with several stages do not exchange gradients of shared weights.
    apart = options.flushes and options.schedule not in VIRTUAL
    held = () if apart else (tie.layers for tie in profile.tied)
    return [*options.together, *((tensor.producer, *tensor.consumers) for tensor in uncut), *held]


def _units(profile: Profile, groups: list[list[str]], options: Options) -> Iterator[Unit]:
    """The units of groups of layers, with their layers in the order of the profile."""
    position = {layer.name: index for index, layer in enumerate(profile.layers)}
    for group in groups:
        layers = [profile.layers[index] for index in sorted(position[name] for name in group)]
        update = sum(layer.update_s for layer in layers) * options.update_share
        yield Unit(
            layers=tuple(layer.name for layer in layers),
            forward_s=sum(layer.forward_s for layer in layers),
            backward_s=0.0 if options.inference else sum(layer.backward_s for layer in layers) + update,
            parameter_bytes=sum(layer.parameter_bytes for layer in layers),
            buffer_bytes=sum(layer.buffer_bytes for layer in layers),
            saved_bytes=0 if options.inference else sum(layer.saved_bytes for layer in layers),
            update_s=update,
            workspace_bytes=0 if options.inference else max(layer.workspace_bytes for layer in layers),
        )


def _flows(profile: Profile, groups: list[list[str]], options: Options) -> list[Flow]:
    unit_of = {name: index for index, group in enumerate(groups) for name in group}
    flows = []
    for tensor in profile.tensors:
        producer = unit_of[tensor.producer]
        consumers = tuple(sorted({unit_of[name] for name in tensor.consumers} - {producer}))
        if consumers:
            gradient = 0 if options.inference else tensor.gradient_bytes
            flows.append(Flow(producer, consumers, tensor.bytes, gradient))
    return flows
