"""The order in which a stage computes the minibatches of one update, taken from the executor's schedule."""

from __future__ import annotations

from pipeplan.plan import Plan
from pipeplan_launch.schedule import SCHEDULES, Kind, StageShape


def passes(plan: Plan, stage: int) -> list[tuple[str, int]]:
    """The passes of one update on the first replica of a stage, as (`F` or `B`, minibatch), for a synchronous schedule.

    Minibatches are counted from 0 among those of the replica. All replicas with the same number of minibatches run the
    same passes.
    """
    shapes = [StageShape(one.replicas, one.depth, plan.accumulate) for one in plan.stages]
    # Without accumulation, a plan of one stage makes one update for a minibatch of each replica.
    minibatches = plan.accumulate or shapes[0].replicas
    stream = SCHEDULES[plan.schedule].stream(shapes, stage, 0, minibatches)
    kinds = (Kind.FORWARD, Kind.BACKWARD)
    return [(str(one.kind), one.index // shapes[stage].replicas) for one in stream if one.kind in kinds]
