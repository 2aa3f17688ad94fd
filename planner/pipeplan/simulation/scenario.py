"""The input of the simulator: a plan with its times, read from a plan folder and checked.

A stage computes the minibatches of one update in the order of the executor's schedule.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from pipeplan.cluster_data.cluster import Cluster
from pipeplan.cluster_data.links import Links
from pipeplan.cost import formulas
from pipeplan.cost.virtual_stages import check_devices
from pipeplan.errors import InputError
from pipeplan.plan.plan import Plan
from pipeplan.plan.schedules import ACCUMULATING, DOUBLE_BUFFERED, FLUSHING, INFERENCE, update_share
from pipeplan.problem.options import Options
from pipeplan.problem.plan_file import PlanFile, read_plan_document
from pipeplan.problem.plan_file import PredictedStage as PredictedStage
from pipeplan.simulation.fair_share import SharedCards
from pipeplan.util.files import Node
from pipeplan_launch.plan.schedule import SCHEDULES, Schedule, StageShape


@dataclass(frozen=True)
class StageLoad:
    """The work of one stage: seconds and bytes for one minibatch on one replica."""

    workers: tuple[int, ...]
    """Minibatch i runs on `workers[i mod len(workers)]`."""
    depth: int
    forward_s: float
    backward_s: float
    """Backward time, including the optimiser's step unless `step_s` has it."""
    sync_s: float
    """Time of one all-reduce of a group of minibatches among all replicas."""
    minibatch_bytes: int = 0
    """Bytes that each minibatch in flight takes on a replica, without weight versions."""
    memory_bytes: int = 0
    """Memory of one worker according to the plan, in bytes."""
    parameter_bytes: int = 0
    """Bytes of one version of the weights."""
    versions: int = 1
    """Number of weight versions according to the plan."""
    per_update: float = 1.0
    """Average number of minibatches that a replica computes for one update."""
    left_s: float | None = None
    """Time of an all-reduce that remains after the backward pass in which it starts, in plain data parallelism and
    under a flush. None if the all-reduce starts after the pass."""
    update_share: float = 0.0
    """Share of `backward_s` that is the optimiser's step."""
    step_s: float = 0.0
    """Time of the optimiser's step under schedules that make one step for several minibatches; else 0. Every replica
    makes the whole step."""
    deferred: int = 0
    """Largest number of minibatches whose gradients of the weights are deferred."""
    weights_s: float = 0.0
    """The part of `backward_s` that action W takes; 0 if the backward pass is not split."""
    split_s: float = 0.0
    """The time that action W takes beyond `weights_s`, unless it directly follows B."""
    shares: tuple[int, ...] = ()
    """Minibatches of an update on each replica, if they are unequal; else empty."""
    relative: tuple[float, ...] = ()
    """With unequal shares, the time of a pass on each replica, relative to the slowest replica. The other fields have
    the times of the slowest replica."""

    @property
    def at_once(self) -> float:
        """Average number of minibatches that the replicas compute at once. Unequal replicas compute fewer minibatches
        at once than there are replicas."""
        if not self.shares:
            return self.replicas
        busiest = max(share * time for share, time in zip(self.shares, self.relative, strict=True))
        return sum(self.shares) / busiest

    def of_replica(self, replica: int) -> StageLoad:
        """The work of one replica at its own speed."""
        if not self.relative:
            return self
        ratio = self.relative[replica]
        forward_s, backward_s, step_s = (time * ratio for time in (self.forward_s, self.backward_s, self.step_s))
        return replace(self, forward_s=forward_s, backward_s=backward_s, step_s=step_s)

    @property
    def replicas(self) -> int:
        """Number of workers that hold this stage."""
        return len(self.workers)

    @property
    def busy_s(self) -> float:
        """Compute time of a replica for one minibatch, including its share of the optimiser's step, in seconds."""
        return self.forward_s + self.backward_s + self.step_s / self.per_update

    def exposed_s(self, overlap: float) -> float:
        """Exposed time of an all-reduce, in seconds. With it, a group takes the time that the cost model predicts."""
        if self.left_s is not None:
            return self.left_s + (1.0 - overlap) * max(0.0, self.sync_s - self.left_s)
        work = self.busy_s * self.per_update
        return float(formulas.overlapped(work, self.sync_s, overlap)) - max(work, self.hidden_s(overlap))

    def hidden_s(self, overlap: float) -> float:
        """Time of an all-reduce that overlaps with computing, in seconds."""
        return 0.0 if self.left_s is not None else overlap * self.sync_s

    @property
    def fixed_bytes(self) -> int:
        """Bytes of a worker that do not depend on the number of weight versions and minibatches in flight."""
        held = self.depth + (2 * self.deferred + 1 if self.deferred else 0)
        return self.memory_bytes - self.versions * self.parameter_bytes - held * self.minibatch_bytes


