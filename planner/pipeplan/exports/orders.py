"""The order of forward and backward passes in the format of torch.distributed.pipelining, compared with torch's own."""

from __future__ import annotations

from pipeplan.exports.degrees import Degrees
from pipeplan.plan import Plan
from pipeplan.schedules import GPIPE
from pipeplan.simulation.orders import passes

FILE = "schedule.csv"


def name_of(plan: Plan) -> str:
    """Name of the plan's schedule in torch."""
    return "GPipe" if plan.schedule == GPIPE else "1F1B"


def csv(plan: Plan) -> str:
    """One row for each stage, for `_PipelineScheduleRuntime._load_csv`. `0F1` is stage 0, forward, microbatch 1."""
    rows = ([f"{stage}{kind}{number}" for kind, number in passes(plan, stage)] for stage in range(len(plan.stages)))
    return "".join(",".join(row) + "\n" for row in rows)


def too_few(plan: Plan, grid: Degrees) -> bool:
    """Whether an update has too few microbatches for torch's 1F1B, which needs at least as many as stages.

    A schedule from a CSV file has no such limit.
    """
    return plan.schedule != GPIPE and grid.microbatches < grid.stages


def is_torchs(plan: Plan, grid: Degrees) -> bool:
    """Whether torch's own schedule has the order of the plan.

    Torch's 1F1B has as many microbatches in flight at a stage as there are stages from that stage on.
    """
    if too_few(plan, grid):
        return False
    return plan.schedule == GPIPE or all(
        min(stage.depth, grid.microbatches) == min(grid.stages - index, grid.microbatches)
        for index, stage in enumerate(plan.stages)
    )
