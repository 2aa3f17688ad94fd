"""Figures of the stages of a plan, and the times and memory of the stages on their workers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pipeplan.cluster_data.cluster import Cluster
from pipeplan.cluster_data.links import Links
from pipeplan.cost import formulas
from pipeplan.cost.sharded_data_parallel import shard_groups, sharded_memory, sharded_passes
from pipeplan.cost.stage_table import SUMS, StageTable, exchange_times
from pipeplan.errors import InputError
from pipeplan.plan.plan import Plan, Stage, data_parallel
from pipeplan.plan.schedules import ACCUMULATING, FLUSH, FLUSHING, VIRTUAL, copied_share
from pipeplan.problem.between_cuts import copied_bytes
from pipeplan.problem.grid_shapes import GridShape, grid_sizes
from pipeplan.problem.problem import Problem

MOST_REMEMBERED = 20_000
"""Largest number of lists of layers whose totals a problem remembers."""


@dataclass(frozen=True)
class LayerTotals:
    """The units of a list of layers, and sums over them. Searches ask for the same lists again and again."""

    units: tuple[int, ...]
    """Indices of the units."""
    bits: int
    """Indices of the units as a bit set."""
    sums: dict[str, float]
    """The sum of every figure of `SUMS`."""
    backward_s: float
    weights_backward_s: float
    """Backward time of the layers that have parameters."""
    workspace: int

    @staticmethod
    def of(problem: Problem, layers: tuple[str, ...]) -> LayerTotals:
        """The totals of a list of layers. A problem remembers them."""
        known: dict[tuple[str, ...], LayerTotals] = problem.remembered
        if layers not in known:
            if len(known) >= MOST_REMEMBERED:
                known.clear()
            names = set(layers)
            units = tuple(index for index, unit in enumerate(problem.units) if unit.layers[0] in names)
            held = [problem.units[unit] for unit in units]
            weighted = (one for one in problem.profile.layers if one.name in names and one.parameter_bytes)
            known[layers] = LayerTotals(
                units,
                sum(1 << unit for unit in units),
                {name: sum(map(figure, held)) for name, figure in SUMS.items()},
                sum(unit.backward_s for unit in held),
                sum(layer.backward_s for layer in weighted),
                max((unit.workspace_bytes for unit in held), default=0),
            )
        return known[layers]


@dataclass(frozen=True, eq=False)
class PlanStage(StageTable):
    """The figures of one stage of a plan, as numbers."""

    problem: Problem
    plan: Plan
    index: int

    @cached_property
    def stage(self) -> Stage:
        """The stage itself."""
        return self.plan.stages[self.index]

    @cached_property
    def totals(self) -> LayerTotals:
        """The stage's layers."""
        return LayerTotals.of(self.problem, self.stage.layers)

    @cached_property
    def recompute(self) -> bool:
        return self.stage.recompute

    def inside(self, name: str) -> float:
        return self.totals.sums[name]

    @cached_property
    def is_first(self) -> bool:
        return self.index == 0

    @cached_property
    def is_last(self) -> bool:
        return self.index + 1 == len(self.plan.stages)

    @cached_property
    def before(self) -> tuple[int, int]:
        """Bytes of one minibatch that cross the boundary to the stage before, forward and backward."""
        return crossing_bytes(self.problem, self.plan, self.index - 1)

    @cached_property
    def behind(self) -> tuple[int, int]:
        """Bytes of one minibatch that cross the boundary to the next stage, forward and backward."""
        return crossing_bytes(self.problem, self.plan, self.index)

    @cached_property
    def received(self) -> int:
        return self.before[0]

    @cached_property
    def sent(self) -> int:
        return self.behind[0]

    @cached_property
    def around(self) -> int:
        return sum(self.before) + sum(self.behind)

    @cached_property
    def copied(self) -> int:
        return copied_bytes(self.problem.shared, set(self.totals.units)) if self.problem.shared else 0

    @property
    def copied_share(self) -> float:
        return 0.0 if self.plan.inference else copied_share(self.plan.schedule, self.plan.accumulate)

    @cached_property
    def workspace(self) -> int:
        return self.totals.workspace

    @cached_property
    def exchange_s(self) -> float:
        return sum(
            time * weight.split_by(self.totals.units)
            for weight, time in zip(self.problem.shared, exchange_times(self.problem), strict=True)
        )


