"""What is to be solved: a profile's layers, contracted to what may be cut, a cluster, and the user's constraints."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from pipeplan import cost, graph
from pipeplan.cluster_data import Cluster
from pipeplan.errors import InputError
from pipeplan.plan import ACCUMULATING, FLUSHING, SCHEDULES, STASHING
from pipeplan.profile_data import Profile, edges
from pipeplan.suggest import did_you_mean

BOUNDARIES = ("single", "parallel")


@dataclass(frozen=True)
class Options:
    """Choices of the cost model and constraints on the plan."""

    inference: bool = False
    """Forward only: no backward, no gradients, no weight versions."""
    overlap: float = 1.0
    """Share of gradient synchronisation that hides behind compute: 1 all, 0 none."""
    memory: bool = True
    """Whether the device's memory limits the plan."""
    stages: int | None = None
    """Exactly so many stages."""
    max_replicas: int | None = None
    """No stage on more workers than this, in each copy of the pipeline; 1 makes it straight."""
    allow_copies: bool = True
    """Whether whole pipelines may be replicated across the components of the cluster."""
    schedule: str = STASHING
    """Of training: one of `SCHEDULES`. Inference has its own, forward only."""
    accumulate: int | None = None
    """Minibatches per update, for the schedules that need a number: 2bw, gpipe, 1f1b-flush. The others update a stage
    after as many as it has replicas."""
    recompute: bool = True
    """Whether a stage may drop what backward needs and compute it again, where memory binds."""
    contention: bool = True
    """Whether a server's network card carries the sum of all that crosses it, and plain data parallelism waits for its
    all-reduce; else the formulas hold as if everything were alone."""
    boundary: str = "single"
    """Traffic between two stages: `single` link at a time, or in `parallel` over as many links as the smaller of the
    two stages has replicas."""
    max_stages: int | None = None
    """At most so many stages."""
    max_workers: int | None = None
    """At most so many workers with something to do."""
    several: bool = False
    """Two stages at least: how plans of one stage are left out where those are tried one by one (`single`)."""
    pins: tuple[tuple[str, int], ...] = ()
    """Layers that must be in a given stage, counted from 1."""
    together: tuple[tuple[str, ...], ...] = ()
    """Layers that must share a stage, beside those that the profile ties."""
    no_cut_after: tuple[str, ...] = ()
    """Layers whose output no boundary may cross: they share a stage with all that read it."""

    grid: bool = False
    """A uniform grid: stages with the same number r of replicas each, stage s on workers s r … s r + r - 1 from the
    first worker on; all of the cluster, or whole servers of it, or any number inside one server; no copies. Where all
    stages have an update in common, r divides its minibatches."""

    def __post_init__(self) -> None:
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
        if self.boundary not in BOUNDARIES:
            raise InputError(f"there is no boundary model {self.boundary!r}; {did_you_mean(self.boundary, BOUNDARIES)}")

    @property
    def flushes(self) -> bool:
        """Whether the pipeline drains before every update, so that training is synchronous."""
        return not self.inference and self.schedule in FLUSHING

    @property
    def update_share(self) -> float:
        """How much of an optimiser's step a worker makes for each of its minibatches (`cost.update_share`)."""
        return 0.0 if self.inference else cost.update_share(self.accumulate if self.schedule in ACCUMULATING else None)


@dataclass(frozen=True)
class Unit:
    """Layers that no cut separates, with the sum of their costs."""

    layers: tuple[str, ...]
    forward_s: float
    backward_s: float
    """With the optimiser's step."""
    parameter_bytes: int
    buffer_bytes: int
    saved_bytes: int
    update_s: float = 0.0
    """What of `backward_s` is the optimiser's step: all of it, or a minibatch's share where several make one update."""


@dataclass(frozen=True)
class Flow:
    """A tensor between units, by index: it crosses every cut that has its producer inside and a consumer outside."""

    producer: int
    consumers: tuple[int, ...]
    bytes: int
    gradient_bytes: int


