"""Computes the cost of a plan from the plan's own lists of layers and workers.

This evaluator scores the plans that the solvers return, the plans that users write, and the baselines. No solver uses
this evaluator in its search. docs/cost-model.md has the formulas; `pipeplan.cost.formulas` implements them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeplan.cluster_data.links import Links
from pipeplan.cost import contention, formulas
from pipeplan.cost.ddp_overlap import ddp_step_time_s
from pipeplan.cost.depths import sustained_s, weights_s
from pipeplan.cost.flush import BatchTime, batch_time
from pipeplan.cost.stage_times import (
    StageTimes,
    copies_allreduce_time,
    group_allreduce_time,
    minibatches_per_copy,
    parameter_bytes_of,
    stage_times,
    worker_memory,
)
from pipeplan.cost.virtual_stages import check_devices, device_memory, virtual_batch_time
from pipeplan.errors import InputError
from pipeplan.plan.plan import Plan
from pipeplan.plan.schedules import ACCUMULATING, FLUSHING
from pipeplan.problem.problem import Problem
from pipeplan.util.units import show_size

WAITS_FOR_UPDATE = "gradient synchronisation of stage 1, for which the next forward pass waits"
"""The bound of a plan of one stage whose step time is that of the DDP overlap model (`ddp_step_time_s`)."""


STAGE_FIGURES = (
    *("forward_s", "backward_s", "update_s", "executor_s", "compute_s", "synchronisation_s", "stage_s"),
    *("boundary_level", "boundary_bytes", "boundary_gradient_bytes", "boundary_s", "depth_s", "parameter_bytes"),
    *("memory_bytes", "minibatch_bytes", "capacity_bytes", "weights_s"),
)
"""Names of the attributes of `StageCost` that the rows of an answer show."""


@dataclass(frozen=True)
class StageCost(StageTimes):
    """The cost of one stage: its times, its memory, and figures that depend on the plan around it."""

    boundary_level: int
    """Level of the link to the next stage; 0 for the last stage."""
    depth_s: float
    """Step time that the stage's depth sustains; 0 under a flush, where `Evaluation.batch` accounts for the depth."""
    parameter_bytes: int
    memory_bytes: float
    """Memory of each worker of the stage, in bytes."""
    minibatch_bytes: float
    """The part of `memory_bytes` that each minibatch in flight takes, without weight versions."""
    capacity_bytes: float
    """Smallest device memory among the stage's workers, in bytes; infinite where memory does not limit the plan."""
    weights_s: float = 0.0
    """The part of `backward_s` that gradients of the weights take, where they have a pass of their own; else 0."""

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
    """Seconds per minibatch: the time of the slowest resource in the steady state, or, under a flush, the time of a
    batch divided by its minibatches."""
    alone_s: float
    """The step time that the solvers minimise, at most `step_time_s`. This step time has no contention: each transfer
    has its links to itself, and no forward pass waits for an update.
    """
    bound: str
    """The resource that determines the step time, in words."""
    stages: tuple[StageCost, ...]
    copies_s: float
    """Synchronisation among copies of a whole pipeline, in seconds per minibatch."""
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

    Raises an `InputError` where the plan does not belong to this problem (`check_structure`).
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
        # A card or core with a single user has the load of that user, up to rounding. The user's name then says more.
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
    positions = plan.devices if plan.virtual else tuple(stage.workers for stage in plan.stages)
    workers = [worker for position in positions for worker in position]
    if len(set(workers)) != len(workers):
        raise InputError("the plan gives one worker to two stages")
    if any(worker >= total for worker in workers):
        raise InputError(f"the plan uses worker {max(workers)}, but the cluster has workers 0 to {total - 1}")
    if any(not stage.workers or stage.replicas % plan.copies for stage in plan.stages):
        raise InputError(f"every stage needs a worker in each of the {plan.copies} copies of the pipeline")


