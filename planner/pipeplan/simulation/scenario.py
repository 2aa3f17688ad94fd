"""What there is to replay, read from a plan folder and checked."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from pipeplan import cost
from pipeplan.cluster_data import Cluster
from pipeplan.cluster_json import from_json
from pipeplan.errors import InputError
from pipeplan.files import Node, read_document
from pipeplan.links import Links
from pipeplan.plan import ACCUMULATING, DOUBLE_BUFFERED, FLUSHING, INFERENCE, Plan
from pipeplan.simulation.cards import Cards
from pipeplan_launch.schedule import SCHEDULES, Schedule, StageShape

FORMAT, VERSION = "pipeplan-plan", 1


@dataclass(frozen=True)
class Load:
    """What one stage does, in seconds and bytes per minibatch on one replica."""

    workers: tuple[int, ...]
    """Minibatch i runs on `workers[i mod len(workers)]`."""
    depth: int
    forward_s: float
    backward_s: float
    """With the optimiser's step, as far as it falls to one minibatch."""
    sync_s: float
    """One all-reduce of a group of minibatches among all replicas."""
    minibatch_bytes: int = 0
    """What a replica keeps for every minibatch in flight, beside versions of the weights."""
    memory_bytes: int = 0
    """What the plan says that one worker needs."""
    parameter_bytes: int = 0
    """One version of the weights."""
    versions: int = 1
    """How many of them the plan reckons with."""
    per_update: float = 1.0
    """Minibatches that a replica computes for one update, on average."""
    left_s: float | None = None
    """In plain data parallelism, whose forward pass waits for the update: what of the all-reduce is left when the
    backward pass ends."""
    update_share: float = 0.0
    """What of `backward_s` is the optimiser's step."""

    @property
    def replicas(self) -> int:
        """How many workers hold this stage."""
        return len(self.workers)

    def exposed_s(self, overlap: float) -> float:
        """What of an all-reduce holds up its replicas: they then need exactly what the cost model says for a group."""
        if self.left_s is not None:
            return self.left_s + (1.0 - overlap) * max(0.0, self.sync_s - self.left_s)
        work = (self.forward_s + self.backward_s) * self.per_update
        return float(cost.overlapped(work, self.sync_s, overlap)) - max(work, self.hidden_s(overlap))

    def hidden_s(self, overlap: float) -> float:
        """What of an all-reduce goes on behind the replicas' computing."""
        return 0.0 if self.left_s is not None else overlap * self.sync_s

    @property
    def fixed_bytes(self) -> int:
        """What a worker needs however many versions and minibatches it holds."""
        return self.memory_bytes - self.versions * self.parameter_bytes - self.depth * self.minibatch_bytes


@dataclass(frozen=True)
class Hop:
    """What joins two stages of one pipeline."""

    transmit_s: float
    """How long the activations of a minibatch keep the link busy."""
    latency_s: float
    """How long after that a message arrives."""
    return_s: float | None = None
    """How long their gradients do; as long as the activations where that is not given."""
    links: int = 1
    """How many messages each direction carries at once, each at the full rate."""
    bandwidth: float = math.inf
    """That full rate, bytes/s."""

    @property
    def back_s(self) -> float:
        """How long gradients keep the link busy."""
        return self.transmit_s if self.return_s is None else self.return_s


@dataclass(frozen=True)
class Scenario:
    """A plan with its times."""

    config: str
    """Replica counts, as people write them."""
    stages: tuple[Load, ...]
    hops: tuple[tuple[Hop, ...], ...]
    """Behind each stage but the last: one link for every copy of the pipeline."""
    schedule: Schedule
    overlap: float
    """Share of an all-reduce that can hide behind computing."""
    predicted_s: float
    """The pace that the planner promised, seconds per minibatch."""
    copies: int = 1
    workers_per_server: int = 1
    server_starts: tuple[int, ...] = ()
    """The first worker of every server, where servers differ in their number of devices."""
    accumulate: int | None = None
    """Minibatches per update, for the schedules that need a number."""
    cards: Cards | None = None
    """The network cards that messages and all-reduces share; without them each has its links alone."""

    @cached_property
    def shapes(self) -> tuple[StageShape, ...]:
        """The pipeline as schedules see it."""
        return tuple(StageShape(stage.replicas, stage.depth, self.accumulate) for stage in self.stages)

    @property
    def drains(self) -> bool:
        """Whether the pipeline drains before every update."""
        return self.schedule.name in FLUSHING

    def server_of(self, worker: int) -> int:
        """The number of the server that a worker is on."""
        if self.server_starts:
            return bisect_right(self.server_starts, worker) - 1
        return worker // self.workers_per_server

    @property
    def in_flight(self) -> int:
        """The most minibatches that are under way at once, as far as a schedule limits it."""
        if self.schedule.trains:
            return self.stages[0].depth * self.stages[0].replicas
        return sum(stage.replicas for stage in self.stages)


