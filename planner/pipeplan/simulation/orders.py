"""The order in which a stage computes the minibatches of one update, as the executor's schedule has it."""

from __future__ import annotations

from pipeplan.plan import Plan
from pipeplan_launch.schedule import SCHEDULES, Kind, StageShape


def passes(plan: Plan, stage: int) -> list[tuple[str, int]]:
    """(`F` or `B`, minibatch) in turn, on the first replica of a stage of a plan whose updates are synchronous.

    The minibatches are counted among those of the replica, from 0: all replicas that have as many do the same.
    """
    shapes = [StageShape(one.replicas, one.depth, plan.accumulate) for one in plan.stages]
    # A stage alone makes an update for a minibatch of each replica, unless it accumulates more.
    minibatches = plan.accumulate or shapes[0].replicas
    stream = SCHEDULES[plan.schedule].stream(shapes, stage, 0, minibatches)
    kinds = (Kind.FORWARD, Kind.BACKWARD)
    return [(str(one.kind), one.index // shapes[stage].replicas) for one in stream if one.kind in kinds]
