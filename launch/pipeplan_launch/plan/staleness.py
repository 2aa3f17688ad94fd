"""How old the gradients of a schedule are, and the options of the command line that act on it. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import lcm

from pipeplan_launch.errors import LaunchError
from pipeplan_launch.plan.launch_plan import LaunchPlan
from pipeplan_launch.plan.schedule import SCHEDULES, Schedule, StageShape

FLUSH_SCHEDULE = SCHEDULES["1f1b-flush"]
"""The schedule of the first epochs with `--flush-epochs`."""


@dataclass(frozen=True)
class StalenessOptions:
    """The options of the command line about gradients that are some updates old."""

    correction: str | None = None
    """`none` or `ef`; None for what the plan says."""
    force: bool = False
    """Whether to correct the updates of an optimiser that this harms."""
    flush_epochs: int = 0
    """Epochs at the start of training in which the pipeline drains before every update."""

    def correction_of(self, plan: LaunchPlan) -> str:
        """The correction of a run of the plan."""
        return plan.correction if self.correction is None else self.correction


AS_PLANNED = StalenessOptions()


def check_staleness_options(options: StalenessOptions, plan: LaunchPlan) -> None:
    """Raise `LaunchError` if the options ask for what the plan's schedule does not need or cannot do."""
    name = plan.schedule.name
    stale = plan.mode == "training" and any(delays(plan))
    if options.correction == "ef" and not stale:
        raise LaunchError(f"--correction ef corrects for old gradients, and this plan ({name}) has none: leave it out")
    if options.flush_epochs and (plan.mode != "training" or plan.schedule.flushes):
        raise LaunchError(f"--flush-epochs is for schedules that do not flush, and this plan's is {name}: leave it out")
    if options.force and options.correction_of(plan) != "ef":
        raise LaunchError("--force-correction goes with --correction ef")


def update_delay(schedule: Schedule, pipeline: Sequence[StageShape], stage: int) -> int:
    """τ: the updates of the stage that come between taking the weights for a gradient and applying the gradient.

    In the steady state, and where minibatches of an update differ in it, the most. It follows from the version that the
    schedule gives to each minibatch, and is 0 if the schedule flushes.
    """
    size = schedule.group_size(pipeline[stage])
    period = lcm(*(schedule.group_size(shape) for shape in pipeline))
    deepest = max(shape.replicas * (shape.depth + 1) for shape in pipeline)
    start = period * (deepest + 2)
    steady = range(start, start + period)
    return max(minibatch // size - schedule.version(pipeline, stage, minibatch) for minibatch in steady)


def delays(plan: LaunchPlan) -> tuple[int, ...]:
    """`update_delay` of every stage of a plan that trains."""
    return tuple(update_delay(plan.schedule, plan.shapes, stage) for stage in range(len(plan.pipeline)))


def staleness_text(plan: LaunchPlan) -> str | None:
    """How old the oldest gradients are, for a message; None if none is old."""
    ages = delays(plan)
    oldest = max(ages)
    if not oldest:
        return None
    return (
        f"gradients of stage {ages.index(oldest)} are {oldest} update{'s' if oldest > 1 else ''} old under "
        f"{plan.schedule.name}"
    )


def flushed_shapes(plan: LaunchPlan) -> tuple[StageShape, ...]:
    """The pipeline for epochs with a flush: an update has as many minibatches as in the plan, at every stage alike.

    Where stages differ in that, it is the least number that every stage's replicas divide.
    """
    minibatches = plan.accumulate or lcm(*(shape.replicas for shape in plan.shapes))
    return tuple(replace(shape, accumulate=minibatches) for shape in plan.shapes)
