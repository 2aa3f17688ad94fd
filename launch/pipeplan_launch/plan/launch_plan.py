"""The plan that the executor runs: its stages and workers, its schedule and the predictions. Torch-free."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, Literal

from msgspec import Meta

from pipeplan_launch.job_reference import JobFile
from pipeplan_launch.plan.planned_links import PlannedLinks
from pipeplan_launch.plan.schedule import Schedule, StageShape
from pipeplan_launch.typed_document import Amount, Natural, Positive

# The description of an emulated stage, read from `emulation` of its stage file.

Traffic = Annotated[int, Meta(ge=0, le=2**40)]
"""Bytes for one minibatch."""


@dataclass(frozen=True)
class EmulatedLayer:
    """A part of the stage's computation, with the size of its parameters."""

    forward_s: Amount
    backward_s: Amount
    parameter_bytes: Traffic
    weights_s: Amount = 0.0
    """The part of `backward_s` for the gradients of the weights, which some schedules compute in a separate pass."""

    def __post_init__(self) -> None:
        if self.weights_s > self.backward_s:
            raise ValueError(f"{self.weights_s} s of a backward pass of {self.backward_s} s make gradients of weights")


@dataclass(frozen=True)
class CutTraffic:
    """Traffic across the cut between two stages, in bytes per minibatch."""

    sent: Traffic
    """Bytes of activations."""
    returned: Traffic
    """Bytes of gradients, at most `sent`."""

    def __post_init__(self) -> None:
        if self.returned > self.sent:
            raise ValueError(f"{self.returned} bytes are returned for {self.sent} that are sent")


@dataclass(frozen=True)
class EmulatedStage:
    """A stage that sleeps instead of computing. It sends and averages the same number of bytes as the real stage."""

    layers: Annotated[tuple[EmulatedLayer, ...], Meta(min_length=1)]
    update_s: Amount
    """Time of the optimiser per update, in seconds."""
    minibatches: Positive
    """Number of minibatches of an epoch."""
    bucket_bytes: Annotated[int, Meta(ge=1, le=2**40)]
    """Size at which a bucket of gradients closes."""
    before: CutTraffic | None = None
    """Traffic with the previous stage; None for the first stage."""
    after: CutTraffic | None = None
    """Traffic with the next stage; None for the last stage."""
    products: Natural = 0
    """Matrix products that each layer computes in a forward pass, in addition to its sleep. A backward pass computes
    twice this number."""
    evicting_bytes: Traffic = 0
    """Bytes that each pass reads and writes once, to leave the caches in the state that a real model would leave."""


MAX_DEPTH = 100_000
"""Largest depth and number of workers that is accepted; a larger value means that the file is damaged."""
Depth = Annotated[int, Meta(ge=1, le=MAX_DEPTH)]
DataParallel = Literal["", "ddp", "zero1", "fsdp", "hsdp"]
"""Training mode of the user's own module in a plan of one stage. `ddp`: torch's DDP. `zero1`: DDP with optimiser state
divided. `fsdp`: FSDP2 over all workers. `hsdp`: FSDP2 within each server, and replicas across servers. Empty: the
pipeline engine trains a traced stage."""
SHARDED: tuple[DataParallel, ...] = ("fsdp", "hsdp")
"""The values under which each worker holds only a part of the weights. Only the data-parallel engine runs them."""


@dataclass(frozen=True)
class StagePlacement:
    """The workers of a stage, and how many minibatches and weight versions each may hold."""

    workers: Annotated[tuple[Natural, ...], Meta(min_length=1)]
    """Ranks of the stage's replicas: minibatch i goes to workers[i mod r]."""
    depth: Depth
    """Largest number of minibatches that a replica has in flight."""
    versions: Depth
    """Largest number of weight versions that a replica holds at once."""
    recompute: bool = False
    """Whether the stage keeps only its input for the backward pass, and runs forward again before it."""
    deferred: Annotated[int, Meta(ge=0, le=MAX_DEPTH)] = 0
    """Largest number of minibatches whose weight gradients are deferred, under a schedule with W."""
    shares: tuple[Positive, ...] = ()
    """Minibatches of an update on each worker, if they are unequal. Only the data-parallel engine runs unequal
    shares."""


@dataclass(frozen=True)
class Prediction:
    """The planner's predictions for one replica of a stage, per minibatch; None if the plan lacks the value."""

    minibatch_s: Amount | None = None
    """The pipeline's step time: seconds between two minibatches, the same for all stages."""
    forward_s: Amount | None = None
    backward_s: Amount | None = None
    update_s: Amount | None = None
    """Time of the optimiser's step, divided by the minibatches of an update."""
    executor_s: Amount | None = None
    """Time of the executor's own work; None if the plan does not include it."""
    sync_s: Amount | None = None
    exposed_s: Amount | None = None
    """Exposed all-reduce time, which computing does not hide."""
    wait_s: Amount | None = None
    """Idle time of the replica between two of its minibatches."""
    boundary_s: Amount | None = None
    """Time that a minibatch of the pipeline occupies the link from this stage to the next."""
    cores: Amount | None = None
    """Cores that the workers of the stage's server share, if there are fewer cores than workers; otherwise 0."""
    receive_bytes: Amount | None = None
    send_bytes: Amount | None = None
    receive_gradient_bytes: Amount | None = None
    parameter_bytes: Amount | None = None
    """Bytes of one weight version."""
    memory_bytes: Amount | None = None
    """Memory on one worker: weights, gradients, optimiser state, saved activations, and `worker_bytes`."""
    worker_bytes: Amount | None = None
    """Memory of a worker process without a model; None if the plan does not include it."""


