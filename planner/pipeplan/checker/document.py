"""Reads plan.json field by field, without the planner's own types for plans and problems."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from pipeplan.checker.network import NetworkRates
from pipeplan.cluster_data.cluster import Cluster
from pipeplan.cluster_data.cluster_document import cluster_from_json
from pipeplan.util.files import Node

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
"""What replicas divide among them: nothing, the optimiser's state, and the weights of all workers or of each server."""


@dataclass(frozen=True)
class CheckedOptions:
    """The options that the plan was made with. Where plan.json leaves one out, it has the default of `pipeplan solve`.

    The fields are those of `pipeplan.problem.options.Options`.
    """

    overlap: float
    memory: bool
    stages: int | None
    max_stages: int | None
    max_replicas: int | None
    max_workers: int | None
    allow_copies: bool
    contention: bool
    recompute: bool
    correction: str
    """`ef` where stages keep steps of the optimiser to correct updates from old gradients, otherwise `none`."""
    boundary: str
    pins: tuple[tuple[str, int], ...]
    together: tuple[tuple[str, ...], ...]
    no_cut_after: tuple[str, ...]
    grid: bool
    sharding: str = WHOLE
    """The state that the replicas of a stage divide among them."""
    virtual_stages: int | None = None
    """Stages of each worker that were asked for, under interleaved-1f1b."""

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
    workers: tuple[int, ...]
    depth: int
    versions: int
    recompute: bool
    deferred: int = 0


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
    pace_s: float

    @cached_property
    def network(self) -> NetworkRates:
        """The links of the cluster."""
        return NetworkRates.of(self.cluster)

    @property
    def claims_proof(self) -> bool:
        """Whether plan.json holds a certificate, calls its plan optimal, or calls its verdict proven."""
        status, verdict = self.root.get("status"), self.root.get("verdict")
        proven = verdict.get("proven") if verdict else None
        return (
            self.root.get("certificate") is not None
            or (status is not None and status.value == "optimal")
            or (proven is not None and proven.value is True)
        )

    @property
    def prediction(self) -> Node:
        """The field in which the plan states its cost."""
        return self.root["prediction"]

    @property
    def step_s(self) -> float:
        """The step time that the answer states, in seconds per minibatch."""
        return self.root["stated"]["minibatch_s"].number()

    @property
    def accumulates(self) -> bool:
        """Whether all stages make one update for the same number of minibatches."""
        return self.schedule in ACCUMULATING

    @property
    def virtual(self) -> bool:
        """Whether every worker runs several stages."""
        return self.schedule in VIRTUAL

    @property
    def devices(self) -> tuple[tuple[int, ...], ...]:
        """The workers of every position in the pipeline: those of every stage, each once."""
        return tuple(dict.fromkeys(stage.workers for stage in self.stages))

    def of_copy(self, copy: int, stage: int) -> tuple[int, ...]:
        """The workers of a stage in one copy of the pipeline: every `copies`-th one, as copies take turns."""
        return self.stages[stage].workers[copy :: self.copies]

    @staticmethod
    def of(root: Node) -> PlanDocument:
        """Read a plan.json. Raises an `InputError` that names the field that is wrong."""
        plan = root["plan"]
        inference = plan["inference"].boolean()
        schedule = plan.get("schedule")
        name = schedule.text() if schedule else FORWARD_ONLY if inference else STASHING
        if name not in ((FORWARD_ONLY,) if inference else SCHEDULES):
            plan["schedule"].fail(f"there is no such schedule for {'inference' if inference else 'training'}")
        if name in ACCUMULATING and plan.get("accumulate") is None:
            plan.fail(f"the schedule {name} needs a number of minibatches per update, `accumulate`")
        return PlanDocument(
            root=root,
            digest=root["profile"]["digest"].text(),
            minibatch=root["profile"]["minibatch"].integer(minimum=1),
            cluster=_cluster(root["cluster"]),
            options=_options(root["options"]),
            stages=stages_from_json(plan),
            copies=plan["copies"].integer(minimum=1),
            inference=inference,
            schedule=name,
            accumulate=_count(plan, "accumulate"),
            pace_s=root["prediction"]["minibatch_s"].number(),
        )


