"""The input of the simulator: a plan with its times, read from a plan folder and checked.

The order in which a stage computes the minibatches of one update is that of the executor's schedule.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from pipeplan.cluster_data.cluster import Cluster
from pipeplan.cluster_data.cluster_json import cluster_from_json
from pipeplan.cluster_data.links import Links
from pipeplan.cost import formulas
from pipeplan.errors import InputError
from pipeplan.plan.plan import Plan
from pipeplan.plan.schedules import ACCUMULATING, DOUBLE_BUFFERED, FLUSHING, INFERENCE
from pipeplan.simulation.fair_share import SharedCards
from pipeplan.util.files import Node, read_document
from pipeplan_launch.plan.schedule import SCHEDULES, ActionKind, Schedule, StageShape

FORMAT, VERSION = "pipeplan-plan", 1


@dataclass(frozen=True)
class StageLoad:
    """The work of one stage: seconds and bytes for one minibatch on one replica."""

    workers: tuple[int, ...]
    """Minibatch i runs on `workers[i mod len(workers)]`."""
    depth: int
    forward_s: float
    backward_s: float
    """Backward time, including the share of the optimiser's step that is charged to one minibatch."""
    sync_s: float
    """Time of one all-reduce of a group of minibatches among all replicas."""
    minibatch_bytes: int = 0
    """Memory of a replica for each minibatch in flight, without weight versions."""
    memory_bytes: int = 0
    """Memory of one worker according to the plan."""
    parameter_bytes: int = 0
    """Bytes of one version of the weights."""
    versions: int = 1
    """Number of weight versions according to the plan."""
    per_update: float = 1.0
    """Average number of minibatches that a replica computes for one update."""
    left_s: float | None = None
    """Exposed all-reduce time of plain data parallelism, whose forward pass waits for the update; otherwise None."""
    update_share: float = 0.0
    """Share of `backward_s` that is the optimiser's step."""

    @property
    def replicas(self) -> int:
        """Number of workers that hold this stage."""
        return len(self.workers)

    def exposed_s(self, overlap: float) -> float:
        """Time for which an all-reduce holds up its replicas. With it a group takes the time that the cost model
        predicts."""
        if self.left_s is not None:
            return self.left_s + (1.0 - overlap) * max(0.0, self.sync_s - self.left_s)
        work = (self.forward_s + self.backward_s) * self.per_update
        return float(formulas.overlapped(work, self.sync_s, overlap)) - max(work, self.hidden_s(overlap))

    def hidden_s(self, overlap: float) -> float:
        """Time for which an all-reduce runs beside the replicas' computing."""
        return 0.0 if self.left_s is not None else overlap * self.sync_s

    @property
    def fixed_bytes(self) -> int:
        """Memory of a worker that does not depend on the number of weight versions and minibatches in flight."""
        return self.memory_bytes - self.versions * self.parameter_bytes - self.depth * self.minibatch_bytes


@dataclass(frozen=True)
class StageBoundary:
    """The boundary between two stages of one copy of the pipeline."""

    transmit_s: float
    """Time for which the activations of a minibatch keep the link busy."""
    latency_s: float
    """Time from then until the message arrives."""
    return_s: float | None = None
    """Time for which the gradients of a minibatch keep the link busy; None where it is equal to `transmit_s`."""
    links: int = 1
    """Number of messages that each direction carries at once, each at full bandwidth."""
    bandwidth: float = math.inf
    """Bandwidth of one link, bytes/s."""

    @property
    def back_s(self) -> float:
        """Time for which the gradients of a minibatch keep the link busy."""
        return self.transmit_s if self.return_s is None else self.return_s


