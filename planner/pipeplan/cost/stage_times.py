"""Units, traffic and times of the stages of a plan."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pipeplan.cluster_data.cluster import Cluster
from pipeplan.cluster_data.links import Links
from pipeplan.cost import formulas
from pipeplan.cost.sharded_data_parallel import shard_groups, sharded_passes
from pipeplan.errors import InputError
from pipeplan.plan.plan import Plan, Stage, data_parallel
from pipeplan.plan.schedules import FLUSH, FLUSHING, VIRTUAL, copied_share
from pipeplan.problem.between_cuts import SharedWeight, copied_bytes
from pipeplan.problem.grid_shapes import GridShape, grid_sizes
from pipeplan.problem.problem import Problem


def units_of(problem: Problem, stage: Stage) -> list[int]:
    """The indices of the units that a stage holds."""
    names = set(stage.layers)
    return [index for index, unit in enumerate(problem.units) if unit.layers[0] in names]


def parameter_bytes_of(problem: Problem, stage: Stage) -> int:
    """Bytes of all parameters that each worker of a stage holds, copies of shared weights included."""
    units = units_of(problem, stage)
    return sum(problem.units[unit].parameter_bytes for unit in units) + copied_bytes(problem.shared, set(units))


def exchange_times(problem: Problem, shared: Sequence[SharedWeight] | None = None) -> tuple[float, ...]:
    """Seconds that a stage is charged for exchanging the gradients of each shared weight, those of the problem if none
    are given."""
    shared = problem.shared if shared is None else shared
    if not shared:
        return ()
    cluster = replace(problem.whole or problem.cluster, exchange_rings=1.0)  # all stages sum these gradients whole
    rate = Links.of(cluster).allreduce_among(range(cluster.workers))
    return tuple(float(formulas.shared_weight_time(one.bytes, *rate, cluster.workers)) for one in shared)


def shared_exchange_s(problem: Problem, stage: Stage) -> float:
    """Seconds that a stage is charged for exchanging the gradients of all its shared copies of weights."""
    held = set(units_of(problem, stage)) if problem.shared else set[int]()
    return sum(
        time for weight, time in zip(problem.shared, exchange_times(problem), strict=True) if weight.split_by(held)
    )


def awaited_exchange_s(plan: Plan, problem: Problem, index: int) -> float:
    """Seconds that stage `index` waits for the exchange of its gradients of shared weights among all their stages."""
    held = [set(units_of(problem, stage)) if problem.shared else set[int]() for stage in plan.stages]
    return sum(
        time * sum(weight.split_by(units) for units in held)
        for weight, time in zip(problem.shared, exchange_times(problem), strict=True)
        if weight.split_by(held[index])
    )


def plain_data_parallel(problem: Problem, workers: int) -> Plan:
    """Plain data parallelism under the problem's schedule: the whole model on each of workers 0 … `workers` - 1."""
    options = problem.options
    return data_parallel(
        problem.layer_names,
        workers,
        inference=options.inference,
        # One stage is no virtual stage.
        schedule=FLUSH if options.schedule in VIRTUAL else options.schedule,
        accumulate=options.accumulate,
    )


def crossing_bytes(problem: Problem, plan: Plan, index: int) -> tuple[int, int]:
    """Bytes of one minibatch that cross the cut behind stage `index`, forward and backward; each tensor counts once."""
    if index < 0 or index + 1 == len(plan.stages):
        return 0, 0
    names = {name for stage in plan.stages[: index + 1] for name in stage.layers}
    behind = np.array([unit.layers[0] not in names for unit in problem.units], dtype=np.intp)
    sent, returned = problem.flow_arrays.crossing(behind, 2)[0]
    return int(sent), int(returned)


