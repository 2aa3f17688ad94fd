"""What there is to replay, read from a plan folder and checked."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path

from pipeplan import cost
from pipeplan.cluster import Cluster
from pipeplan.cluster_json import from_json
from pipeplan.errors import InputError
from pipeplan.files import Node, read_document
from pipeplan.links import Links
from pipeplan.plan import Plan
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
    sync_s: float
    """One all-reduce of a group of minibatches among all replicas."""
    held_bytes: int = 0
    """Input and output that a replica keeps for every minibatch in flight."""
    memory_bytes: int = 0
    """What the plan says that one worker needs."""

    @property
    def replicas(self) -> int:
        """How many workers hold this stage."""
        return len(self.workers)

    def exposed_s(self, overlap: float) -> float:
        """What of an all-reduce holds up its replicas: they then need exactly what the cost model says for a group."""
        work = self.forward_s + self.backward_s
        return float(cost.overlapped(work, self.sync_s, overlap)) - max(work, self.hidden_s(overlap))

    def hidden_s(self, overlap: float) -> float:
        """What of an all-reduce goes on behind the replicas' computing."""
        return overlap * self.sync_s


@dataclass(frozen=True)
class Hop:
    """The link between two stages of one pipeline. Each direction carries one message at a time."""

    transmit_s: float
    """How long a message keeps the link busy."""
    latency_s: float
    """How long after that it arrives."""


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

    @property
    def shapes(self) -> tuple[StageShape, ...]:
        """The pipeline as schedules see it."""
        return tuple(StageShape(stage.replicas, stage.depth) for stage in self.stages)

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
    sizes = [node["send_bytes"].integer() for node in predictions]
    return Scenario(
        config=plan.config,
        stages=tuple(_load(plan, index, node) for index, node in enumerate(predictions)),
        hops=tuple(_hops(plan, cluster, index, size) for index, size in enumerate(sizes[:-1])),
        schedule=SCHEDULES["forward-only" if plan.inference else "1f1b-stashing"],
        overlap=overlap.number(),
        predicted_s=root["prediction"]["minibatch_s"].number(),
        copies=plan.copies,
        workers_per_server=cluster.workers_per_server,
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


def _load(plan: Plan, index: int, node: Node) -> Load:
    stage = plan.stages[index]
    return Load(
        workers=stage.workers,
        depth=stage.depth,
        forward_s=node["forward_s"].number(),
        backward_s=node["backward_s"].number(),
        sync_s=0.0 if plan.inference else node["sync_s"].number(),
        held_bytes=node["receive_bytes"].integer() + node["send_bytes"].integer(),
        memory_bytes=node["memory_bytes"].integer(),
    )


def _hops(plan: Plan, cluster: Cluster, index: int, size: int) -> tuple[Hop, ...]:
    links = Links.of(cluster)
    hops = []
    for copy in range(plan.copies):
        workers = plan.copy(copy)
        both = workers[index] + workers[index + 1]
        bandwidth, latency = links.sendrecv_among(both)
        hops.append(Hop(float(cost.boundary_time(size, bandwidth)), latency))
    return tuple(hops)
