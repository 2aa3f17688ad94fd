"""The one judge of plans: what a plan costs, worker by worker, from the plan's own lists of layers and workers.

Neither solver uses it to search; it scores what they return, what the user wrote, and the baselines.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeplan import contention, cost
from pipeplan.errors import InputError
from pipeplan.links import Links
from pipeplan.plan import Plan
from pipeplan.problem import Problem
from pipeplan.stages import crossing_bytes, group_allreduce_time, units_of
from pipeplan.units import show_size


@dataclass(frozen=True)
class StageCost:
    """One stage, in seconds per minibatch of the whole pipeline and bytes."""

    forward_s: float
    """Forward time of one minibatch on the slowest replica."""
    backward_s: float
    """Backward time of one minibatch on the slowest replica."""
    compute_s: float
    """Forward and backward, divided among the replicas."""
    synchronisation_s: float
    """Gradient all-reduce, per minibatch."""
    stage_s: float
    """Compute and synchronisation together, as far as they overlap."""
    boundary_level: int
    """Level of the link to the next stage (0 at the last)."""
    boundary_bytes: int
    """Sent to the next stage for one minibatch."""
    boundary_gradient_bytes: int
    """Received back from it."""
    boundary_s: float
    """How long the busier direction of that link is kept busy."""
    depth_s: float
    """The pace that the stage's depth sustains."""
    parameter_bytes: int
    memory_bytes: float
    """Of each worker of the stage."""
    capacity_bytes: float
    """What the worker of the stage that has least memory has."""


@dataclass(frozen=True)
class Evaluation:
    """What a plan costs."""

    pace_s: float
    """Seconds per minibatch in the steady state: the slowest resource."""
    alone_s: float
    """The same with every link alone, whatever else shares its card: what the solvers minimise."""
    bound: str
    """Which resource that is, in words."""
    stages: tuple[StageCost, ...]
    copies_s: float
    """Synchronisation among copies of a whole pipeline, per minibatch."""

    @property
    def rate(self) -> float:
        """Minibatches per second."""
        return 1.0 / self.pace_s if self.pace_s > 0 else float("inf")

    @property
    def fits(self) -> bool:
        """Whether every worker's memory suffices."""
        return all(stage.memory_bytes <= stage.capacity_bytes for stage in self.stages)


def evaluate(plan: Plan, problem: Problem) -> Evaluation:
    """Score a plan; raises `InputError` where it is not a plan for this problem. Memory is reported, not enforced."""
    check_structure(plan, problem)
    links = Links.of(problem.cluster)
    stages = tuple(_stage_cost(plan, problem, links, index) for index in range(len(plan.stages)))
    copies_s = _copies_time(plan, problem, links)
    bounds = [(copies_s, "synchronisation among the copies of the pipeline")]
    for number, stage in enumerate(stages, start=1):
        compute_bound = stage.compute_s >= stage.synchronisation_s
        what = "compute" if compute_bound else "gradient synchronisation"
        bounds.append((stage.stage_s / plan.copies, f"{what} of stage {number}"))
        bounds.append((stage.boundary_s / plan.copies, f"traffic from stage {number} to stage {number + 1}"))
        bounds.append((stage.depth_s / plan.copies, f"minibatches in flight at stage {number}"))
    inner_s, bound = max(bounds[1:], key=lambda entry: entry[0])
    pace = float(cost.overlapped(inner_s, copies_s, problem.options.overlap))
    if copies_s > inner_s:
        bound = bounds[0][1]
    alone = pace
    if problem.options.contention:
        busiest_s, card = contention.loads(plan, problem, links).busiest()
        # Equal but for rounding is what one resource on a card is: its own name says more.
        pace, bound = (busiest_s, card) if busiest_s > pace * (1 + cost.ROUNDING) else (pace, bound)
    return Evaluation(pace, alone, bound, stages, copies_s)


def check_structure(plan: Plan, problem: Problem) -> None:
    """Raise an `InputError` unless the stages partition the layers, in an order of the DAG, on distinct workers."""
    stage_of: dict[str, int] = {}
    for number, stage in enumerate(plan.stages):
        for name in stage.layers:
            if stage_of.setdefault(name, number) != number:
                raise InputError(f"the plan holds layer {name!r} in two stages")
    names = {layer.name for layer in problem.profile.layers}
    if names != stage_of.keys():
        odd = sorted(names ^ stage_of.keys())[0]
        raise InputError(f"the plan and the profile differ: layer {odd!r} is in only one of them")
    for unit in problem.units:
        if len({stage_of[name] for name in unit.layers}) > 1:
            raise InputError(f"the plan separates layers that must share a stage: {', '.join(unit.layers[:4])}")
    for producer, consumer in problem.edges:
        if stage_of[problem.units[producer].layers[0]] > stage_of[problem.units[consumer].layers[0]]:
            raise InputError(f"the plan puts {problem.units[consumer].layers[0]!r} before a layer that it reads from")
    _check_workers(plan, problem.cluster.workers)