def parameter_bytes_of(plan: Plan, problem: Problem, index: int) -> int:
    """Bytes of all parameters that each worker of a stage holds, copies of shared weights included."""
    return int(PlanStage(problem, plan, index).parameters)


def awaited_exchange_s(plan: Plan, problem: Problem, index: int) -> float:
    """Seconds that stage `index` waits for the exchange of its gradients of shared weights among all their stages."""
    held = [set(LayerTotals.of(problem, stage.layers).units) if problem.shared else set[int]() for stage in plan.stages]
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
    before = 0
    for stage in plan.stages[: index + 1]:
        before |= LayerTotals.of(problem, stage.layers).bits
    behind = np.array([not before >> unit & 1 for unit in range(len(problem.units))], dtype=np.intp)
    sent, returned = problem.flow_arrays.crossing(behind, 2)[0]
    return int(sent), int(returned)


def group_allreduce_time(plan: Plan, problem: Problem, links: Links, index: int) -> float:
    """Seconds of one exchange of gradients among all replicas of a stage. The executor runs it after every group.

    If replicas divide the weights, the exchange consists of the all-reduces across servers. The reduce-scatters belong
    to the passes.
    """
    stage = plan.stages[index]
    if stage.replicas == 1 or plan.inference:
        return 0.0
    if problem.options.sharding.divides_weights:
        return sharded_passes(plan, problem, links).across_s
    size = parameter_bytes_of(plan, problem, index)
    bandwidth, latency = links.allreduce_among(stage.workers)
    return float(formulas.ring_allreduce_time(stage.replicas, size, bandwidth, latency))


