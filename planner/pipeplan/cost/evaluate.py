"""Computes the cost of a plan from the plan's own lists of layers and workers.

It scores the plans that the solvers return, the plans that users write, and the baselines. No solver searches with it.
docs/cost-model.md has the formulas; `pipeplan.cost.formulas` implements them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeplan.cluster_data.links import Links
from pipeplan.cost import contention, formulas
from pipeplan.cost.ddp_overlap import ddp_step_time_s
from pipeplan.cost.flush import BatchTime, batch_time
from pipeplan.cost.memory import worker_memory
from pipeplan.cost.stage_times import (
    StageTimes,
    copies_allreduce_time,
    group_allreduce_time,
    minibatches_per_copy,
    parameter_bytes_of,
    rounds_of,
    stage_times,
)
from pipeplan.cost.virtual_stages import check_devices, device_memory, virtual_batch_time
from pipeplan.cost.zero_bubble import weights_s
from pipeplan.errors import InputError
from pipeplan.plan.plan import Plan
from pipeplan.plan.schedules import ACCUMULATING, FLUSHING
from pipeplan.problem.problem import Problem
from pipeplan.util.units import show_size

WAITS_FOR_UPDATE = "gradient synchronisation of stage 1, for which the next forward pass waits"
"""The bound of a plan of one stage whose step time is that of the DDP overlap model (`ddp_step_time_s`)."""


@dataclass(frozen=True)
class StageCost:
    """The cost of one stage. Times are seconds per minibatch of one copy of the pipeline, in its slowest copy."""

    forward_s: float
    """Forward time of one minibatch on the slowest replica."""
    backward_s: float
    """Backward time of one minibatch on the slowest replica, including recomputation and the optimiser's step."""
    update_s: float
    """The part of `backward_s` that is the optimiser's step."""
    executor_s: float
    """The executor's own work, which `forward_s` and `backward_s` include: half each, or all in the only pass."""
    compute_s: float
    """Forward and backward time, divided by the replicas."""
    synchronisation_s: float
    """Gradient all-reduce, per minibatch."""
    stage_s: float
    """Compute and synchronisation, combined according to their overlap; only the compute time under a flush, where the
    batch counts synchronisation."""
    boundary_level: int
    """Level of the link to the next stage; 0 for the last stage."""
    boundary_bytes: int
    """Activation bytes sent to the next stage for one minibatch."""
    boundary_gradient_bytes: int
    """Gradient bytes received from the next stage for one minibatch."""
    boundary_s: float
    """Busy time of the busier direction of that link."""
    depth_s: float
    """Step time that the stage's depth sustains; 0 under a flush, where `Evaluation.batch` accounts for the depth."""
    parameter_bytes: int
    memory_bytes: float
    """Memory of each worker of the stage."""
    minibatch_bytes: float
    """The part of `memory_bytes` for each minibatch in flight, without weight versions."""
    capacity_bytes: float
    """Memory of the stage's worker that has the least; infinite where memory does not limit the plan."""
    weights_s: float = 0.0
    """The part of `backward_s` that gradients of the weights take in a pass of their own."""

    @property
    def layers_forward_s(self) -> float:
        """Forward time of the layers alone."""
        return self.forward_s - (self.executor_s / 2 if self.backward_s else self.executor_s)

    @property
    def layers_backward_s(self) -> float:
        """Backward time of the layers alone, including recomputation, without the optimiser's step."""
        return self.backward_s - self.update_s - (self.executor_s / 2 if self.backward_s else 0.0)


@dataclass(frozen=True)
class Evaluation:
    """The cost of a plan."""

    step_time_s: float
    """Seconds per minibatch: in the steady state that of the slowest resource, under a flush the time of a batch
    divided by its minibatches."""
    alone_s: float
    """The step time without contention, which the solvers minimise: every link is used alone, and no forward pass waits
    for an update. It is at most `step_time_s`.
    """
    bound: str
    """The resource that determines the step time, in words."""
    stages: tuple[StageCost, ...]
    copies_s: float
    """Synchronisation among copies of a whole pipeline, seconds per minibatch."""
    batch: BatchTime | None = None
    """The parts of the time from one update to the next; None for schedules without a flush."""

    @property
    def rate(self) -> float:
        """Minibatches per second."""
        return 1.0 / self.step_time_s if self.step_time_s > 0 else float("inf")

    @property
    def fits(self) -> bool:
        """Whether the plan fits into the memory of every worker."""
        return all(stage.memory_bytes <= stage.capacity_bytes for stage in self.stages)


