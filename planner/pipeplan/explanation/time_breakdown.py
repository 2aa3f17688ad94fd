"""Breaks the time of a plan down into computing, communication and idle time, and sums up its traffic and memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from pipeplan.cluster_data.cluster import Cluster, Level
from pipeplan.cluster_data.links import Links
from pipeplan.cost import contention
from pipeplan.cost.evaluate import WAITS_FOR_UPDATE, Evaluation, evaluate
from pipeplan.cost.flush import BatchTime
from pipeplan.cost.sharded_data_parallel import shard_groups
from pipeplan.plan.plan import Plan
from pipeplan.plan.updates import minibatches_of_update
from pipeplan.problem.problem import Problem
from pipeplan.util import files


@dataclass(frozen=True)
class TimeBreakdown:
    """The time, traffic and memory of a plan. The three shares of the workers' time add up to 1."""

    name: str
    config: str
    step_time_s: float
    """Seconds per minibatch by the formulas. The shares refer to this time."""
    step_s: float
    """Step time as answers show it, in seconds per minibatch: simulated if the simulation differs from the formulas."""
    bound: str
    """Name of the slowest resource."""
    busy: int
    """Number of busy workers."""
    computing: float
    """Share of the time of all workers of the cluster spent in forward and backward passes of layers."""
    communication: float
    """Share lost to communication: the relative gain in step time if every link were infinitely fast."""
    idle: float
    """Remaining share: unbalanced stages, idle workers, filling and draining, recomputation."""
    boundary_bytes: float
    """Bytes sent between stages for one sample, in both directions and over all links."""
    allreduce_bytes: float
    """Bytes of gradients that all workers together send for one sample."""
    memory_bytes: float
    """Memory of the worker that needs the most, in bytes."""
    fits: bool
    not_taken: str = ""
    """If the plan is faster than the explained plan: why it was not taken, in a few words. Otherwise empty."""

    @property
    def sent_bytes(self) -> float:
        """All bytes sent for one sample."""
        return self.boundary_bytes + self.allreduce_bytes


def break_down_time(name: str, plan: Plan, problem: Problem, step_s: float | None = None) -> TimeBreakdown:
    """Break down the time of a plan, under a name for tables; `step_s` is the step time that answers show, if known."""
    score = evaluate(plan, problem)
    free_s = evaluate(plan, problem.within(without_communication(problem.cluster), problem.copies)).step_time_s
    # Step time if all workers computed without pause, divided by the step time of this plan.
    computing = problem.work_s / problem.cluster.total_speed / score.step_time_s
    boundary, allreduce = _traffic(plan, problem, score)
    samples = problem.profile.minibatch
    return TimeBreakdown(
        name=name,
        config=plan.config,
        step_time_s=score.step_time_s,
        step_s=score.step_time_s if step_s is None else step_s,
        bound=score.bound,
        busy=plan.busy,
        computing=computing,
        communication=1.0 - free_s / score.step_time_s,
        idle=max(0.0, free_s / score.step_time_s - computing),
        boundary_bytes=boundary / samples,
        allreduce_bytes=allreduce / samples,
        memory_bytes=max(stage.memory_bytes for stage in score.stages),
        fits=score.fits,
    )


def without_communication(cluster: Cluster) -> Cluster:
    """The cluster with links that are so fast that transfers take no time."""

    def instant(level: Level) -> Level:
        return replace(level, bandwidth=files.LARGEST, latency_s=0.0, allreduce_efficiency=1.0, sendrecv_efficiency=1.0)

    machines = tuple(replace(machine, inside=instant(machine.inside), card=0.0) for machine in cluster.machines)
    return replace(cluster, levels=tuple(instant(level) for level in cluster.levels), machines=machines)