@dataclass(frozen=True)
class Scenario:
    """A plan with its times."""

    config: str
    """The replica counts, such as `15-1` (`Plan.config`)."""
    stages: tuple[StageLoad, ...]
    hops: tuple[tuple[StageBoundary, ...], ...]
    """For each stage but the last, its boundary to the next stage in every copy of the pipeline."""
    schedule: Schedule
    overlap: float
    """Share of an all-reduce that can hide behind computing."""
    predicted_s: float
    """The pace that the plan predicts, in seconds per minibatch."""
    copies: int = 1
    workers_per_server: int = 1
    server_starts: tuple[int, ...] = ()
    """The first worker of every server of a heterogeneous cluster; empty for a uniform cluster."""
    accumulate: int | None = None
    """Minibatches per update, for the schedules that need a number."""
    cards: SharedCards | None = None
    """The network cards that messages and all-reduces share; None where each uses its links alone."""

    @cached_property
    def shapes(self) -> tuple[StageShape, ...]:
        """The shapes of the stages, which is the input of the executor's schedules."""
        return tuple(StageShape(stage.replicas, stage.depth, self.accumulate) for stage in self.stages)

    @property
    def drains(self) -> bool:
        """Whether the pipeline drains before every update."""
        return self.schedule.name in FLUSHING

    def server_of(self, worker: int) -> int:
        """Index of the server that holds a worker."""
        if self.server_starts:
            return bisect_right(self.server_starts, worker) - 1
        return worker // self.workers_per_server

    @property
    def in_flight(self) -> int:
        """The largest number of minibatches in flight; in inference, which has no limit, the number of replicas."""
        if self.schedule.trains:
            return self.stages[0].depth * self.stages[0].replicas
        return sum(stage.replicas for stage in self.stages)


def read_scenario(folder: Path) -> Scenario:
    """The scenario of a plan folder. Raises an `InputError` that says which file or field is missing or wrong."""
    path = folder / "plan.json"
    if not path.is_file():
        why = "has no plan.json" if folder.is_dir() else "is not a folder" if folder.exists() else "does not exist"
        raise InputError(f"{folder} {why}; `pipeplan solve` writes plan folders")
    scenario = scenario_from_document(read_document(path, FORMAT, VERSION))
    for index in range(len(scenario.stages)):
        if not (folder / "stages" / f"stage-{index}.json").is_file():
            raise InputError(f"{folder}/stages/stage-{index}.json is missing: solve again with --force")
    return scenario


def scenario_from_document(root: Node) -> Scenario:
    """The scenario of a plan.json. Raises an `InputError` that names the field that is wrong."""
    plan = Plan.from_json(root["plan"])
    cluster = cluster_from_json(root["cluster"])
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
        # A drained pipeline computes nothing while it waits for its all-reduces.
        overlap=0.0 if plan.schedule in FLUSHING else overlap.number(),
        predicted_s=root["prediction"]["minibatch_s"].number(),
        copies=plan.copies,
        workers_per_server=cluster.workers_per_server,
        accumulate=plan.accumulate,
        cards=SharedCards(plan, Links.of(cluster)) if root["options"]["contention"].boolean() else None,
        server_starts=() if cluster.uniform else tuple(cluster.starts(cluster.server_level)[:-1]),
    )


def _check(node: Node, plan: Plan, cluster: Cluster) -> None:
    """Raise an `InputError` where the workers or depths of the stages are impossible."""
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


def _load(plan: Plan, index: int, node: Node, waits: bool) -> StageLoad:
    stage, update, left = plan.stages[index], node.get("update_s"), node.get("exposed_sync_s")
    update_s = update.number() if update else 0.0
    backward_s = node["backward_s"].number() + update_s
    return StageLoad(
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


def _hops(plan: Plan, cluster: Cluster, index: int, node: Node, parallel: bool) -> tuple[StageBoundary, ...]:
    links = Links.of(cluster)
    sent, returned = node["send_bytes"].integer(), node["receive_gradient_bytes"].integer()
    hops = []
    for copy in range(plan.copies):
        senders, receivers = plan.copy(copy)[index : index + 2]
        bandwidth, latency_s = links.sendrecv_among(senders + receivers)
        at_once = min(len(senders), len(receivers)) if parallel else 1
        send_s, return_s = (float(formulas.boundary_time(size, bandwidth)) for size in (sent, returned))
        hops.append(StageBoundary(send_s, latency_s, return_s, at_once, bandwidth))
    return tuple(hops)


def pass_order(plan: Plan, stage: int) -> list[tuple[str, int]]:
    """The passes of one update on the first replica of a stage, as (`F` or `B`, minibatch), for a synchronous schedule.

    Minibatches are counted from 0 among those of the replica. All replicas with the same number of minibatches run the
    same passes.
    """
    shapes = [StageShape(stage.replicas, stage.depth, plan.accumulate) for stage in plan.stages]
    # Without accumulation, a plan of one stage makes one update for a minibatch of each replica.
    minibatches = plan.accumulate or shapes[0].replicas
    stream = SCHEDULES[plan.schedule].stream(shapes, stage, 0, minibatches)
    kinds = (ActionKind.FORWARD, ActionKind.BACKWARD)
    return [(str(action.kind), action.index // shapes[stage].replicas) for action in stream if action.kind in kinds]
