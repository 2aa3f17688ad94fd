"""The plan that the executor runs: its stages and workers, its schedule and the predictions. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from pipeplan_launch.plan.planned_links import PlannedLinks
from pipeplan_launch.plan.schedule import Schedule, StageShape
from pipeplan_launch.plan.sleeping_stage_spec import EmulatedStage


@dataclass(frozen=True)
class StagePlacement:
    """The workers of a stage, and how deep its pipeline is."""

    workers: tuple[int, ...]
    """Ranks of the stage's replicas: minibatch i goes to workers[i mod r]."""
    depth: int
    """Most minibatches that a replica has in flight."""
    versions: int
    """Most weight versions that a replica holds at once."""
    recompute: bool = False
    """Whether the stage keeps only its input for the backward pass, and runs forward again before it."""
    deferred: int = 0
    """Most minibatches whose gradients of the weights are put off, under a schedule with W."""


@dataclass(frozen=True)
class Prediction:
    """The planner's predictions for one replica of a stage, per minibatch; None where the plan has none."""

    minibatch_s: float | None = None
    """The pipeline's pace: seconds between two minibatches, the same for all stages."""
    forward_s: float | None = None
    backward_s: float | None = None
    update_s: float | None = None
    """Time of the optimiser's step, divided by the minibatches of an update."""
    executor_s: float | None = None
    """The executor's own work; None where the plan was made without it."""
    sync_s: float | None = None
    exposed_s: float | None = None
    """Exposed all-reduce time, which computing does not hide."""
    wait_s: float | None = None
    """Idle time of the replica between two of its minibatches."""
    boundary_s: float | None = None
    """Time that a minibatch of the pipeline occupies the link from this stage to the next."""
    cores: float | None = None
    """Cores that the workers of the stage's server share, if there are fewer cores than workers; otherwise 0."""
    receive_bytes: float | None = None
    send_bytes: float | None = None
    receive_gradient_bytes: float | None = None
    parameter_bytes: float | None = None
    """Bytes of one weight version."""
    memory_bytes: float | None = None
    """Memory on one worker: weights, gradients, optimiser state and saved activations, and `worker_bytes`."""
    worker_bytes: float | None = None
    """Memory of a worker without a model; None where the plan was made without it."""


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
    """Workers on every server, or on the largest if servers differ."""
    schedule: Schedule
    pipeline: tuple[StagePlacement, ...]
    layers: tuple[tuple[str, ...], ...]
    """Names of the layers of each stage."""
    predictions: tuple[Prediction, ...]
    server_sizes: tuple[int, ...] = ()
    """Workers on each server, if servers differ in that; otherwise empty."""
    accumulate: int | None = None
    """Minibatches per update, the same at all stages, for schedules that take that number."""
    correction: str = "none"
    """The correction of updates from old gradients: `none`, or `ef` (error feedback on updates)."""
    granularity: str = "layer"
    """Size of the layers: the model is traced at the granularity of its profile."""
    profile: str = ""
    """Source of the predicted times: `measured`, `modelled`, `imported` or `calibrated`; empty if unknown."""
    emulated: tuple[EmulatedStage, ...] = ()
    """Descriptions of the stages to emulate; empty if the model itself runs."""
    links: PlannedLinks | None = None
    """The link rates that the plan was made for, if its files hold them."""

    @property
    def world(self) -> int:
        """Number of workers that launch.sh starts, including idle ones."""
        return sum(self.server_sizes) if self.server_sizes else self.servers * self.workers_per_server

    def workers_on(self, server: int) -> int:
        """Number of workers on one server."""
        return self.server_sizes[server] if self.server_sizes else self.workers_per_server

    @property
    def active(self) -> tuple[int, ...]:
        """Sorted ranks of the workers that belong to a stage."""
        return tuple(sorted(worker for stage in self.pipeline for worker in stage.workers))

    @property
    def shapes(self) -> tuple[StageShape, ...]:
        """The pipeline in the form that schedules take."""
        return tuple(
            StageShape(len(stage.workers), stage.depth, self.accumulate, stage.deferred) for stage in self.pipeline
        )

    def place(self, rank: int) -> tuple[int, int] | None:
        """The (stage, replica) of a rank, or None for an idle worker."""
        for index, stage in enumerate(self.pipeline):
            if rank in stage.workers:
                return index, stage.workers.index(rank)
        return None

    def written(self) -> str:
        """The plan's replica counts, as in 2-1-1."""
        return "-".join(str(len(stage.workers)) for stage in self.pipeline)