def read(folder: Path) -> Scenario:
    """Read a plan folder; an `InputError` says what is missing or wrong."""
    path = folder / "plan.json"
    if not path.is_file():
        what = "has no plan.json" if folder.is_dir() else "is not a folder" if folder.exists() else "does not exist"
        raise InputError(f"{folder} {what}; `pipeplan solve` writes plan folders")
    scenario = from_document(read_document(path, FORMAT, VERSION))
    for index in range(len(scenario.stages)):
        if not (folder / "stages" / f"stage-{index}.json").is_file():
            raise InputError(f"{folder}/stages/stage-{index}.json is missing: solve again with --force")
    return scenario


def from_document(root: Node) -> Scenario:
    """The scenario that plan.json describes."""
    plan = Plan.from_json(root["plan"])
    cluster = from_json(root["cluster"])
    _check(root["plan"], plan, cluster)
    predictions = root["prediction"]["stages"].items()
    if len(predictions) != len(plan.stages):
        root["prediction"]["stages"].fail(f"expected {len(plan.stages)}, one for each stage, found {len(predictions)}")
    overlap = root["options"]["overlap"]
    if overlap.number() > 1:
        overlap.fail(f"expected at most 1, found {overlap.number():g}")
    parallel = root["options"]["boundary"].text() == "parallel"
    schedule = SCHEDULES[INFERENCE if plan.inference else plan.schedule]
    if schedule.accumulates and plan.accumulate is None:
        root["plan"]["accumulate"].fail(f"the schedule {schedule.name} needs a number of minibatches per update")
    waits = root["options"]["contention"].boolean()
    return Scenario(
        config=plan.config,
        stages=tuple(_load(plan, index, node, waits) for index, node in enumerate(predictions)),
        hops=tuple(_hops(plan, cluster, index, node, parallel) for index, node in enumerate(predictions[:-1])),
        schedule=schedule,
        # Nothing else is computed while a drained pipeline waits for its all-reduces.
        overlap=0.0 if plan.schedule in FLUSHING else overlap.number(),
        predicted_s=root["prediction"]["minibatch_s"].number(),
        copies=plan.copies,
        workers_per_server=cluster.workers_per_server,
        accumulate=plan.accumulate,
        cards=Cards(plan, Links.of(cluster)) if root["options"]["contention"].boolean() else None,
        server_starts=() if cluster.uniform else tuple(cluster.starts(cluster.server_level)[:-1]),
    )


def _check(node: Node, plan: Plan, cluster: Cluster) -> None:
    workers = [worker for stage in plan.stages for worker in stage.workers]
    if not plan.stages:
        node["stages"].fail("the plan has no stages: solve again with --force")
    if len(set(workers)) != len(workers):
        node["stages"].fail("a worker is in two places of the plan")
    if any(not stage.workers or stage.replicas % plan.copies for stage in plan.stages):
        node["stages"].fail(f"every stage needs a worker in each of the {plan.copies} copies of the pipeline")
    if max(workers) >= cluster.workers:
        node["stages"].fail(f"there is no worker {max(workers)}: the cluster has workers 0 to {cluster.workers - 1}")
    most = max(stage.depth * stage.replicas for stage in plan.stages)
    if plan.schedule == DOUBLE_BUFFERED and not plan.inference and most > (plan.accumulate or 0):
        node["stages"].fail(f"{most} minibatches are in flight at a stage, more than one update of 2bw has")


def _load(plan: Plan, index: int, node: Node, waits: bool) -> Load:
    stage, update, left = plan.stages[index], node.get("update_s"), node.get("exposed_sync_s")
    update_s = update.number() if update else 0.0
    backward_s = node["backward_s"].number() + update_s
    return Load(
        workers=stage.workers,
        depth=stage.depth,
        forward_s=node["forward_s"].number(),
        backward_s=backward_s,
        sync_s=0.0 if plan.inference else node["sync_s"].number(),
        minibatch_bytes=node["minibatch_bytes"].integer(),
        memory_bytes=node["memory_bytes"].integer(),
        parameter_bytes=node["parameter_bytes"].integer(),
        versions=stage.versions,
        left_s=left.number() if waits and left else None,
        per_update=plan.accumulate / stage.replicas if plan.schedule in ACCUMULATING and plan.accumulate else 1.0,
        update_share=update_s / backward_s if update_s else 0.0,
    )


def _hops(plan: Plan, cluster: Cluster, index: int, node: Node, parallel: bool) -> tuple[Hop, ...]:
    links = Links.of(cluster)
    sent, returned = node["send_bytes"].integer(), node["receive_gradient_bytes"].integer()
    hops = []
    for copy in range(plan.copies):
        here, there = plan.copy(copy)[index : index + 2]
        bandwidth, latency = links.sendrecv_among(here + there)
        at_once = min(len(here), len(there)) if parallel else 1
        times = (float(cost.boundary_time(size, bandwidth)) for size in (sent, returned))
        hops.append(Hop(next(times), latency, next(times), at_once, bandwidth))
    return tuple(hops)
