"""A plan as a uniform grid of workers: the degrees of parallelism, and the microbatches of an update.

The unit that goes through the pipeline is called a minibatch in pipeplan and a microbatch in other trainers. Their
batch holds all samples of one update. In other trainers a fixed rule sets the microbatches in flight, whereas a plan
chooses the number that its links need. The order of passes is written in the format of torch.distributed.pipelining.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from pipeplan.cluster_data.links import Links
from pipeplan.cost.evaluate import evaluate
from pipeplan.cost.stage_times import stage_times
from pipeplan.errors import InputError
from pipeplan.exports.target import ExportTarget, refusal
from pipeplan.plan.plan import Plan
from pipeplan.plan.schedules import FLUSH, FLUSHING, GPIPE, INTERLEAVED, STASHING, VIRTUAL, ZERO_BUBBLE_V
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.simulation.from_plan import device_orders, pass_order
from pipeplan.util.units import show_time

FILE = "schedule.csv"


@dataclass(frozen=True)
class GridDegrees:
    """A pipeline of `stages` stages, each on `replicas` workers."""

    stages: int
    replicas: int
    microbatches: int
    """Microbatches of one update for each replica of the pipeline."""
    microbatch: int
    """Samples in a microbatch."""
    workers: tuple[tuple[int, ...], ...]
    """Workers of every stage, in the order of the replicas: the i-th workers of all stages form replica i."""

    @property
    def batch(self) -> int:
        """Number of samples of one update on all replicas together."""
        return self.microbatch * self.microbatches * self.replicas

    @property
    def count(self) -> int:
        """Number of workers of the grid."""
        return self.stages * self.replicas


def grid_degrees(target: ExportTarget, problem: Problem, plan: Plan) -> GridDegrees:
    """The degrees of a plan. Raises `InputError` unless the plan trains synchronously on a grid of workers 0, 1, 2 …

    If workers run several stages each, `GridDegrees.stages` counts positions of the pipeline.
    """
    if problem.options.sharding.divides_weights and not target.divides:
        raise refusal(target, plan, "its replicas divide the weights, which this export does not write")
    if plan.stages[0].shares:
        raise refusal(target, plan, "its workers take unequal shares of a batch, which this export does not write")
    if plan.inference:
        raise InputError(f"the plan {plan.config} is for inference, and the export to {target.title} is for training")
    # A single stage always computes with the newest weights, unless it accumulates gradients.
    if plan.schedule not in FLUSHING and (len(plan.stages) > 1 or plan.accumulate is not None):
        raise refusal(target, plan, f"its schedule {plan.schedule} is asynchronous, and keeps versions of the weights")
    if plan.virtual and not target.virtual:
        raise refusal(target, plan, "its workers run several stages each, which this export does not write yet")
    # The workers of every stage, grouped by copy of the pipeline.
    aligned = (
        plan.devices
        if plan.virtual
        else tuple(
            tuple(worker for copy in range(plan.copies) for worker in stage.workers[copy :: plan.copies])
            for stage in plan.stages
        )
    )
    counts = [len(workers) for workers in aligned]
    for number, count in enumerate(counts, start=1):
        if count != counts[0]:
            first = f"stage 1 has {counts[0]} worker{'s' * (counts[0] > 1)}"
            reason = f"{first} and stage {number} has {count}, where all must have as many"
            raise refusal(target, plan, reason)
    minibatches, replicas = plan.accumulate or plan.stages[0].replicas, plan.stages[0].replicas
    if minibatches % replicas:
        reason = f"the {minibatches} minibatches of an update are not the same number for each of {replicas} replicas"
        raise refusal(target, plan, reason)
    grid = GridDegrees(len(counts), counts[0], minibatches // replicas, problem.profile.minibatch, aligned)
    busy = sorted(worker for stage in grid.workers for worker in stage)
    if busy != list(range(grid.count)):
        idle = next(worker for worker in range(grid.count) if worker not in busy)
        raise refusal(target, plan, f"worker {idle} has nothing to do, and only the last ones can be left out")
    return grid


def refuse_irregular(target: ExportTarget, plan: Plan, grid: GridDegrees, parts: Mapping[str, Collection[str]]) -> None:
    """Raise `InputError` for a plan that a trainer with one rank for each place of a grid cannot express.

    `parts` has the layers that no cut may separate, by the name of the part.
    """
    if plan.schedule in target.unknown and grid.stages > 1:
        raise refusal(target, plan, f"it has no schedule {plan.schedule}")
    if plan.schedule == INTERLEAVED and grid.microbatches % grid.stages:
        reason = f"its interleaved schedule needs a multiple of {grid.stages} microbatches, not {grid.microbatches}"
        raise refusal(target, plan, reason)
    if [worker for workers in grid.workers for worker in workers] != list(range(grid.count)):
        raise refusal(target, plan, "the replicas of a stage must be neighbours, one stage after another")
    for number, stage in enumerate(plan.stages, start=1):
        if stage.recompute and not target.recomputes:
            raise refusal(target, plan, f"stage {number} recomputes, where all stages would have to")
        for part, names in parts.items():
            if 0 < len(set(names) & set(stage.layers)) < len(names):
                raise refusal(target, plan, f"stage {number} holds a part of {part} only")


def restrict_to_synchronous_grid(target: ExportTarget, options: Options) -> Options:
    """The options restricted to plans that `grid_degrees` accepts: a flush before every update, and a uniform grid.

    The schedule becomes 1F1B with a flush, unless the user asked for another one with a flush. Raises `InputError` if
    the minibatches per update are not given, or for any other schedule.
    """
    if options.schedule in target.unknown:
        raise InputError(f"{target.title} has no schedule {options.schedule}: leave out --schedule")
    if options.inference:
        raise InputError(f"the export to {target.title} is for training: leave out --inference")
    if options.accumulate is None:
        raise InputError(
            f"{target.title} makes one update for a number of microbatches: give the global batch in samples with "
            "--batch, as in --batch 1024"
        )
    if options.schedule not in (*FLUSHING, STASHING):  # weight stashing is the default
        raise InputError(
            f"{target.title} cannot run the asynchronous schedule {options.schedule}: leave out --schedule, or give "
            f"{FLUSH}"
        )
    if options.schedule in VIRTUAL:
        if not target.virtual:
            raise InputError(f"the export to {target.title} does not write plans of {options.schedule} yet")
        return replace(options, allow_copies=False)
    schedule = options.schedule if options.schedule in FLUSHING else FLUSH
    return replace(options, schedule=schedule, grid=True, allow_copies=False)


def refuse_divided_state(target: ExportTarget, problem: Problem, plan: Plan) -> None:
    """Raise `InputError` if the replicas of a plan divide the optimiser's state, for a target that cannot do that."""
    if problem.options.shard_optimizer:
        raise refusal(target, plan, "its replicas divide the optimiser's state, which this export does not write")