def _stage_cost(plan: Plan, problem: Problem, links: Links, index: int, times: Sequence[StageTimes]) -> StageCost:
    """The cost of one stage in its slowest copy, per minibatch of that copy."""
    stage = plan.stages[index]
    memory, minibatch = (device_memory if plan.virtual else worker_memory)(plan, problem, index)
    level = 0
    for copy in range(plan.copies) if index + 1 < len(plan.stages) else ():
        senders, receivers = plan.copy(copy)[index : index + 2]
        level = max(level, problem.cluster.level_between(min(senders + receivers), max(senders + receivers)))
    depth_s = 0.0
    if problem.training and not _flushes(plan):  # under a flush `batch` accounts for the depth
        minibatches = minibatches_per_copy(plan) if _accumulates(plan) else None
        depth_s = sustained_s(times, index, plan.copies, minibatches, copies_allreduce_time(plan, problem, links))
    return StageCost(
        **vars(times[index]),
        boundary_level=level,
        depth_s=depth_s,
        parameter_bytes=parameter_bytes_of(plan, problem, index),
        memory_bytes=memory,
        minibatch_bytes=minibatch,
        capacity_bytes=problem.memory_of(stage.workers),
        weights_s=weights_s(plan, problem, index),
    )


def _accumulates(plan: Plan) -> bool:
    return not plan.inference and plan.schedule in ACCUMULATING


def _flushes(plan: Plan) -> bool:
    return not plan.inference and plan.schedule in FLUSHING


def memory_excess_message(evaluation: Evaluation) -> str:
    """A message that names the stage that exceeds its memory the most, and says by how much."""
    number, stage = max(enumerate(evaluation.stages, start=1), key=lambda entry: _excess(entry[1]))
    return f"stage {number} needs {show_size(stage.memory_bytes)}, {show_size(_excess(stage))} more than the device has"


def _excess(stage: StageCost) -> float:
    return stage.memory_bytes - stage.capacity_bytes


# -- busy and idle time of replicas --


def exposed_allreduce_per_minibatch_s(plan: Plan, problem: Problem, score: Evaluation, index: int) -> float:
    """Exposed all-reduce time of one replica of stage `index`, in seconds per minibatch that it computes."""
    stage, replicas = score.stages[index], plan.stages[index].replicas
    if score.batch is not None:  # Nothing is computed while a drained pipeline waits for its all-reduces.
        allreduce = group_allreduce_time(plan, problem, Links.of(problem.cluster), index)
        return allreduce * replicas / (plan.accumulate or replicas)
    if plan.copies == 1 and not stage.synchronisation_s:
        return 0.0
    if len(plan.stages) == 1 and plan.schedule not in ACCUMULATING and not problem.cluster.shared_cores:
        # Plain data parallelism waits for nothing but its all-reduce.
        return max(0.0, replicas * score.step_time_s - stage.forward_s - stage.backward_s)
    together = float(formulas.overlapped(stage.stage_s / plan.copies, score.copies_s, problem.options.overlap))
    exposed = together * replicas - stage.forward_s - stage.backward_s
    return exposed if exposed > formulas.ROUNDING * together else 0.0


def idle_per_minibatch_s(plan: Plan, problem: Problem, score: Evaluation, index: int) -> float:
    """Idle time of one replica of stage `index`, in seconds per minibatch that it computes.

    The idle time is replicas × step time less the forward and backward passes and the exposed all-reduce.
    """
    stage = score.stages[index]
    if plan.virtual:
        return virtual_idle_s(plan, problem, score, index)
    work = stage.forward_s + stage.backward_s + exposed_allreduce_per_minibatch_s(plan, problem, score, index)
    return max(0.0, plan.stages[index].replicas * score.step_time_s - work)


def virtual_idle_s(plan: Plan, problem: Problem, score: Evaluation, index: int) -> float:
    """A stage's share of the idle time of its workers, which run several stages, in seconds."""
    own = [number for number, stage in enumerate(plan.stages) if stage.workers == plan.stages[index].workers]
    work = sum(score.stages[one].forward_s + score.stages[one].backward_s for one in own)
    work += sum(exposed_allreduce_per_minibatch_s(plan, problem, score, one) for one in own)
    return max(0.0, plan.stages[index].replicas * score.step_time_s - work) / len(own)