def stages_from_json(plan: Node) -> tuple[CheckedStage, ...]:
    """The stages of a plan. Raises an `InputError` that names the field that is wrong."""
    return tuple(_stage(node) for node in plan["stages"].items())


def _stage(node: Node) -> CheckedStage:
    recompute, deferred = node.get("recompute"), node.get("deferred")
    return CheckedStage(
        layers=tuple(name.text() for name in node["layers"].items()),
        workers=tuple(worker.integer() for worker in node["workers"].items()),
        depth=node["depth"].integer(minimum=1),
        versions=node["versions"].integer(minimum=1),
        recompute=recompute.boolean() if recompute else False,
        deferred=deferred.integer() if deferred else 0,
    )


def _options(node: Node) -> CheckedOptions:
    overlap = node["overlap"]
    if overlap.number() > 1:
        overlap.fail(f"expected at most 1, found {overlap.number():g}")
    return CheckedOptions(
        overlap=overlap.number(),
        memory=_flag(node, "memory", True),
        stages=_count(node, "stages"),
        max_stages=_count(node, "max_stages"),
        max_replicas=_count(node, "max_replicas"),
        max_workers=_count(node, "max_workers"),
        allow_copies=_flag(node, "allow_copies", True),
        contention=_flag(node, "contention", True),
        recompute=_flag(node, "recompute", True),
        correction=_correction(node),
        boundary=_boundary(node),
        pins=tuple(_pin(pin) for pin in _list(node, "pins")),
        together=tuple(tuple(name.text() for name in group.items()) for group in _list(node, "together")),
        no_cut_after=tuple(name.text() for name in _list(node, "no_cut_after")),
        grid=_flag(node, "grid", False),
        virtual_stages=_count(node, "virtual_stages"),
        sharding=_sharding(node),
    )


def _correction(node: Node) -> str:
    value = node.get("correction")
    if value is not None and value.text() not in ("none", "ef"):
        value.fail(f"there is no such correction: {value.text()!r}")
    return value.text() if value else "none"


def _sharding(node: Node) -> str:
    value = node.get("sharding")
    if value is not None and value.text() not in (WHOLE, DIVIDED_STATE, FULLY_SHARDED, HYBRID_SHARDED):
        value.fail(f"replicas cannot divide {value.text()!r}")
    # Plans before FSDP state a flag.
    return value.text() if value else DIVIDED_STATE if _flag(node, "shard_optimizer", False) else WHOLE


def _boundary(node: Node) -> str:
    value = node.get("boundary")
    if value is not None and value.text() not in ("single", "parallel"):
        value.fail(f"there is no such model of a boundary: {value.text()!r}")
    return value.text() if value else "single"


def _pin(node: Node) -> tuple[str, int]:
    pair = node.items()
    if len(pair) != 2:
        node.fail("expected a layer and a stage")
    return pair[0].text(), pair[1].integer(minimum=1)


def _count(node: Node, key: str) -> int | None:
    value = node.get(key)
    return value.integer(minimum=1) if value else None


def _flag(node: Node, key: str, otherwise: bool) -> bool:
    value = node.get(key)
    return value.boolean() if value else otherwise


def _list(node: Node, key: str) -> list[Node]:
    value = node.get(key)
    return value.items() if value else []


def _cluster(node: Node) -> Cluster:
    """The cluster. Raises an `InputError` where its digest, which covers every field, does not match."""
    cluster = cluster_from_json(node)
    if cluster.digest() != node["digest"].text():
        node["digest"].fail("the cluster is not the one that the plan was made for: their digests differ")
    return cluster