def _check_workers(plan: Plan, total: int) -> None:
    workers = [worker for stage in plan.stages for worker in stage.workers]
    if len(set(workers)) != len(workers):
        raise InputError("the plan gives one worker to two stages")
    if any(worker >= total for worker in workers):
        raise InputError(f"the plan uses worker {max(workers)}, but the cluster has workers 0 to {total - 1}")
    if any(not stage.workers or stage.replicas % plan.copies for stage in plan.stages):
        raise InputError(f"every stage needs a worker in each of the {plan.copies} copies of the pipeline")


def _stage_cost(plan: Plan, problem: Problem, links: Links, index: int) -> StageCost:
    """The costs of one stage in its slowest copy, per minibatch of that copy."""
    stage, options = plan.stages[index], problem.options
    mine = units_of(problem, stage)
    parameters = sum(problem.units[unit].parameter_bytes for unit in mine)
    speed = problem.cluster.speed_of(stage.workers)
    forward = sum(problem.units[unit].forward_s for unit in mine) / speed
    backward = sum(problem.units[unit].backward_s for unit in mine) / speed
    replicas = stage.replicas // plan.copies
    compute = cost.compute_time(forward + backward, replicas, 1.0)
    synchronisation, boundary, depth, level = 0.0, 0.0, 0.0, 0
    hops = []
    sent, returned = crossing_bytes(problem, plan, index)
    for copy in range(plan.copies):
        workers = plan.copy(copy)
        if problem.training:
            bandwidth, latency = links.allreduce_among(workers[index])
            time = cost.synchronisation_time(replicas, parameters, bandwidth, latency)
            synchronisation = max(synchronisation, float(time))
        if index + 1 < len(plan.stages):
            both = workers[index] + workers[index + 1]
            level = max(level, problem.cluster.level_between(min(both), max(both)))
            hops.append(links.sendrecv_among(both))
    if index + 1 < len(plan.stages):
        busier = max(sent, returned)
        boundary = max(float(cost.boundary_time(busier, bandwidth)) for bandwidth, _ in hops)
        transfer = max(float(cost.transfer_time(busier, *hop)) for hop in hops)
        depth = _depth_pace(plan, problem, links, index, transfer) if problem.training else 0.0
    return StageCost(
        forward_s=forward,
        backward_s=backward,
        compute_s=compute,
        synchronisation_s=synchronisation,
        stage_s=float(cost.overlapped(compute, synchronisation, options.overlap)),
        boundary_level=level,
        boundary_bytes=sent,
        boundary_gradient_bytes=returned,
        boundary_s=boundary,
        depth_s=depth,
        parameter_bytes=parameters,
        memory_bytes=_memory(plan, problem, index, mine),
        capacity_bytes=problem.capacity_of(stage.workers),
    )


def _depth_pace(plan: Plan, problem: Problem, links: Links, index: int, transfer_s: float) -> float:
    """The pace that the depth of a stage sustains, in one copy of the pipeline."""
    replicas, following = (stage.replicas // plan.copies for stage in plan.stages[index : index + 2])
    in_flight = plan.stages[index + 1].depth * following
    if plan.copies > 1:
        # The waits are then whole minibatches, whatever the pace.
        waits = cost.group_wait(0.0, 1.0, replicas, plan.copies) + cost.group_wait(0.0, 1.0, following, plan.copies)
        return cost.depth_limited_pace(plan.stages[index].depth, replicas, in_flight + waits, transfer_s, ())
    groups = [group_allreduce_time(plan, problem, links, number) for number in (index, index + 1)]
    return cost.depth_limited_pace(plan.stages[index].depth, replicas, in_flight, transfer_s, groups)


def _memory(plan: Plan, problem: Problem, index: int, mine: list[int]) -> float:
    units = [problem.units[unit] for unit in mine]
    parameters = sum(unit.parameter_bytes for unit in units)
    received, sent = crossing_bytes(problem, plan, index - 1), crossing_bytes(problem, plan, index)
    fixed = cost.fixed_memory(
        parameters,
        sum(unit.buffer_bytes for unit in units),
        sum(received) + sum(sent),
        problem.profile.optimizer_state_ratio,
        problem.training,
    )
    if not problem.training:
        return float(fixed)
    stage = plan.stages[index]
    replication = cost.replica_memory(parameters, stage.replicas, plan.lag(index))
    saved = sum(unit.saved_bytes for unit in units)
    return float(fixed + replication + stage.depth * cost.memory_per_depth(parameters, saved, received[0], sent[0]))


def _copies_time(plan: Plan, problem: Problem, links: Links) -> float:
    """All gradients of the model, all-reduced among the copies over the slowest link between them."""
    if plan.copies == 1 or not problem.training:
        return 0.0
    everyone = [worker for stage in plan.stages for worker in stage.workers]
    size = sum(unit.parameter_bytes for unit in problem.units)
    bandwidth, latency = links.allreduce_among(everyone)
    return float(cost.synchronisation_time(plan.copies, size, bandwidth, latency))


def complain_of_memory(evaluation: Evaluation) -> str:
    """Which stage of a plan exceeds the memory, and by how much."""
    number, stage = max(enumerate(evaluation.stages, start=1), key=lambda entry: _excess(entry[1]))
    return f"stage {number} needs {show_size(stage.memory_bytes)}, {show_size(_excess(stage))} more than the device has"


def _excess(stage: StageCost) -> float:
    return stage.memory_bytes - stage.capacity_bytes