def group_allreduce_time(plan: Plan, problem: Problem, links: Links, index: int) -> float:
    """Seconds of one exchange of gradients among all replicas of a stage, which the executor makes after every group.

    Replicas that divide the weights have all-reduces across servers here; their reduce-scatters belong to the passes.
    """
    stage = plan.stages[index]
    if stage.replicas == 1 or plan.inference:
        return 0.0
    if problem.options.sharding.divides_weights:
        return sharded_passes(plan, problem, links).across_s
    size = parameter_bytes_of(problem, stage)
    bandwidth, latency = links.allreduce_among(stage.workers)
    return float(formulas.ring_allreduce_time(stage.replicas, size, bandwidth, latency))


@dataclass(frozen=True)
class StageTimes:
    """Times and sizes of one stage for one minibatch, in the slowest copy of the pipeline."""

    replicas: int
    """Replicas in one copy."""
    depth: int
    forward_s: float
    """Forward pass on the slowest replica."""
    backward_s: float
    """Backward pass on the slowest replica, including the optimiser's step and, where the stage recomputes, the second
    forward pass."""
    update_s: float
    """The part of `backward_s` that is the optimiser's step."""
    executor_s: float
    """The executor's own work; `forward_s` has a half of it, `backward_s` the other, and forward-only passes all."""
    allreduce_s: float
    """One all-reduce among the replicas of one copy; the slowest copy's."""
    links: int
    """Messages to the next stage that may be under way at once, each at the full rate of its link."""
    sent_bytes: int
    """Bytes that one minibatch sends to the next stage."""
    returned_bytes: int
    """Bytes of gradients that come back."""
    send_s: float
    """Time that a minibatch keeps one link to the next stage busy; 0 at the last stage."""
    return_s: float
    """Time that its gradient keeps one link back busy."""
    transfer_s: float
    """One-way time to the next stage or back, whichever is longer, including the latency."""
    round_trip_s: float
    """Time to the next stage and back, including both latencies."""

    @property
    def pass_s(self) -> float:
        """Forward and backward pass together."""
        return self.forward_s + self.backward_s


