"""Microbatches in flight: other trainers have a fixed rule, whereas a plan chooses as many as its links need.

The order of forward and backward passes in the format of torch.distributed.pipelining, compared with torch's own.
"""

from __future__ import annotations

from pipeplan.cluster_data.links import Links
from pipeplan.cost.evaluate import evaluate
from pipeplan.cost.stage_times import stage_times
from pipeplan.exports.uniform_degrees import GridDegrees
from pipeplan.plan.plan import Plan
from pipeplan.plan.schedules import GPIPE
from pipeplan.problem.problem import Problem
from pipeplan.simulation.scenario import pass_order
from pipeplan.util.units import show_time


def in_flight_difference(problem: Problem, plan: Plan, grid: GridDegrees) -> str:
    """A sentence on the microbatches in flight of the usual 1F1B, and on their cost; empty if the plan has the same.

    The usual 1F1B has as many in flight as there are stages from this one on, and at most those of one update.
    """
    theirs = [min(grid.stages - index, grid.microbatches) for index in range(grid.stages)]
    ours = [min(stage.depth, grid.microbatches) for stage in plan.stages]
    if ours == theirs:
        return ""
    numbers = "-".join(map(str, theirs)), "-".join(map(str, ours))
    difference = f"Microbatches in flight: {numbers[0]}, where the plan counts on {numbers[1]}"
    predicted, least = evaluate(plan, problem).pace_s, _least_s(problem, plan, grid, theirs)
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


FILE = "schedule.csv"


def torch_schedule_name(plan: Plan) -> str:
    """Name of the plan's schedule in torch."""
    return "GPipe" if plan.schedule == GPIPE else "1F1B"


def order_csv(plan: Plan) -> str:
    """One row for each stage, for `_PipelineScheduleRuntime._load_csv`. `0F1` is stage 0, forward, microbatch 1."""
    rows = ([f"{stage}{kind}{number}" for kind, number in pass_order(plan, stage)] for stage in range(len(plan.stages)))
    return "".join(",".join(row) + "\n" for row in rows)


def too_few_microbatches(plan: Plan, grid: GridDegrees) -> bool:
    """Whether an update has too few microbatches for torch's 1F1B, which needs at least as many as stages.

    A schedule from a CSV file has no such limit.
    """
    return plan.schedule != GPIPE and grid.microbatches < grid.stages


def is_torch_order(plan: Plan, grid: GridDegrees) -> bool:
    """Whether torch's own schedule has the order of the plan.

    Torch's 1F1B has as many microbatches in flight at a stage as there are stages from that stage on.
    """
    if too_few_microbatches(plan, grid):
        return False
    return plan.schedule == GPIPE or all(
        min(stage.depth, grid.microbatches) == min(grid.stages - index, grid.microbatches)
        for index, stage in enumerate(plan.stages)
    )