@dataclass(frozen=True)
class StageBoundary:
    """The boundary between two stages of one copy of the pipeline."""

    transmit_s: float
    """Time for which the activations of a minibatch keep the link busy."""
    latency_s: float
    """Time from the end of `transmit_s` until the message arrives."""
    return_s: float | None = None
    """Time for which the gradients of a minibatch keep the link busy; None if it equals `transmit_s`."""
    links: int = 1
    """Number of messages that each direction carries at once, each at full bandwidth."""
    bandwidth: float = math.inf
    """Bandwidth of one link, in bytes/s."""

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
    """For each stage except the last, its boundary to the next stage in every copy of the pipeline."""
    schedule: Schedule
    overlap: float
    """Share of an all-reduce that can hide behind computing."""
    predicted_s: float
    """The step time that the plan predicts, in seconds per minibatch."""
    copies: int = 1
    workers_per_server: int = 1
    server_starts: tuple[int, ...] = ()
    """The first worker of every server of a heterogeneous cluster; empty for a uniform cluster."""
    accumulate: int | None = None
    """Minibatches per update, for schedules that need this number; else None."""
    cards: SharedCards | None = None
    """The network cards that messages and all-reduces share; None if contention is not modelled."""

    @cached_property
    def shapes(self) -> tuple[StageShape, ...]:
        """The shapes of the stages, as the executor's schedules need them."""
        return tuple(
            StageShape(one.replicas, one.depth, self.accumulate, one.deferred, self.device_of(index), one.shares)
            for index, one in enumerate(self.stages)
        )

    def device_of(self, stage: int) -> int | None:
        """The position of a stage's workers in the pipeline if they run several stages; else None."""
        if self.schedule.virtual is None:
            return None
        return list(dict.fromkeys(one.workers for one in self.stages)).index(self.stages[stage].workers)

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
        """Largest number of minibatches in flight. Inference has no limit, and counts the replicas of all stages."""
        if self.schedule.trains:
            return self.stages[0].depth * self.stages[0].replicas
        return sum(stage.replicas for stage in self.stages)


def read_scenario(folder: Path) -> Scenario:
    """The scenario of a plan folder. Raises an `InputError` that names the missing or wrong file or field."""
    if not folder.is_dir():
        why = "is not a folder" if folder.exists() else "does not exist"
        raise InputError(f"{folder} {why}; `pipeplan solve` writes plan folders")
    scenario = scenario_from_document(read_plan_document(folder))
    for index in range(len(scenario.stages)):
        if not (folder / "stages" / f"stage-{index}.json").is_file():
            raise InputError(f"{folder}/stages/stage-{index}.json is missing: solve again with --force")
    return scenario


def scenario_from_document(root: Node) -> Scenario:
    """The scenario of a plan.json. Raises an `InputError` that names the wrong field."""
    stated = PlanFile.of(root)
    plan, options, cluster = stated.plan, stated.options, stated.to_cluster()
    _check(root["plan"], plan, cluster)
    predicted_s, busy = stated.prediction.minibatch_s, stated.profile.processes
    return assemble_scenario(plan, cluster, stated.prediction.stages, options, predicted_s, busy)


def assemble_scenario(
    plan: Plan, cluster: Cluster, figures: Sequence[PredictedStage], options: Options, predicted_s: float, busy: int
) -> Scenario:
    """The scenario of a plan with the figures of its stages.

    `predicted_s` is the plan's step time in seconds per minibatch, `busy` the number of busy workers when the profile
    was measured.
    """
    links = Links.of(cluster)
    return Scenario(
        config=plan.config,
        stages=tuple(_load(plan, cluster, index, one, options) for index, one in enumerate(figures)),
        hops=tuple(_hops(plan, links, index, one, options) for index, one in enumerate(figures[:-1])),
        schedule=SCHEDULES[INFERENCE if plan.inference else plan.schedule],
        # A drained pipeline computes nothing while it waits for its all-reduces.
        overlap=0.0 if plan.schedule in FLUSHING else options.overlap,
        predicted_s=predicted_s,
        copies=plan.copies,
        workers_per_server=cluster.workers_per_server,
        accumulate=plan.accumulate,
        cards=SharedCards(plan, links, busy) if options.contention else None,
        server_starts=() if cluster.uniform else tuple(cluster.starts(cluster.server_level)[:-1]),
    )