def evaluate(plan: Plan, problem: Problem) -> Evaluation:
    """The cost of a plan. Memory is reported, not enforced.

    Raises an `InputError` where the plan is not one for this problem (`check_structure`).
    """
    check_structure(plan, problem)
    links = Links.of(problem.cluster)
    times = [stage_times(plan, problem, links, index) for index in range(len(plan.stages))]
    stages = tuple(_stage_cost(plan, problem, links, index, times) for index in range(len(plan.stages)))
    interval = plan.accumulate if _accumulates(plan) and plan.accumulate else plan.copies
    copies_s = copies_allreduce_time(plan, problem, links) / interval
    count_time = virtual_batch_time if plan.virtual else batch_time
    parts = count_time(plan, problem, links, times) if _flushes(plan) else None
    if parts is not None:
        step_time, bound = parts.total_s / interval, parts.cause(len(plan.stages))
    else:
        step_time, bound = _steady_state(plan, problem, stages, copies_s)
    alone = step_time
    if problem.options.contention:
        awaited_s = ddp_step_time_s(plan, problem, links, times[0].pass_s)
        if awaited_s > step_time * (1 + formulas.ROUNDING):
            step_time, bound = awaited_s, WAITS_FOR_UPDATE
        busiest_s, card = contention.card_loads(plan, problem, links).busiest()
        # A card or core with a single user has, up to rounding, the load of that user, whose name says more.
        step_time, bound = (busiest_s, card) if busiest_s > step_time * (1 + formulas.ROUNDING) else (step_time, bound)
    return Evaluation(step_time, alone, bound, stages, copies_s, parts)


def _steady_state(plan: Plan, problem: Problem, stages: Sequence[StageCost], copies_s: float) -> tuple[float, str]:
    """The step time of an asynchronous pipeline, and the resource that determines it."""
    bounds = []
    for number, stage in enumerate(stages, start=1):
        compute_bound = stage.compute_s >= stage.synchronisation_s
        resource = "compute" if compute_bound else "gradient synchronisation"
        bounds.append((stage.stage_s / plan.copies, f"{resource} of stage {number}"))
        bounds.append((stage.boundary_s / plan.copies, f"traffic from stage {number} to stage {number + 1}"))
        bounds.append((stage.depth_s / plan.copies, f"minibatches in flight at stage {number}"))
    inner_s, bound = max(bounds, key=lambda entry: entry[0])
    if copies_s > inner_s:
        bound = "synchronisation among the copies of the pipeline"
    return float(formulas.overlapped(inner_s, copies_s, problem.options.overlap)), bound


def check_structure(plan: Plan, problem: Problem) -> None:
    """Raise an `InputError` unless the stages partition the layers in topological order, on distinct workers."""
    stage_of: dict[str, int] = {}
    for number, stage in enumerate(plan.stages):
        for name in stage.layers:
            if stage_of.setdefault(name, number) != number:
                raise InputError(f"the plan holds layer {name!r} in two stages")
    if len(stage_of) != len(problem.layer_names) or not all(name in stage_of for name in problem.layer_names):
        differing = sorted(set(problem.layer_names) ^ stage_of.keys())[0]
        raise InputError(f"the plan and the profile differ: layer {differing!r} is in only one of them")
    for unit in problem.units:
        if len(unit.layers) > 1 and len({stage_of[name] for name in unit.layers}) > 1:
            raise InputError(f"the plan separates layers that must share a stage: {', '.join(unit.layers[:4])}")
    home = [stage_of[unit.layers[0]] for unit in problem.units]
    for producer, consumer in problem.edges:
        if home[producer] > home[consumer]:
            raise InputError(f"the plan puts {problem.units[consumer].layers[0]!r} before a layer that it reads from")
    _check_workers(plan, problem.cluster.workers)


def _check_workers(plan: Plan, total: int) -> None:
    if plan.virtual:
        check_devices(plan)
    workers = [worker for position in (plan.devices if plan.virtual else _by_stage(plan)) for worker in position]
    if len(set(workers)) != len(workers):
        raise InputError("the plan gives one worker to two stages")
    if any(worker >= total for worker in workers):
        raise InputError(f"the plan uses worker {max(workers)}, but the cluster has workers 0 to {total - 1}")
    if any(not stage.workers or stage.replicas % plan.copies for stage in plan.stages):
        raise InputError(f"every stage needs a worker in each of the {plan.copies} copies of the pipeline")