@dataclass(frozen=True)
class Problem:
    """The units in a topological order, the flows between them, and where they are to run."""

    profile: Profile
    cluster: Cluster
    options: Options = field(default_factory=Options)
    copies: int = 1
    """How many pipelines like the one sought run side by side and average their gradients."""
    copies_allreduce_s: float = 0.0
    """One all-reduce of all gradients among them."""
    units: tuple[Unit, ...] = field(init=False)
    flows: tuple[Flow, ...] = field(init=False)

    def __post_init__(self) -> None:
        groups = _contract(self.profile, self.options)
        object.__setattr__(self, "units", tuple(_unit(self.profile, group, self.options) for group in groups))
        object.__setattr__(self, "flows", tuple(_flows(self.profile, groups, self.options)))
        if self.work_s <= 0:
            raise InputError("the layers of the profile take no time at all: there is nothing to plan")
        stages = self.options.stages
        if stages is not None and stages > len(self.units):
            raise InputError(
                f"{stages} stages asked for, but the model has only {len(self.units)} layers to cut between"
            )
        if stages is not None and stages > self.cluster.workers:
            raise InputError(f"{stages} stages asked for, but the cluster has only {self.cluster.workers} workers")

    @property
    def training(self) -> bool:
        """Whether the plan is for training, not inference."""
        return not self.options.inference

    @property
    def layer_names(self) -> tuple[str, ...]:
        """All layers, in the order of the units."""
        return tuple(name for unit in self.units for name in unit.layers)

    @property
    def edges(self) -> list[tuple[int, int]]:
        """The edges between units."""
        return list(dict.fromkeys((flow.producer, consumer) for flow in self.flows for consumer in flow.consumers))

    @property
    def capacity(self) -> float:
        """Bytes of memory of the worker that has least; infinite where memory is not to limit."""
        return self.capacity_of(range(self.cluster.workers))

    def capacity_of(self, workers: Iterable[int]) -> float:
        """Bytes that a stage on these workers may use on each: the least that one of them has."""
        return self.cluster.memory_of(workers) if self.options.memory else float("inf")

    @property
    def work_s(self) -> float:
        """Time of all units for one minibatch on one worker of speed 1."""
        return sum(unit.forward_s + unit.backward_s for unit in self.units)

    def within(self, cluster: Cluster, copies: int = 1, copies_allreduce_s: float = 0.0) -> Problem:
        """The same problem on another cluster, or on one of `copies` equal parts of one."""
        return replace(self, cluster=cluster, copies=copies, copies_allreduce_s=copies_allreduce_s)

    def straight(self) -> Problem:
        """The same problem for one pipeline without any replication."""
        return replace(self, options=replace(self.options, max_replicas=1, stages=None, allow_copies=False, grid=False))


def _contract(profile: Profile, options: Options) -> list[list[str]]:
    """Layers that must share a stage, with all that lies between them: strong components once the groups are closed."""
    arrows = edges(profile.tensors)
    for group in (*profile.together, *shared_by_word(profile, options)):
        for first, second in itertools.pairwise(group):
            arrows += [(first, second), (second, first)]
    return graph.strong_components([layer.name for layer in profile.layers], arrows)


def shared_by_word(profile: Profile, options: Options) -> list[tuple[str, ...]]:
    """The groups of layers that the user wants in one stage: named together, or with no cut between them."""
    names = [layer.name for layer in profile.layers]
    for name in itertools.chain(*options.together, options.no_cut_after, (layer for layer, _ in options.pins)):
        if name not in names:
            raise InputError(f"the profile has no layer {name!r}; {did_you_mean(name, names)}")
    readers = [(tensor.producer, *tensor.consumers) for tensor in profile.tensors]
    return [*options.together, *(group for group in readers if group[0] in options.no_cut_after)]


def _unit(profile: Profile, names: list[str], options: Options) -> Unit:
    inside = set(names)
    layers = [layer for layer in profile.layers if layer.name in inside]
    update = sum(layer.update_s for layer in layers) * options.update_share
    return Unit(
        layers=tuple(layer.name for layer in layers),
        forward_s=sum(layer.forward_s for layer in layers),
        backward_s=0.0 if options.inference else sum(layer.backward_s for layer in layers) + update,
        parameter_bytes=sum(layer.parameter_bytes for layer in layers),
        buffer_bytes=sum(layer.buffer_bytes for layer in layers),
        saved_bytes=0 if options.inference else sum(layer.saved_bytes for layer in layers),
        update_s=update,
    )


def _flows(profile: Profile, groups: list[list[str]], options: Options) -> list[Flow]:
    home = {name: index for index, group in enumerate(groups) for name in group}
    flows = []
    for tensor in profile.tensors:
        producer = home[tensor.producer]
        consumers = tuple(sorted({home[name] for name in tensor.consumers} - {producer}))
        if consumers:
            gradient = 0 if options.inference else tensor.gradient_bytes
            flows.append(Flow(producer, consumers, tensor.bytes, gradient))
    return flows