@dataclass(frozen=True)
class LaunchPlan:
    """A plan, as read from all its stage files."""

    plan: str
    mode: str
    """`training` or `inference`."""
    model_ref: str
    graph_hash: str | None
    minibatch: int
    device: str
    """`cpu` or `cuda`."""
    servers: int
    workers_per_server: int
    """Workers on every server, or on the largest server if servers differ."""
    schedule: Schedule
    pipeline: tuple[StagePlacement, ...]
    layers: tuple[tuple[str, ...], ...]
    """Names of the layers of each stage."""
    predictions: tuple[Prediction, ...]
    server_sizes: tuple[int, ...] = ()
    """Workers on each server, if servers have different numbers of them; otherwise empty."""
    device_names: tuple[str, ...] = ()
    """The name of each worker's device, if a server has devices of different kinds; otherwise empty."""
    accumulate: int | None = None
    """Minibatches per update, the same at all stages, for schedules that accumulate gradients; otherwise None."""
    correction: str = "none"
    """The correction of updates from old gradients: `none`, or `ef` (error feedback on updates)."""
    shard_optimizer: bool = False
    """Whether the replicas of a stage divide the state of the optimiser. An option of launch.sh overrides it."""
    data_parallel: DataParallel = ""
    """Mode of the data-parallel engine, for a plan of one stage; empty for the pipeline engine."""
    granularity: str = "layer"
    """Size of the layers: the model is traced at the granularity of its profile."""
    taken_whole: tuple[str, ...] = ()
    """Paths of submodules that are not traced inside, as in the profile."""
    profile: str = ""
    """Source of the predicted times: `measured`, `modelled`, `imported` or `calibrated`; empty if unknown."""
    emulated: tuple[EmulatedStage, ...] = ()
    """Descriptions of the stages to emulate; empty if the model itself runs."""
    model_file: JobFile | None = None
    """The file of the model when the plan was made; None for a bundled model, and in older plans."""
    links: PlannedLinks | None = None
    """The link rates that the plan was made for, if its files hold them."""

    @property
    def world(self) -> int:
        """Number of workers that launch.sh starts, including idle ones."""
        return sum(self.server_sizes) if self.server_sizes else self.servers * self.workers_per_server

    def workers_on(self, server: int) -> int:
        """Number of workers on one server."""
        return self.server_sizes[server] if self.server_sizes else self.workers_per_server

    def workers_by_server(self, stage: int) -> list[list[int]]:
        """The ranks of a stage's replicas, sorted, server by server."""
        ends = list(accumulate(self.workers_on(server) for server in range(self.servers)))
        servers: dict[int, list[int]] = {}
        for rank in sorted(self.pipeline[stage].workers):
            servers.setdefault(bisect_right(ends, rank), []).append(rank)
        return [servers[server] for server in sorted(servers)]

    @property
    def active(self) -> tuple[int, ...]:
        """Sorted ranks of the workers that belong to a stage."""
        return tuple(sorted({worker for stage in self.pipeline for worker in stage.workers}))

    @property
    def shapes(self) -> tuple[StageShape, ...]:
        """The pipeline in the form that schedules take."""
        devices: list[int | None] = [None] * len(self.pipeline)
        if self.schedule.virtual is not None:
            seats = {workers: device for device, workers in enumerate(self.device_workers)}
            devices = [seats[stage.workers] for stage in self.pipeline]
        return tuple(
            StageShape(len(stage.workers), stage.depth, self.accumulate, stage.deferred, device, stage.shares)
            for stage, device in zip(self.pipeline, devices, strict=True)
        )

    @property
    def device_workers(self) -> tuple[tuple[int, ...], ...]:
        """The workers at each position of the pipeline, sorted by the first stage that they run."""
        return tuple(dict.fromkeys(stage.workers for stage in self.pipeline))

    def places(self, rank: int) -> tuple[tuple[int, int], ...]:
        """The (stage, replica) of every stage that a rank runs, in the order of stages; () for an idle worker."""
        return tuple(
            (index, stage.workers.index(rank)) for index, stage in enumerate(self.pipeline) if rank in stage.workers
        )

    def place(self, rank: int) -> tuple[int, int] | None:
        """The (stage, replica) of a rank, the last pair if it runs several stages; None for an idle worker."""
        return next(reversed(self.places(rank)), None)

    def written(self) -> str:
        """The plan's replica counts, as in 2-1-1."""
        return "-".join(str(len(stage.workers)) for stage in self.pipeline)