def _by_stage(plan: Plan) -> tuple[tuple[int, ...], ...]:
    return tuple(stage.workers for stage in plan.stages)


def _stage_cost(plan: Plan, problem: Problem, links: Links, index: int, times: Sequence[StageTimes]) -> StageCost:
    """The cost of one stage in its slowest copy, per minibatch of that copy."""
    stage, timing = plan.stages[index], times[index]
    busiest = rounds_of(plan, problem, index, plan.accumulate) if plan.accumulate and stage.shares else None
    replicas = timing.replicas if busiest is None or plan.accumulate is None else plan.accumulate / busiest
    compute = float(formulas.compute_time(timing.pass_s, replicas, 1.0))
    synchronisation = timing.allreduce_s / (minibatches_per_copy(plan) if _accumulates(plan) else timing.replicas)
    overlapped_s = formulas.overlapped(compute, synchronisation, problem.options.overlap)
    memory, minibatch = (device_memory if plan.virtual else worker_memory)(plan, problem, index)
    level = 0
    for copy in range(plan.copies) if index + 1 < len(plan.stages) else ():
        senders, receivers = plan.copy(copy)[index : index + 2]
        level = max(level, problem.cluster.level_between(min(senders + receivers), max(senders + receivers)))
    return StageCost(
        forward_s=timing.forward_s,
        backward_s=timing.backward_s,
        update_s=timing.update_s,
        executor_s=timing.executor_s,
        compute_s=compute,
        synchronisation_s=synchronisation,
        stage_s=compute if _flushes(plan) else float(overlapped_s),
        boundary_level=level,
        boundary_bytes=timing.sent_bytes,
        boundary_gradient_bytes=timing.returned_bytes,
        boundary_s=max(timing.send_s, timing.return_s) / timing.links,
        depth_s=_depth_step_time(plan, problem, links, index, times) if problem.training else 0.0,
        parameter_bytes=parameter_bytes_of(problem, stage),
        memory_bytes=memory,
        minibatch_bytes=minibatch,
        capacity_bytes=problem.memory_of(stage.workers),
        weights_s=weights_s(plan, problem, index),
    )


def _accumulates(plan: Plan) -> bool:
    return not plan.inference and plan.schedule in ACCUMULATING


def _flushes(plan: Plan) -> bool:
    return not plan.inference and plan.schedule in FLUSHING


def _depth_step_time(plan: Plan, problem: Problem, links: Links, index: int, times: Sequence[StageTimes]) -> float:
    """Step time of one copy that the depth of a stage sustains; 0 under a flush, where `batch` accounts for it."""
    if _flushes(plan):
        return 0.0
    timing, step_time = times[index], 0.0
    if _accumulates(plan):
        reduce_s = timing.allreduce_s + copies_allreduce_time(plan, problem, links)
        step_time = formulas.buffered_step_time(
            timing.depth, timing.replicas, reduce_s, minibatches_per_copy(plan), plan.copies
        )
    if index + 1 == len(plan.stages):
        return step_time
    following = times[index + 1]
    in_flight, groups = float(following.depth * following.replicas), []
    if not _accumulates(plan) and plan.copies > 1:
        # With copies the waits are numbers of minibatches that do not depend on the step time.
        counts = (timing.replicas, following.replicas)
        in_flight += sum(float(formulas.group_wait(0.0, 1.0, count, plan.copies)) for count in counts)
    elif not _accumulates(plan):
        groups = [group_allreduce_time(plan, problem, links, number) for number in (index, index + 1)]
    return max(
        step_time, formulas.depth_limited_step_time(timing.depth, timing.replicas, in_flight, timing.transfer_s, groups)
    )


def memory_excess_message(evaluation: Evaluation) -> str:
    """A message that names the stage that exceeds its memory the most, and by how much."""
    number, stage = max(enumerate(evaluation.stages, start=1), key=lambda entry: _excess(entry[1]))
    return f"stage {number} needs {show_size(stage.memory_bytes)}, {show_size(_excess(stage))} more than the device has"


def _excess(stage: StageCost) -> float:
    return stage.memory_bytes - stage.capacity_bytes
