"""One order of all computations, transfers and all-reduces of a segment, the same on every worker. Torch-free.

The nodes of a segment, and what each node waits for:

    Computation   an action of one replica: the action before it in the replica's stream; a forward pass waits for the
                  activations, a backward pass for the gradients, an update for the all-reduce
    Transfer      one message between two replicas. Its send and its receive are one node. It waits for the pass that
                  makes the message, and for a free slot in the receiver's ring
    Collective    the all-reduce of a group among the replicas of a stage, or of several stages that share weights.
                  It waits for action R of all of them

`communication_order` yields every node after the nodes that it waits for. The function replays the segment in ticks and
yields a node when it starts. All stages are equally fast in the replay: with r replicas, a forward pass takes r ticks,
a backward pass 2 r, a pass for the gradients of the weights r, and everything else none. Nodes of one tick are sorted:
transfers come first, then all-reduces, then computations, each kind by minibatch and stage. Ticks are whole numbers, so
all workers get the same order.

A worker that hands its own nodes to its device in this order, from one thread, cannot be part of a deadlock. This holds
even if every send waits for its receive and the device does one thing at a time (docs/gpus.md has the proof). If a
segment ends early, the nodes that are missing are left out, and the other nodes keep their order (`stays`).

**Rings.** The receiver writes the message of its k-th minibatch into slot k mod n of a ring of n (`ring_slots`). A slot
is free when both readers of its message are done. One reader is the backward pass (for activations under a schedule
with W: pass W; in inference: the forward pass). The other reader is this replica's own message of the same minibatch in
the same direction, because a stage may pass on what it received.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

from pipeplan_launch.plan.schedule import Action, ActionKind, Schedule, StageShape, group_count, replica_of

Place = tuple[int, int]
"""A worker as (stage, replica)."""
MOST_UNSETTLED = 2
"""Largest number of messages of one direction to one worker that may be under way. Before a third message, computing
waits for the oldest."""
GRADIENT_SLOTS = 2
"""Slots of a ring for gradients: one in use and one under way."""
_TICKS = {ActionKind.FORWARD: 1, ActionKind.BACKWARD: 2, ActionKind.WEIGHTS: 1}


class Direction(IntEnum):
    """The direction of a message through the pipeline."""

    ACTIVATIONS = 0
    """From a stage to the next one."""
    GRADIENTS = 1
    """From a stage to the one before."""


@dataclass(frozen=True, slots=True)
class Computation:
    """An action of one replica."""

    place: Place
    action: Action


@dataclass(frozen=True, slots=True)
class Transfer:
    """A message from one replica to another."""

    direction: Direction
    minibatch: int
    source: Place
    destination: Place


@dataclass(frozen=True, slots=True)
class Collective:
    """An all-reduce of the gradients of a group of minibatches, among all replicas of these stages."""

    stages: tuple[int, ...]
    """One stage; or the stages that share weights, whose gradients are summed over all of them."""
    group: int


Node = Computation | Transfer | Collective
_Message = tuple[Direction, int, int]
"""(direction, stage that receives or holds it, minibatch)."""


def ring_slots(direction: Direction, shape: StageShape, schedule: Schedule) -> int:
    """Number of messages that a receiver has memory for: one for each minibatch in flight, and one under way."""
    if direction is Direction.GRADIENTS:
        return GRADIENT_SLOTS
    return (schedule.held(shape) if schedule.trains else 1) + 1


def last_reader(direction: Direction, schedule: Schedule) -> ActionKind:
    """The kind of action that is the last to read a received message."""
    if not schedule.trains:
        return ActionKind.FORWARD
    return ActionKind.WEIGHTS if schedule.splits and direction is Direction.ACTIVATIONS else ActionKind.BACKWARD


def takes_part(node: Node, place: Place) -> bool:
    """Whether a worker has a part in a node."""
    match node:
        case Computation():
            return node.place == place
        case Transfer():
            return place in (node.source, node.destination)
        case Collective():
            return place[0] in node.stages


def communication_order(
    schedule: Schedule,
    pipeline: Sequence[StageShape],
    minibatches: int,
    shared: Collection[tuple[int, ...]] = (),
) -> Iterator[Node]:
    """All nodes of a segment, in the common order. They are generated on demand, so memory does not grow.

    `shared`: sets of stages that share weights, each in increasing order. The stages of a set exchange gradients before
    each update, so they must have the same groups of minibatches. Raises ValueError if no node can start before the
    streams have ended, or if the schedule does not allow the shapes.
    """
    return _Replay(schedule, pipeline, minibatches, shared).run()


def stays(node: Node, schedule: Schedule, pipeline: Sequence[StageShape], end: int) -> bool:
    """Whether a segment that ends before minibatch `end` has this node."""
    match node:
        case Transfer():
            return node.minibatch < end
        case Collective():
            return node.group < group_count(schedule.group_size(pipeline[node.stages[0]]), end)
        case Computation(place=(stage, _), action=action):
            if action.kind in (ActionKind.REDUCE, ActionKind.UPDATE):
                return action.index < group_count(schedule.group_size(pipeline[stage]), end)
            return action.index < end


@dataclass
class _Worker:
    """A replica during the replay."""

    place: Place
    todo: Iterator[Action]
    action: Action | None = None
    """The next action, None at the end of the stream."""
    free: int = 0
    """Tick at which the previous action ends."""
    is_queued: bool = False


@dataclass
class _Holding:
    """A received message during the replay: its remaining readers, and the tick at which the last reader was done."""

    readers: int
    free: int = 0
    waiting: tuple[int, Transfer] | None = None
    """The next transfer into the same slot, with the tick at which its message was made."""


class _Replay:
    def __init__(
        self,
        schedule: Schedule,
        pipeline: Sequence[StageShape],
        minibatches: int,
        shared: Collection[tuple[int, ...]],
    ) -> None:
        self._schedule, self._pipeline = schedule, pipeline
        stages = range(len(pipeline))
        self._workers = {
            (stage, replica): _Worker((stage, replica), schedule.stream(pipeline, stage, replica, minibatches))
            for stage, shape in enumerate(pipeline)
            for replica in range(shape.replicas)
        }
        self._queue: list[tuple[tuple[int, ...], Node]] = []
        """Nodes that can start, each with its sort key: first the tick, then the order within a tick."""
        self._arrived: dict[_Message, int] = {}
        """Tick at which a message arrived."""
        alone = [(stage,) for stage in stages if pipeline[stage].replicas > 1]
        together = sorted(shared) if schedule.trains else []
        self._members = {stage: [one for one in (*alone, *together) if stage in one] for stage in stages}
        """For each stage the sets of stages over which it all-reduces gradients."""
        self._joined: dict[tuple[tuple[int, ...], int], list[int]] = defaultdict(list)
        """Ticks at which replicas joined the all-reduce of a (set of stages, group)."""
        self._reduced: dict[tuple[tuple[int, ...], int], int] = {}
        """Tick of each finished all-reduce, by (set of stages, group)."""
        self._held: dict[_Message, _Holding] = {}

    def run(self) -> Iterator[Node]:
        for worker in self._workers.values():
            self._advance(worker)
        while self._queue:
            (tick, *_), node = heapq.heappop(self._queue)
            yield node
            match node:
                case Computation():
                    self._compute(node, tick)
                case Transfer():
                    self._transfer(node, tick)
                case Collective():
                    self._reduced[node.stages, node.group] = tick
                    for stage in node.stages:
                        for replica in range(self._pipeline[stage].replicas):
                            self._try(self._workers[stage, replica])
        stuck = next((worker for worker in self._workers.values() if worker.action is not None), None)
        if stuck is not None:
            stage, replica = stuck.place
            raise ValueError(
                f"schedule {self._schedule.name} has no order: stage {stage} replica {replica} waits for ever at "
                f"{stuck.action}"
            )

    def _advance(self, worker: _Worker) -> None:
        worker.action = next(worker.todo, None)
        self._try(worker)

    def _try(self, worker: _Worker) -> None:
        """Queue the worker's next action if all that it waits for has started."""
        action, (stage, replica) = worker.action, worker.place
        if action is None or worker.is_queued:
            return
        start = self._start(stage, action)
        if start is None:
            return
        worker.is_queued = True
        key = (max(worker.free, start), 2, action.index, stage, replica)
        heapq.heappush(self._queue, (key, Computation(worker.place, action)))

    def _start(self, stage: int, action: Action) -> int | None:
        """The tick from which the action can start; None if it is not known yet."""
        match action.kind:
            case ActionKind.FORWARD:
                return self._arrival(Direction.ACTIVATIONS, stage, action.index)
            case ActionKind.BACKWARD:
                return self._arrival(Direction.GRADIENTS, stage, action.index)
            case ActionKind.UPDATE:
                ticks = [self._reduced.get((stages, action.index)) for stages in self._members[stage]]
                known = [tick for tick in ticks if tick is not None]
                return max(known, default=0) if len(known) == len(ticks) else None
        return 0

    def _arrival(self, direction: Direction, stage: int, minibatch: int) -> int | None:
        return self._arrived.get((direction, stage, minibatch)) if self._receives(direction, stage) else 0

    def _receives(self, direction: Direction, stage: int) -> bool:
        return stage != (0 if direction is Direction.ACTIVATIONS else len(self._pipeline) - 1)

    def _sends(self, direction: Direction, stage: int) -> bool:
        return self._receives(Direction(1 - direction), stage)

    def _compute(self, node: Computation, tick: int) -> None:
        worker, (stage, _), action = self._workers[node.place], node.place, node.action
        end = worker.free = tick + _TICKS.get(action.kind, 0) * self._pipeline[stage].replicas
        worker.is_queued = False
        match action.kind:
            case ActionKind.FORWARD:
                self._arrived.pop((Direction.ACTIVATIONS, stage, action.index), None)
                if not self._schedule.trains:
                    self._read((Direction.ACTIVATIONS, stage, action.index), end)
                self._send(Direction.ACTIVATIONS, node.place, action.index, end)
            case ActionKind.BACKWARD:
                self._arrived.pop((Direction.GRADIENTS, stage, action.index), None)
                if not self._schedule.splits:
                    self._read((Direction.ACTIVATIONS, stage, action.index), end)
                self._read((Direction.GRADIENTS, stage, action.index), end)
                self._send(Direction.GRADIENTS, node.place, action.index, end)
            case ActionKind.WEIGHTS:
                self._read((Direction.ACTIVATIONS, stage, action.index), end)
            case ActionKind.REDUCE:
                self._join(stage, action.index, end)
            case ActionKind.UPDATE:
                for stages in self._members[stage]:  # their replicas are one update apart at most
                    self._reduced.pop((stages, action.index - 2), None)
        self._advance(worker)

    def _join(self, stage: int, group: int, tick: int) -> None:
        for stages in self._members[stage]:
            ticks = self._joined[stages, group]
            ticks.append(tick)
            if len(ticks) == sum(self._pipeline[one].replicas for one in stages):
                del self._joined[stages, group]
                key = (max(ticks), 1, group, *stages, -1)  # -1: no key is the beginning of another key
                heapq.heappush(self._queue, (key, Collective(stages, group)))

    def _send(self, direction: Direction, source: Place, minibatch: int, made: int) -> None:
        if not self._sends(direction, source[0]):
            return
        stage = source[0] + (1 if direction is Direction.ACTIVATIONS else -1)
        destination = (stage, replica_of(minibatch, self._pipeline[stage].replicas))
        transfer = Transfer(direction, minibatch, source, destination)
        earlier = self._holding((direction, stage, minibatch - self._ring(direction, stage)))
        if earlier is not None and earlier.readers:
            earlier.waiting = (made, transfer)
        else:
            self._queue_transfer(transfer, made if earlier is None else max(made, earlier.free))

    def _ring(self, direction: Direction, stage: int) -> int:
        """Number of the pipeline's minibatches from one use of a slot to the next."""
        shape = self._pipeline[stage]
        return ring_slots(direction, shape, self._schedule) * shape.replicas

    def _holding(self, message: _Message) -> _Holding | None:
        """The replay's record of a message that may still be in its slot; None if no stage sends the message."""
        direction, stage, minibatch = message
        if minibatch < 0 or not self._receives(direction, stage):
            return None
        return self._held.setdefault(message, _Holding(1 + self._sends(direction, stage)))

    def _queue_transfer(self, transfer: Transfer, tick: int) -> None:
        key = (tick, 0, transfer.minibatch, transfer.destination[0], transfer.direction)
        heapq.heappush(self._queue, (key, transfer))

    def _transfer(self, node: Transfer, tick: int) -> None:
        direction, minibatch, (stage, _) = node.direction, node.minibatch, node.destination
        self._arrived[direction, stage, minibatch] = tick
        self._held.pop(
            (direction, stage, minibatch - 2 * self._ring(direction, stage)), None
        )  # nothing waits for it any more
        self._read((direction, node.source[0], minibatch), tick)
        self._try(self._workers[node.destination])

    def _read(self, message: _Message, tick: int) -> None:
        """Note that a reader of a received message is done; the last one frees the slot."""
        held = self._holding(message)
        if held is None:
            return
        held.readers -= 1
        held.free = max(held.free, tick)
        if not held.readers and held.waiting is not None:
            made, transfer = held.waiting
            self._queue_transfer(transfer, max(made, held.free))