@dataclass(frozen=True)
class StageTimes:
    """Times and sizes of one stage on its workers for one minibatch, in the slowest copy of the pipeline."""

    replicas: int
    """Replicas of the stage in one copy of the pipeline."""
    sharing: float
    """Number of replicas with the slowest replica's speed that would be equally fast; `replicas` unless shares are
    unequal."""
    depth: int
    forward_s: float
    """Time of the forward pass on the slowest replica."""
    backward_s: float
    """Time of the backward pass on the slowest replica, including the optimiser's step and, where the stage recomputes,
    the second forward pass."""
    update_s: float
    """The part of `backward_s` that is the optimiser's step."""
    executor_s: float
    """The executor's own work per minibatch. In training, `forward_s` and `backward_s` each include half of this time;
    in inference, `forward_s` includes all of it."""
    allreduce_s: float
    """Time of one all-reduce among the replicas of one copy of the pipeline, in the slowest copy."""
    synchronisation_s: float
    """Time of all-reduces per minibatch."""
    stage_s: float
    """Compute and synchronisation per minibatch, combined according to their overlap. Under a flush the value is only
    the compute time, because `BatchTime` counts synchronisation."""
    links: int
    """Number of messages to the next stage that may be sent at the same time, each at the full rate of its link."""
    boundary_bytes: int
    """Bytes that one minibatch sends to the next stage."""
    boundary_gradient_bytes: int
    """Bytes of gradients of one minibatch that come back from the next stage."""
    send_s: float
    """Time that a minibatch keeps one link to the next stage busy; 0 at the last stage."""
    return_s: float
    """Time that a minibatch's gradient keeps one link back from the next stage busy."""
    transfer_s: float
    """One-way time to the next stage or back, whichever is longer, including the latency."""
    round_trip_s: float
    """Time to the next stage and back, including both latencies."""

    @staticmethod
    def of(
        replicas: int,
        sharing: float,
        depth: int,
        passes: tuple[float, float, float, float],
        synchronisation: tuple[float, float],
        overlap: float | None,
        links: int,
        crossing: tuple[float, float],
        rates: Sequence[tuple[float, float]],
    ) -> StageTimes:
        """The times of a stage on its workers.

        `passes` are the forward and backward pass, the optimiser's step and the executor's work, in seconds on the
        slowest worker. `synchronisation` is (seconds of one all-reduce, minibatches for each all-reduce). `overlap` is
        None under a flush. `crossing` is (bytes forward, bytes backward). `rates` has bandwidth and latency to the next
        stage for every copy, and is empty for the last stage.
        """
        sent, returned = crossing
        there = [float(formulas.transfer_time(sent, *rate)) for rate in rates]
        back = [float(formulas.transfer_time(returned, *rate)) for rate in rates]
        compute_s = float(formulas.compute_time(passes[0] + passes[1], sharing, 1.0))
        reduce_s = synchronisation[0] / synchronisation[1]
        return StageTimes(
            replicas,
            sharing,
            depth,
            *passes,
            allreduce_s=synchronisation[0],
            synchronisation_s=reduce_s,
            stage_s=compute_s if overlap is None else float(formulas.overlapped(compute_s, reduce_s, overlap)),
            links=links,
            boundary_bytes=int(sent),
            boundary_gradient_bytes=int(returned),
            send_s=max((float(formulas.boundary_time(sent, rate[0])) for rate in rates), default=0.0),
            return_s=max((float(formulas.boundary_time(returned, rate[0])) for rate in rates), default=0.0),
            transfer_s=max([0.0, *there, *back]),
            round_trip_s=max(map(sum, zip(there, back, strict=True)), default=0.0),
        )

    @property
    def pass_s(self) -> float:
        """Time of forward and backward pass together."""
        return self.forward_s + self.backward_s

    @property
    def compute_s(self) -> float:
        """Forward and backward time per minibatch of one copy."""
        return float(formulas.compute_time(self.pass_s, self.sharing, 1.0))

    @property
    def boundary_s(self) -> float:
        """Busy time of the busier direction of the links to the next stage, per minibatch."""
        return max(self.send_s, self.return_s) / self.links