def stage_times(plan: Plan, problem: Problem, links: Links, index: int) -> StageTimes:
    """The times of one stage of a plan, and of the boundary behind it."""
    stage = plan.stages[index]
    units = [problem.units[unit] for unit in units_of(problem, stage)]
    speed = problem.cluster.speed_of(stage.workers)
    forward = sum(unit.forward_s for unit in units) / speed
    backward = sum(unit.backward_s for unit in units) / speed
    executor = executor_work_s(plan, problem, index) / speed
    update = sum(unit.update_s for unit in units) / speed
    if problem.options.sharding.divides_weights:
        # The passes wait for weights and reduce-scatters, and a worker's step is on its shard alone.
        passes, update = sharded_passes(plan, problem, links), update / len(shard_groups(plan, problem)[0])
        forward, backward = passes.forward_s, passes.backward_s + update
    else:
        backward = float(formulas.backward_time(forward, backward, stage.recompute))
    replicas, parallel, links_to_next = stage.replicas // plan.copies, 1, []
    if index + 1 < len(plan.stages):
        if problem.options.boundary == "parallel":
            parallel = min(replicas, plan.stages[index + 1].replicas // plan.copies)
        pairs = [plan.copy(copy)[index : index + 2] for copy in range(plan.copies)]
        links_to_next = [links.sendrecv_among(sender + receiver) for sender, receiver in pairs]
    sent, returned = crossing_bytes(problem, plan, index)
    return StageTimes(
        replicas=replicas,
        depth=stage.depth,
        forward_s=forward + executor / problem.passes,
        backward_s=backward + executor * (problem.passes - 1) / problem.passes,
        update_s=update,
        executor_s=executor,
        allreduce_s=_copy_allreduce_time(plan, problem, links, index),
        links=parallel,
        sent_bytes=sent,
        returned_bytes=returned,
        send_s=max((float(formulas.boundary_time(sent, link[0])) for link in links_to_next), default=0.0),
        return_s=max((float(formulas.boundary_time(returned, link[0])) for link in links_to_next), default=0.0),
        transfer_s=max(
            (float(formulas.transfer_time(max(sent, returned), *link)) for link in links_to_next), default=0.0
        ),
        round_trip_s=max(
            (
                float(formulas.transfer_time(sent, *link) + formulas.transfer_time(returned, *link))
                for link in links_to_next
            ),
            default=0.0,
        ),
    )


def executor_work_s(plan: Plan, problem: Problem, index: int) -> float:
    """The executor's own work at a stage for one minibatch, in seconds on a device of speed 1."""
    costs = problem.executor_costs
    if not costs:
        return 0.0
    inner, last = index > 0, index + 1 == len(plan.stages)
    crossing = sum(crossing_bytes(problem, plan, index - 1)) + sum(crossing_bytes(problem, plan, index))
    copied = 0.0
    if not last and not plan.inference:
        size = sum(problem.units[unit].parameter_bytes for unit in units_of(problem, plan.stages[index]))
        copied = size * copied_share(plan.schedule, plan.accumulate)
    steps = problem.options.update_share
    return float(formulas.executor_time(costs, problem.passes, inner + (not last), crossing, copied, steps))


def _copy_allreduce_time(plan: Plan, problem: Problem, links: Links, index: int) -> float:
    """Seconds of one all-reduce among the replicas of a stage in one copy of the pipeline; the slowest copy's."""
    replicas = plan.stages[index].replicas // plan.copies
    if plan.inference or replicas == 1:
        return 0.0
    size = parameter_bytes_of(problem, plan.stages[index])
    rates = [links.allreduce_among(plan.copy(copy)[index]) for copy in range(plan.copies)]
    return max(float(formulas.ring_allreduce_time(replicas, size, *rate)) for rate in rates)


def copies_allreduce_time(plan: Plan, problem: Problem, links: Links) -> float:
    """Seconds of one all-reduce of all the model's gradients among the copies, over the slowest link between them."""
    if plan.copies == 1 or plan.inference:
        return 0.0
    everyone = [worker for stage in plan.stages for worker in stage.workers]
    size = problem.parameter_bytes
    return float(formulas.ring_allreduce_time(plan.copies, size, *links.allreduce_among(everyone)))


def minibatches_per_copy(plan: Plan) -> int:
    """Minibatches of one update in one copy of the pipeline, for the schedules that accumulate.

    If the copies take different numbers of them, a flush schedule counts the copy that has most, because all wait for
    it, and 2BW the copy that has least, where two weight versions must suffice. Raises `InputError` for a plan without
    a number of minibatches per update.
    """
    if plan.accumulate is None:
        raise InputError(f"a plan with the schedule {plan.schedule} needs a number of minibatches per update")
    if plan.schedule in FLUSHING:
        return int(formulas.rounds(plan.accumulate, plan.copies))
    return plan.accumulate // plan.copies


def rounds_of(plan: Plan, problem: Problem, index: int, count: int) -> float:
    """Minibatches of an update of `count` on the busiest replica of a stage, as minibatches of the slowest one."""
    stage = plan.stages[index]
    if not stage.shares:
        return float(formulas.rounds(count, stage.replicas // plan.copies))
    times = problem.cluster.relative_times(stage.workers)
    return max(share * time for share, time in zip(stage.shares, times, strict=True))


def grid_shape_of(plan: Plan, cluster: Cluster) -> GridShape | None:
    """The shape of a plan that is a uniform grid, or None."""
    shared = plan.accumulate or 0
    shape = GridShape(len(plan.stages), plan.stages[0].replicas)
    flat = list(itertools.chain.from_iterable(stage.workers for stage in plan.stages))
    alike = plan.copies == 1 and all(stage.replicas == shape.replicas for stage in plan.stages)
    placed = flat == list(range(len(flat))) and len(flat) in grid_sizes(cluster)
    return shape if alike and placed and shared % shape.replicas == 0 else None
