"""The order of forward and backward passes, as torch.distributed.pipelining reads it, and whether that is its own."""

from __future__ import annotations

from pipeplan.exports.degrees import Degrees
from pipeplan.plan import GPIPE, Plan
from pipeplan.simulation.orders import passes

FILE = "schedule.csv"


def name_of(plan: Plan) -> str:
    """The schedule's name in torch."""
    return "GPipe" if plan.schedule == GPIPE else "1F1B"


def csv(plan: Plan) -> str:
    """One row for each stage, as `_PipelineScheduleRuntime._load_csv` reads them: `0F1` is forward of microbatch 1."""
    rows = ([f"{stage}{kind}{number}" for kind, number in passes(plan, stage)] for stage in range(len(plan.stages)))
    return "".join(",".join(row) + "\n" for row in rows)


def too_few(plan: Plan, grid: Degrees) -> bool:
    """Whether torch's own schedule takes no such update: its 1F1B refuses fewer microbatches than stages.

    What loads a CSV file has no such limit.
    """
    return plan.schedule != GPIPE and grid.microbatches < grid.stages


def is_torchs(plan: Plan, grid: Degrees) -> bool:
    """Whether torch's schedule has the same order: its 1F1B has as many in flight as there are stages from here on."""
    if too_few(plan, grid):
        return False
    return plan.schedule == GPIPE or all(
        min(stage.depth, grid.microbatches) == min(grid.stages - index, grid.microbatches)
        for index, stage in enumerate(plan.stages)
    )
