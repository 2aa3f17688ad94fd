"""Depths of stages with which a schedule can run."""

from __future__ import annotations

from collections.abc import Sequence

from pipeplan_launch.plan.schedule import SCHEDULES, Schedule, StageShape
from pipeplan_launch.plan.virtual_stages import most_held

STASHING = SCHEDULES["1f1b-stashing"]
FORWARD = SCHEDULES["forward-only"]
TRAINING = [schedule for schedule in SCHEDULES.values() if schedule.trains and schedule.virtual is None]
VIRTUAL = [schedule for schedule in SCHEDULES.values() if schedule.virtual is not None]


def depths_for(replicas: Sequence[int], more: Sequence[int] = ()) -> list[int]:
    """The least depths that keep every stage fed, d_last = 1 and d_s = 1 + ⌈d_{s+1} r_{s+1} / r_s⌉, or as much more at
    each stage as `more` says.
    """
    depths: list[int] = []
    for here, after, extra in reversed(
        list(zip(replicas, [*replicas[1:], 0], more or [0] * len(replicas), strict=True))
    ):
        depths.insert(0, 1 + extra - (-(depths[0] if depths else 0) * after // here))
    return depths


def shapes(replicas: tuple[int, ...], extra: int = 0) -> list[StageShape]:
    """Shallow depths that do not deadlock, so much deeper at every stage."""
    return [StageShape(count, depth + extra) for count, depth in zip(replicas, depths_for(replicas), strict=True)]


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


def of_devices(schedule: Schedule, devices: int, chunks: int, replicas: int, accumulate: int) -> list[StageShape]:
    """The shapes of a pipeline whose devices run several stages each, as deep as one update needs."""
    virtual, stages = schedule.virtual, devices * chunks
    assert virtual is not None
    shapes_of: dict[int, StageShape] = {}
    for device in range(devices):
        passes = virtual.passes(device, devices, chunks, -(-accumulate // replicas))
        most = most_held(passes, chunks, splits=schedule.splits)
        for chunk, stage in enumerate(virtual.stages_of(device, devices, stages)):
            shapes_of[stage] = StageShape(replicas, most.awaiting[chunk], accumulate, most.deferred[chunk], device)
    return [shapes_of[stage] for stage in range(stages)]


def least(schedule: Schedule, replicas: tuple[int, ...]) -> int:
    """The fewest minibatches per update: two versions of 2BW must do for all that are in flight."""
    return max(shape.depth * shape.replicas for shape in shapes(replicas)) if schedule.name == "2bw" else 1