def _traffic(plan: Plan, problem: Problem, score: Evaluation) -> tuple[float, float]:
    """Bytes sent for one minibatch by all workers together: between stages, and for gradients and gathered weights.

    In a ring of m members, each sends 2 (m-1)/m times the gradient bytes. All members together send 2 (m-1) times
    these bytes. A gather or a reduce-scatter sends half as much. Workers that divide the weights run three gathers or
    reduce-scatters per minibatch.
    """
    boundary = sum(stage.boundary_bytes + stage.boundary_gradient_bytes for stage in score.stages)
    if plan.inference:
        return float(boundary), 0.0
    if problem.options.sharding.divides_weights:
        groups = shard_groups(plan, problem)
        gathered = (len(groups[0]) - 1) * score.stages[0].parameter_bytes
        across = 2 * (len(groups) - 1) * score.stages[0].parameter_bytes
        return 0.0, 3 * gathered / len(groups[0]) + across / (plan.accumulate or 1)
    allreduce = 0.0
    for index, costs in enumerate(score.stages):
        # As in the executor, the replicas of all copies of a stage form one ring.
        size = 2 * (plan.stages[index].replicas - 1) * costs.parameter_bytes
        allreduce += size / minibatches_of_update(plan, index)
    return float(boundary), allreduce


class ResourceLoad(NamedTuple):
    """A resource, and the seconds for which one minibatch keeps it busy."""

    name: str
    seconds: float


def resource_loads(plan: Plan, problem: Problem, score: Evaluation) -> list[ResourceLoad]:
    """The resources of a plan, busiest first. With a flush: the parts of a batch, which add up to the step time."""
    if score.batch is not None:
        loads = batch_parts(plan, score.batch)
    else:
        loads = stage_loads(plan, score)
        if problem.options.contention:
            seconds, name = contention.card_loads(plan, problem, Links.of(problem.cluster)).busiest()
            loads.append(ResourceLoad(name, seconds))
            if score.bound == WAITS_FOR_UPDATE:
                # The all-reduce of the only stage is listed once, together with the wait for it.
                loads = [load for load in loads if load.name != "gradient synchronisation of stage 1"]
                loads.append(ResourceLoad(WAITS_FOR_UPDATE, score.step_time_s))
    # Among equally busy resources, the one that the evaluator names as the bound comes first.
    return sorted(
        (load for load in loads if load.seconds > 0), key=lambda load: (-load.seconds, load.name != score.bound)
    )


def batch_parts(plan: Plan, batch: BatchTime) -> list[ResourceLoad]:
    """The parts of a batch, in seconds per minibatch."""
    minibatches = batch.minibatches * plan.copies
    draining = ": filling and draining" if len(plan.stages) > 1 else ""
    return [
        ResourceLoad(f"{batch.bound}, microbatches 2 to {batch.minibatches}", batch.steady_s / minibatches),
        ResourceLoad(f"the first microbatch's passes{draining}", batch.work_s / minibatches),
        ResourceLoad("its transfers", batch.transfers_s / minibatches),
        ResourceLoad("gradient synchronisation that is waited for", batch.exposed_s / minibatches),
    ]


def stage_loads(plan: Plan, score: Evaluation) -> list[ResourceLoad]:
    """The loads of the stages and of the links between them, and of the links between copies of the pipeline."""
    loads = (
        [ResourceLoad("synchronisation among the copies of the pipeline", score.copies_s)] if plan.copies > 1 else []
    )
    for number, stage in enumerate(score.stages, start=1):
        compute_s, synchronisation_s = stage.compute_s, stage.synchronisation_s
        # The exposed time is charged to the longer resource, which the evaluator names as the bound.
        if compute_s >= synchronisation_s:
            compute_s = stage.stage_s
        else:
            synchronisation_s = stage.stage_s
        loads.append(ResourceLoad(f"compute of stage {number}", compute_s / plan.copies))
        loads.append(ResourceLoad(f"gradient synchronisation of stage {number}", synchronisation_s / plan.copies))
        loads.append(ResourceLoad(f"traffic from stage {number} to stage {number + 1}", stage.boundary_s / plan.copies))
        loads.append(ResourceLoad(f"microbatches in flight at stage {number}", stage.depth_s / plan.copies))
    return loads