def in_flight_difference(problem: Problem, plan: Plan, grid: GridDegrees) -> str:
    """A sentence on the microbatches in flight of the usual 1F1B, and on their cost; empty if the plan has the same.

    In the usual 1F1B, the microbatches in flight at a stage equal the number of stages from this stage to the last, but
    do not exceed the microbatches of one update.
    """
    theirs = [min(grid.stages - index, grid.microbatches) for index in range(grid.stages)]
    ours = [min(stage.depth, grid.microbatches) for stage in plan.stages]
    if ours == theirs:
        return ""
    numbers = "-".join(map(str, theirs)), "-".join(map(str, ours))
    difference = f"Microbatches in flight: {numbers[0]}, where the plan counts on {numbers[1]}"
    predicted, least = evaluate(plan, problem).step_time_s, _least_s(problem, plan, grid, theirs)
    if least <= predicted or show_time(least) == show_time(predicted):
        return f"{difference}; this may be slower than the prediction of {show_time(predicted)} each."
    return f"{difference}; so each takes {show_time(least)} or more, not {show_time(predicted)} as predicted."


def _least_s(problem: Problem, plan: Plan, grid: GridDegrees, in_flight: list[int]) -> float:
    """Lower bound on the seconds per microbatch, by Little's law: latency divided by microbatches in flight.

    A microbatch is in flight at a stage while it passes forward and backward through all later stages and boundaries.
    """
    links, latency, least = Links.of(problem.cluster), 0.0, 0.0
    for index in reversed(range(grid.stages)):
        times = stage_times(plan, problem, links, index)
        latency += times.pass_s + times.round_trip_s
        least = max(least, latency / in_flight[index] / grid.replicas)
    return least


def torch_schedule_name(plan: Plan) -> str:
    """Name of the plan's schedule in torch. Zero-bubble schedules of torch have several stages on a worker."""
    if plan.virtual:
        return {INTERLEAVED: "Interleaved1F1B", ZERO_BUBBLE_V: "ZBVZeroBubble"}[plan.schedule]
    return "GPipe" if plan.schedule == GPIPE else "1F1B"


def order_csv(plan: Plan) -> str:
    """The order of passes as CSV for torch, with a row for each place. `0F1` is stage 0, forward, microbatch 1."""
    if plan.virtual:
        rows = [[f"{stage}{kind}{number}" for stage, kind, number in row] for row in device_orders(plan)]
    else:
        stages = range(len(plan.stages))
        rows = [[f"{stage}{kind}{number}" for kind, number in pass_order(plan, stage)] for stage in stages]
    return "".join(",".join(row) + "\n" for row in rows)


def places(plan: Plan) -> list[list[int]]:
    """The stages of every place in the pipeline."""
    if not plan.virtual:
        return [[index] for index in range(len(plan.stages))]
    stages = range(len(plan.stages))
    return [[index for index in stages if plan.device_of(index) == place] for place in range(len(plan.devices))]


def too_few_microbatches(plan: Plan, grid: GridDegrees) -> bool:
    """Whether an update has fewer microbatches than stages, which torch's 1F1B refuses.

    A schedule from a CSV file has no such limit.
    """
    return plan.schedule != GPIPE and not plan.virtual and grid.microbatches < grid.stages


def is_torch_order(plan: Plan, grid: GridDegrees) -> bool:
    """Whether torch's own schedule has the order of the plan.

    In torch's 1F1B, the microbatches in flight at a stage equal the number of stages from that stage on.
    """
    if plan.virtual:  # torch has the same order for ZB-V, and for interleaved 1F1B in whole rounds of minibatches
        return plan.schedule != INTERLEAVED or grid.microbatches % grid.stages == 0
    if too_few_microbatches(plan, grid) or any(stage.deferred for stage in plan.stages):
        return False
    return plan.schedule == GPIPE or all(
        min(stage.depth, grid.microbatches) == min(grid.stages - index, grid.microbatches)
        for index, stage in enumerate(plan.stages)
    )
