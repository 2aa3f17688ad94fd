"""Runs a worker's actions of a segment in order, on the engines of all its stages.

If a segment ends early (`Engine.limit`), the worker goes on with the stream of a segment that ends there. With NCCL it
also starts its transfers and all-reduces in an order that all workers have in common (`plan.communication_order`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace

from pipeplan_launch.comm.ordered_transport import OrderedTransport
from pipeplan_launch.elastic.signals import check_interrupt
from pipeplan_launch.plan.communication_order import (
    Collective,
    Computation,
    Direction,
    Transfer,
    communication_order,
    last_reader,
    ring_slots,
    stays,
    takes_part,
)
from pipeplan_launch.plan.schedule import Action, ActionKind, device_actions
from pipeplan_launch.runtime.engine import Engine, Segment
from pipeplan_launch.runtime.training import TrainingEngine, update_stages

StageAction = tuple[int, Action]
"""(stage, action)."""


def run_stages(engines: Sequence[Engine], segment: Segment) -> int:
    """Run a worker's share of a segment on the engines of its stages, in increasing order of stages.

    Returns the number of minibatches of the segment, fewer if `Engine.limit` ended it.
    """
    last, several = engines[-1], len(engines) > 1
    with ExitStack() as stack:
        for engine in engines:
            own = replace(segment, batches=segment.batches.copy()) if several else segment
            stack.enter_context(engine.running(own))
        if several:
            _run_several(engines)
        elif isinstance(last.transport, OrderedTransport):
            for action in _actions_in_one_order(last, last.transport):
                check_interrupt()
                last.perform(action)
        else:
            for _, action in worker_actions(engines):
                check_interrupt()
                last.perform(action)
    return last.count


def worker_actions(engines: Sequence[Engine]) -> Iterator[StageAction]:
    """The actions of a worker without a common order of transfers."""
    done: dict[StageAction | tuple[int, ActionKind], int] = {}
    for stage, action in _schedule_stream(engines):
        end = segment_end_before(engines[-1], action)
        if end is not None:
            for engine in engines:
                engine.count = end
            break
        yield stage, action
        done[stage, action.kind] = action.index  # actions of one kind and stage are in the order of indices
    else:
        return
    for stage, action in _schedule_stream(engines):
        if action.index > done.get((stage, action.kind), -1):
            yield stage, action


def _schedule_stream(engines: Sequence[Engine]) -> Iterator[StageAction]:
    """The schedule's actions for a segment of the present length."""
    engine = engines[-1]
    place, shapes = engine.place, engine.shapes
    if len(engines) == 1:
        stream = engine.schedule.stream(shapes, place.stage, place.replica, engine.count)
        return ((place.stage, action) for action in stream)
    device = shapes[place.stage].device
    assert device is not None
    trains = engine.schedule.trains
    return device_actions(place.plan.schedule, shapes, device, place.replica, engine.count, trains=trains)


def segment_end_before(engine: Engine, action: Action) -> int | None:
    """The index at which the segment ends, if this action would go beyond the end; otherwise None.

    A replica joins the all-reduce of a group even if it has no minibatch in it, so the group's first minibatch counts.
    """
    if action.kind is ActionKind.FORWARD:
        return engine.limit(action.index)
    if action.kind is ActionKind.REDUCE:
        return engine.limit(action.index * engine.schedule.group_size(engine.shapes[engine.place.stage]))
    return None


# A worker with several stages.


def _run_several(engines: Sequence[Engine]) -> None:
    by_stage = {engine.place.stage: engine for engine in engines}
    for (stage, action), following in _with_next(worker_actions(engines)):
        check_interrupt()
        engine = by_stage[stage]
        if action.kind is ActionKind.UPDATE:  # all stages update together, because clipping needs all gradients
            if engine is engines[-1]:
                update_stages([one for one in engines if isinstance(one, TrainingEngine)], action.index)
                engine.on_progress()
            continue
        follows = following == (stage, Action(ActionKind.WEIGHTS, action.index))
        engine.weights_follow = follows and not _is_awaited(engine)
        engine.perform(action)


def _with_next(actions: Iterator[StageAction]) -> Iterator[tuple[StageAction, StageAction | None]]:
    """Every backward pass with the action after it, and every other action with None.

    `actions` looks for the end of the segment before it yields an action. Only after a backward pass is the next action
    read in advance, because the end is then still the same.
    """
    waiting: StageAction | None = None
    for one in actions:
        if waiting is not None:
            yield waiting, one
        waiting = one if one[1].kind is ActionKind.BACKWARD else None
        if waiting is None:
            yield one, None
    if waiting is not None:
        yield waiting, None


def _is_awaited(engine: Engine) -> bool:
    """Whether another worker waits for the gradients of the stage's inputs, so that they are sent before W runs."""
    place = engine.place
    return not place.is_first and place.peer(place.stage - 1, place.replica) != place.rank


# A worker whose transfers and all-reduces are in the common order of all workers.


def _actions_in_one_order(engine: Engine, transport: OrderedTransport) -> Iterator[Action]:
    """The worker's actions. Between them its transfers and all-reduces start."""
    place, ended = (engine.place.stage, engine.place.replica), False
    for node in communication_order(engine.schedule, engine.shapes, engine.count, shared=engine.sharing_stages):
        if not takes_part(node, place):
            continue
        if not ended:
            end = None  # stays None for a collective: action R of its group came earlier and has checked the end
            if isinstance(node, Computation):
                end = segment_end_before(engine, node.action)
            elif isinstance(node, Transfer):
                end = engine.limit(node.minibatch)
            if end is not None:
                engine.count, ended = end, True
        if ended and not stays(node, engine.schedule, engine.shapes, engine.count):
            continue
        match node:
            case Computation(action=action):
                yield action
                for direction in Direction:  # messages that nobody reads any more
                    if action.kind is last_reader(direction, engine.schedule):
                        transport.release(direction, engine.segment.number(action.index))
            case Transfer():
                _start_transfer(engine, transport, node)
            case Collective():
                engine.start_collective(node.stages, node.group)


def _start_transfer(engine: Engine, transport: OrderedTransport, transfer: Transfer) -> None:
    """Hand over a send or a receive of this worker."""
    place, direction, index = engine.place, transfer.direction, transfer.minibatch
    number = engine.segment.number(index)
    if transfer.source == (place.stage, place.replica):
        transport.start_send(direction, number, place.peer(transfer.destination[0], index))
        return
    gradients = direction is Direction.GRADIENTS
    layout = engine.gradient_layout(index) if gradients else engine.layout(place.program.receives, index)
    slots = ring_slots(direction, engine.shapes[place.stage], engine.schedule)
    source = place.peer(transfer.source[0], index)
    transport.start_receive(direction, number, source, layout, index // place.replicas, slots)
