"""Runs the engines of a worker with several stages, in the order of the schedule (`plan.schedule.device_actions`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace

from pipeplan_launch.elastic.signals import check_interrupt
from pipeplan_launch.plan.schedule import Action, ActionKind, device_actions
from pipeplan_launch.runtime.engine import Engine, Segment
from pipeplan_launch.runtime.training import TrainingEngine, update_stages

StageAction = tuple[int, Action]
"""(stage, action)."""


def run_stages(engines: Sequence[Engine], segment: Segment) -> int:
    """Run a worker's share of a segment on the engines of all its stages, in increasing order of stages.

    Returns the number of minibatches of the segment, fewer if `Engine.limit` ended it.
    """
    if len(engines) == 1:
        return engines[0].run(segment)
    with ExitStack() as stack:
        for engine in engines:
            stack.enter_context(engine.running(replace(segment, batches=segment.batches.copy())))
        for (stage, action), following in _with_next(_actions(engines)):
            check_interrupt()
            engine = next(one for one in engines if one.place.stage == stage)
            if action.kind is ActionKind.UPDATE:
                if engine is engines[-1]:
                    _update(engines, action.index)
                continue
            follows = following == (stage, Action(ActionKind.WEIGHTS, action.index))
            engine.weights_follow = follows and not _is_awaited(engine)
            engine.perform(action)
    return engines[-1].count


def _with_next(actions: Iterator[StageAction]) -> Iterator[tuple[StageAction, StageAction | None]]:
    """Every action, with the one after it.

    The end of a segment is looked up before an action is handed out, so one action is taken ahead only of a backward
    pass, after which the same look-up finds the same end.
    """
    waiting: StageAction | None = None
    for one in actions:
        if waiting is not None:
            yield waiting, one
        waiting = None
        if one[1].kind is ActionKind.BACKWARD:
            waiting = one
        else:
            yield one, None
    if waiting is not None:
        yield waiting, None


def _is_awaited(engine: Engine) -> bool:
    """Whether another worker waits for the stage's gradients, so that these must not wait for those of the weights."""
    place = engine.place
    return not place.is_first and place.peer(place.stage - 1, place.replica) != place.rank


def _update(engines: Sequence[Engine], group: int) -> None:
    """Make the update of a group at all stages: clipping needs the gradients of all."""
    training = [engine for engine in engines if isinstance(engine, TrainingEngine)]
    update_stages(training, group)
    engines[-1].on_progress()


def _actions(engines: Sequence[Engine]) -> Iterator[StageAction]:
    """The actions of the worker. If `limit` ends the segment, the rest are those of a segment that ends there."""
    done: dict[tuple[int, ActionKind], int] = {}
    for stage, action in _all_actions(engines):
        end = engines[-1].segment_end_before(action)
        if end is not None:
            for engine in engines:
                engine.end_at(end)
            break
        yield stage, action
        done[stage, action.kind] = action.index  # actions of one kind and stage are in the order of indices
    else:
        return
    for stage, action in _all_actions(engines):
        if action.index > done.get((stage, action.kind), -1):
            yield stage, action


def _all_actions(engines: Sequence[Engine]) -> Iterator[StageAction]:
    engine = engines[-1]
    place, shapes = engine.place, engine.place.plan.shapes
    device = shapes[place.stage].device
    assert device is not None
    schedule, trains = place.plan.schedule, engine.schedule.trains
    return device_actions(schedule, shapes, device, place.replica, engine.count, trains=trains)
