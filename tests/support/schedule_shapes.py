"""Depths of stages with which a schedule can run."""

from __future__ import annotations

from pipeplan_launch.plan.schedule import (
    SCHEDULES,
    Schedule,
    StageShape,
)

STASHING = SCHEDULES["1f1b-stashing"]
FORWARD = SCHEDULES["forward-only"]
TRAINING = [schedule for schedule in SCHEDULES.values() if schedule.trains]
ACCUMULATING = [schedule for schedule in TRAINING if schedule.accumulates]


def shapes(replicas: tuple[int, ...], extra: int = 0) -> list[StageShape]:
    """Shallow depths that do not deadlock: d_last = 1, d_s = 1 + ceil(d_{s+1} r_{s+1} / r_s)."""
    result: list[StageShape] = []
    depth = 1
    for stage in reversed(range(len(replicas))):
        if stage < len(replicas) - 1:
            depth = 1 + -(-depth * replicas[stage + 1] // replicas[stage])
        result.insert(0, StageShape(replicas[stage], depth + extra))
    return result


def fitted(schedule: Schedule, replicas: tuple[int, ...], accumulate: int) -> list[StageShape]:
    """Depths that a schedule can do with: GPipe's hold a whole group, 1F1B's with a flush never more than that."""
    found = []
    for stage, shape in enumerate(shapes(replicas)):
        whole = -(-accumulate // shape.replicas)
        depth = {"gpipe": whole, "1f1b-flush": min(whole, shape.depth), "zb-h1": min(whole, shape.depth)}.get(
            schedule.name, shape.depth
        )
        deferred = stage if schedule.splits else 0
        found.append(StageShape(shape.replicas, depth, accumulate, deferred))
    return found


def least(schedule: Schedule, replicas: tuple[int, ...]) -> int:
    """The fewest minibatches per update: two versions of 2BW must do for all that are in flight."""
    return max(shape.depth * shape.replicas for shape in shapes(replicas)) if schedule.name == "2bw" else 1