def stage_times(plan: Plan, problem: Problem, links: Links, index: int) -> StageTimes:
    """The times of one stage of a plan, and of the boundary behind it."""
    figures, stage = PlanStage(problem, plan, index), plan.stages[index]
    speed = problem.cluster.speed_of(stage.workers)
    forward, update, executor = (
        float(one) / speed for one in (figures.inside("forward_s"), figures.update_s, figures.executor_s)
    )
    backward = figures.totals.backward_s / speed
    if problem.options.sharding.divides_weights:
        # The passes wait for weights and reduce-scatters, and a worker's optimiser step updates only its shard.
        passes, update = sharded_passes(plan, problem, links), update / len(shard_groups(plan, problem)[0])
        forward, backward = passes.forward_s, passes.backward_s + update
    else:
        backward = float(formulas.backward_time(forward, backward, stage.recompute))
    forward, backward = forward + executor / problem.passes, backward + executor * (problem.passes - 1) / problem.passes
    replicas, parallel, rates = stage.replicas // plan.copies, 1, []
    if not figures.is_last:
        if problem.options.boundary == "parallel":
            parallel = min(replicas, plan.stages[index + 1].replicas // plan.copies)
        pairs = [plan.copy(copy)[index : index + 2] for copy in range(plan.copies)]
        rates = [links.sendrecv_among(sender + receiver) for sender, receiver in pairs]
    interval = minibatches_per_copy(plan) if plan.schedule in ACCUMULATING and not plan.inference else replicas
    allreduce_s = 0.0
    if replicas > 1 and not plan.inference:
        rings = [links.allreduce_among(plan.copy(copy)[index]) for copy in range(plan.copies)]
        size = figures.parameters
        allreduce_s = max(float(formulas.ring_allreduce_time(replicas, size, *ring)) for ring in rings)
    sharing = float(replicas)
    if stage.shares and plan.accumulate:
        sharing = plan.accumulate / rounds_of(plan, problem, index, plan.accumulate)
    return StageTimes.of(
        replicas,
        sharing,
        stage.depth,
        (forward, backward, update, executor),
        (allreduce_s, interval),
        None if plan.schedule in FLUSHING and not plan.inference else problem.options.overlap,
        parallel,
        figures.behind,
        rates,
    )


def worker_memory(plan: Plan, problem: Problem, index: int) -> tuple[float, float]:
    """Memory of one worker of a stage, and the part of it that each minibatch in flight needs, in bytes.

    The part includes neither weight versions nor the allocator's overhead.
    """
    stage_bytes, per_minibatch = stage_memory(plan, problem, index)
    return problem.cluster.executor.memory_with(stage_bytes + PlanStage(problem, plan, index).workspace), per_minibatch


def stage_memory(plan: Plan, problem: Problem, index: int, held: int | None = None) -> tuple[float, float]:
    """The figures of `worker_memory` without the workspace, the worker process itself and the allocator's overhead.

    `held` is the number of minibatches whose activations are counted; None stands for the most that the stage holds.
    """
    if problem.options.sharding.divides_weights:
        return sharded_memory(plan, problem)
    figures, stage = PlanStage(problem, plan, index), plan.stages[index]
    memory, each = float(figures.kept_bytes), float(figures.each_bytes)
    if problem.training:
        memory += float(plan.versions(index) * figures.version_bytes + figures.replica_bytes(stage.replicas))
        deferred = float(formulas.deferred_memory(stage.deferred, each)) if held is None else 0.0
        memory += (stage.depth if held is None else held) * each + deferred
    return memory, each


def copies_allreduce_time(plan: Plan, problem: Problem, links: Links) -> float:
    """Seconds of one all-reduce of all the model's gradients among the copies of the pipeline, over the slowest link
    between copies."""
    if plan.copies == 1 or plan.inference:
        return 0.0
    everyone = [worker for stage in plan.stages for worker in stage.workers]
    size = problem.parameter_bytes
    return float(formulas.ring_allreduce_time(plan.copies, size, *links.allreduce_among(everyone)))


def minibatches_per_copy(plan: Plan) -> int:
    """Minibatches of one update in one copy of the pipeline, for the schedules that accumulate.

    Copies may take different numbers of minibatches. A flush schedule then counts the largest number, because all
    copies wait for that copy. 2BW counts the smallest number, because two weight versions must suffice in that copy.
    Raises `InputError` for a plan without a number of minibatches per update.
    """
    if plan.accumulate is None:
        raise InputError(f"a plan with the schedule {plan.schedule} needs a number of minibatches per update")
    if plan.schedule in FLUSHING:
        return int(formulas.rounds(plan.accumulate, plan.copies))
    return plan.accumulate // plan.copies


def rounds_of(plan: Plan, problem: Problem, index: int, count: int) -> float:
    """Minibatches on the busiest replica of a stage in an update of `count` minibatches, counted in minibatches of the
    slowest replica."""
    stage = plan.stages[index]
    if not stage.shares:
        return float(formulas.rounds(count, stage.replicas // plan.copies))
    times = problem.cluster.relative_times(stage.workers)
    return max(share * time for share, time in zip(stage.shares, times, strict=True))


def grid_shape_of(plan: Plan, cluster: Cluster) -> GridShape | None:
    """The shape of a plan that is a uniform grid; None for other plans."""
    shared = plan.accumulate or 0
    shape = GridShape(len(plan.stages), plan.stages[0].replicas)
    flat = list(itertools.chain.from_iterable(stage.workers for stage in plan.stages))
    alike = plan.copies == 1 and all(stage.replicas == shape.replicas for stage in plan.stages)
    placed = flat == list(range(len(flat))) and len(flat) in grid_sizes(cluster)
    return shape if alike and placed and shared % shape.replicas == 0 else None
