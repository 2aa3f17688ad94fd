"""The checker's own schema of plan.json.

The planner's types for plans and options also compute figures, for example weight versions and configurations. A check
must compute such figures again, so the checker does not use the planner's types.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Annotated, Literal

from msgspec import Meta, Struct

from pipeplan.checker.network import NetworkRates
from pipeplan.cluster_data.cluster import Cluster
from pipeplan.cluster_data.cluster_document import cluster_from_json
from pipeplan.util.files import Node
from pipeplan.util.typed import Natural, Positive, decode

FORMAT, VERSION = "pipeplan-plan", 1
STASHING, VERTICAL, FORWARD_ONLY = "1f1b-stashing", "vertical-sync", "forward-only"
DOUBLE_BUFFERED, GPIPE, FLUSH, ZERO_BUBBLE = "2bw", "gpipe", "1f1b-flush", "zb-h1"
INTERLEAVED, ZERO_BUBBLE_V = "interleaved-1f1b", "zb-v"
VIRTUAL = (INTERLEAVED, ZERO_BUBBLE_V)
"""The schedules under which every worker runs several stages."""
FLUSHING = (GPIPE, FLUSH, ZERO_BUBBLE, *VIRTUAL)
ACCUMULATING = (DOUBLE_BUFFERED, *FLUSHING)
SCHEDULES = (STASHING, VERTICAL, *ACCUMULATING)
WHOLE, DIVIDED_STATE, FULLY_SHARDED, HYBRID_SHARDED = "none", "zero1", "fsdp", "hsdp"
"""The state that replicas divide: nothing, the optimiser's state, or the weights (among all workers, or within each
server)."""


@dataclass(frozen=True)
class CheckedOptions:
    """The options that the plan was made with. An option that plan.json leaves out has the default of `pipeplan solve`.

    The fields are those of `pipeplan.problem.options.Options`.
    """

    overlap: Annotated[float, Meta(ge=0, le=1)]
    inference: bool = False
    schedule: str = STASHING
    accumulate: Positive | None = None
    memory: bool = True
    stages: Positive | None = None
    max_stages: Positive | None = None
    max_replicas: Positive | None = None
    max_workers: Positive | None = None
    allow_copies: bool = True
    contention: bool = True
    recompute: bool = True
    correction: Literal["none", "ef"] = "none"
    """`ef` if stages keep steps of the optimiser to correct updates from old gradients, otherwise `none`."""
    boundary: Literal["single", "parallel"] = "single"
    pins: tuple[tuple[str, Positive], ...] = ()
    together: tuple[tuple[str, ...], ...] = ()
    no_cut_after: tuple[str, ...] = ()
    grid: bool = False
    sharding: Literal["none", "zero1", "fsdp", "hsdp"] = "none"
    """The state that the replicas of a stage divide."""
    unequal_shares: bool = False
    """Whether workers of plain data parallelism take microbatches in proportion to their speed."""
    virtual_stages: Positive | None = None
    """Number of stages per worker that the user asked for, under interleaved-1f1b."""

    @property
    def shard_optimizer(self) -> bool:
        """Whether replicas that keep whole weights divide the state of the optimiser."""
        return self.sharding == DIVIDED_STATE

    @property
    def divides_weights(self) -> bool:
        """Whether replicas divide the weights."""
        return self.sharding in (FULLY_SHARDED, HYBRID_SHARDED)


@dataclass(frozen=True)
class CheckedStage:
    """One stage of the plan."""

    layers: tuple[str, ...]
    workers: tuple[Natural, ...]
    depth: Positive
    versions: Positive
    recompute: bool = False
    deferred: Natural = 0
    shares: tuple[Positive, ...] = ()


class PlanFields(Struct, frozen=True):
    """The field `plan`."""

    inference: bool
    copies: Positive
    stages: tuple[CheckedStage, ...]
    schedule: str | None = None
    accumulate: Positive | None = None


@dataclass(frozen=True)
class PlanDocument:
    """The content of a plan.json."""

    root: Node
    digest: str
    """Digest of the profile that the plan was made from."""
    minibatch: int
    cluster: Cluster
    options: CheckedOptions
    stages: tuple[CheckedStage, ...]
    copies: int
    inference: bool
    schedule: str
    accumulate: int | None
    step_time_s: float

    @cached_property
    def network(self) -> NetworkRates:
        """The links of the cluster."""
        return NetworkRates.of(self.cluster)

    @property
    def prediction(self) -> Node:
        """The field in which the plan states its cost."""
        return self.root["prediction"]

    @property
    def step_s(self) -> float:
        """The step time that plan.json states, in seconds per minibatch."""
        stated = self.root["stated"]["minibatch_s"]
        if not stated.number() > 0:
            stated.fail("expected more than 0 seconds")
        return stated.number()

    @property
    def minibatches(self) -> int:
        """Minibatches per update, if all stages update together."""
        return self.accumulate or 1

    @property
    def accumulates(self) -> bool:
        """Whether all stages make one update per fixed number of minibatches."""
        return self.schedule in ACCUMULATING

    @property
    def flushes(self) -> bool:
        """Whether the pipeline drains before every update."""
        return self.schedule in FLUSHING

    @property
    def virtual(self) -> bool:
        """Whether every worker runs several stages."""
        return self.schedule in VIRTUAL

    def share(self, copies: int) -> int:
        """Minibatches of one update in one of `copies` copies: with a flush, in the copy with the most."""
        return math.ceil(self.minibatches / copies) if self.flushes else self.minibatches // copies

    def relative_s(self, index: int) -> list[float]:
        """The time of a pass on each worker of a stage, relative to the slowest worker."""
        speeds = [self.cluster.device_of(worker).speed for worker in self.stages[index].workers]
        return [min(speeds) / speed for speed in speeds]

    def rounds(self, index: int) -> float:
        """Minibatches of an update on the busiest replica of a stage, counted in minibatches of the slowest worker."""
        stage = self.stages[index]
        if stage.shares:
            return max(count * time for count, time in zip(stage.shares, self.relative_s(index), strict=True))
        return math.ceil(self.share(self.copies) / (len(stage.workers) // self.copies))

    def update_interval(self, copies: int) -> int:
        """Number of minibatches, of all copies together, for each all-reduce among the copies."""
        return self.minibatches if self.accumulates else copies

    @property
    def devices(self) -> tuple[tuple[int, ...], ...]:
        """The workers of every position in the pipeline. Stages on the same workers have one position."""
        return tuple(dict.fromkeys(stage.workers for stage in self.stages))

    @property
    def positions(self) -> tuple[tuple[int, ...], ...]:
        """The workers of every stage, or of every device if workers run several stages."""
        return self.devices if self.virtual else tuple(stage.workers for stage in self.stages)

    def of_copy(self, copy: int, stage: int) -> tuple[int, ...]:
        """The workers of a stage in one copy of the pipeline: every `copies`-th worker, because copies take turns."""
        return self.stages[stage].workers[copy :: self.copies]

    @staticmethod
    def of(root: Node) -> PlanDocument:
        """Read a plan.json. Raises an `InputError` that names the wrong field."""
        plan = decode(root["plan"], PlanFields)
        name = plan.schedule or (FORWARD_ONLY if plan.inference else STASHING)
        if name not in ((FORWARD_ONLY,) if plan.inference else SCHEDULES):
            kind = "inference" if plan.inference else "training"
            root["plan"]["schedule"].fail(f"there is no such schedule for {kind}")
        if name in ACCUMULATING and plan.accumulate is None:
            root["plan"].fail(f"the schedule {name} needs a number of minibatches per update, `accumulate`")
        document = PlanDocument(
            root=root,
            digest=root["profile"]["digest"].text(),
            minibatch=root["profile"]["minibatch"].integer(minimum=1),
            cluster=_cluster(root["cluster"]),
            options=_options(root["options"]),
            stages=plan.stages,
            copies=plan.copies,
            inference=plan.inference,
            schedule=name,
            accumulate=plan.accumulate,
            step_time_s=root["prediction"]["minibatch_s"].number(),
        )
        if not document.step_time_s > 0:
            document.prediction["minibatch_s"].fail("it states no step time: expected more than 0 seconds")
        return document


def _options(node: Node) -> CheckedOptions:
    node.refuse_others({*(field.name for field in fields(CheckedOptions)), "shard_optimizer"})
    stated = dict(node.mapping())
    if stated.pop("shard_optimizer", False) is True:  # plans before FSDP
        stated["sharding"] = DIVIDED_STATE
    return decode(Node(stated, node.where), CheckedOptions)


def _cluster(node: Node) -> Cluster:
    """The cluster. Raises an `InputError` if its digest, which covers every field, does not match."""
    cluster = cluster_from_json(node)
    if cluster.digest() != node["digest"].text():
        node["digest"].fail("the cluster is not the one that the plan was made for: their digests differ")
    return cluster