def _check(node: Node, plan: Plan, cluster: Cluster) -> None:
    """Raise an `InputError` if the workers or depths of the stages are impossible."""
    workers = [worker for stage in plan.stages for worker in stage.workers]
    if not plan.stages:
        node["stages"].fail("the plan has no stages: solve again with --force")
    if plan.virtual:
        try:
            check_devices(plan)
        except InputError as error:
            node["stages"].fail(str(error))
    elif len(set(workers)) != len(workers):
        node["stages"].fail("a worker is in two places of the plan")
    if any(not stage.workers or stage.replicas % plan.copies for stage in plan.stages):
        node["stages"].fail(f"every stage needs a worker in each of the {plan.copies} copies of the pipeline")
    if max(workers) >= cluster.workers:
        node["stages"].fail(f"there is no worker {max(workers)}: the cluster has workers 0 to {cluster.workers - 1}")
    most = max(stage.depth * stage.replicas for stage in plan.stages)
    if plan.schedule == DOUBLE_BUFFERED and not plan.inference and most > (plan.accumulate or 0):
        node["stages"].fail(f"{most} minibatches are in flight at a stage, more than one update of 2bw has")


def _load(plan: Plan, cluster: Cluster, index: int, figures: PredictedStage, options: Options) -> StageLoad:
    stage, own_s = plan.stages[index], figures.executor_s / (1 if plan.inference else 2)
    backward_s, step_s = figures.backward_s + (0.0 if plan.inference else own_s), figures.update_s
    accumulates = plan.schedule in ACCUMULATING and not plan.inference
    if accumulates:  # `update_s` is a share by the minibatches of the whole pipeline
        step_s /= update_share(plan.accumulate)
    else:
        backward_s += step_s
    return StageLoad(
        workers=stage.workers,
        depth=stage.depth,
        forward_s=figures.forward_s + own_s,
        backward_s=backward_s,
        sync_s=0.0 if plan.inference else figures.sync_s,
        minibatch_bytes=figures.minibatch_bytes,
        memory_bytes=figures.memory_bytes,
        parameter_bytes=figures.parameter_bytes,
        versions=stage.versions,
        left_s=_left_s(plan, figures, options),
        per_update=plan.accumulate / stage.replicas if plan.schedule in ACCUMULATING and plan.accumulate else 1.0,
        deferred=stage.deferred,
        weights_s=figures.weights_s,
        split_s=figures.split_s,
        update_share=step_s / backward_s if step_s and not accumulates else 0.0,
        step_s=step_s if accumulates else 0.0,
        shares=stage.shares,
        relative=cluster.relative_times(stage.workers) if stage.shares else (),
    )


def _left_s(plan: Plan, figures: PredictedStage, options: Options) -> float | None:
    """Seconds of an all-reduce that remain after the backward pass during which it starts; None if it starts later."""
    left_s = figures.exposed_sync_s
    if plan.schedule in FLUSHING and left_s is not None:
        return left_s + (1.0 - options.overlap) * max(0.0, figures.sync_s - left_s)
    return left_s if options.contention else None


def _hops(plan: Plan, links: Links, index: int, figures: PredictedStage, options: Options) -> tuple[StageBoundary, ...]:
    hops = []
    for copy in range(plan.copies):
        senders, receivers = plan.copy(copy)[index : index + 2]
        if senders == receivers:  # stages on the same worker pass tensors directly
            hops.append(StageBoundary(0.0, 0.0, 0.0, len(senders)))
            continue
        bandwidth, latency_s = links.sendrecv_among(senders + receivers)
        at_once = min(len(senders), len(receivers)) if options.boundary == "parallel" else 1
        sizes = (figures.send_bytes, figures.receive_gradient_bytes)
        send_s, return_s = (float(formulas.boundary_time(size, bandwidth)) for size in sizes)
        hops.append(StageBoundary(send_s, latency_s, return_s, at_once, bandwidth))
    return tuple(hops)
