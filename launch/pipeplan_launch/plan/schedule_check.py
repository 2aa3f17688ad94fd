"""Replays a schedule without running it; checks that every worker finishes and runs exactly its own minibatches.

Sends never block, receives do, and an update waits until every replica of its stage has started the group's all-reduce.
The executor has the same rules, so a schedule that passes here does not deadlock in the executor. Torch-free.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pipeplan_launch.plan.schedule import (
    Action,
    ActionKind,
    Schedule,
    StageShape,
    device_actions,
    group_count,
    own_minibatches,
    replica_of,
)

ReplayedWorker = tuple[int, int]
"""A worker as (stage, replica)."""
_Fact = tuple[ActionKind, int, int]
"""(kind, stage, index) of an action. A `Counter` of them says how many replicas have run it."""


class ReplayError(ValueError):
    """The schedule would deadlock, mix up minibatches, or exceed a depth. The message is one line that says where."""


@dataclass
class _Replica:
    """A replica of a stage during the replay: its remaining actions and what it has done so far."""

    stage: int
    replica: int
    in_flight: list[int] = field(default_factory=list)
    """Minibatches whose activations are held."""
    awaiting: list[int] = field(default_factory=list)
    """Minibatches in flight whose backward has not run."""
    peak: int = 0
    updates: int = 0

    def __str__(self) -> str:
        return f"stage {self.stage} replica {self.replica}"


def replay_schedule(schedule: Schedule, pipeline: Sequence[StageShape], minibatches: int) -> dict[ReplayedWorker, int]:
    """Run every stream to its end; returns for each worker the most minibatches that it had in flight.

    Raises ReplayError on a deadlock, a minibatch that belongs to another replica, a minibatch that runs twice or never,
    a backward without its forward, updates out of order, weights that do not exist yet, or more minibatches in flight
    than the stage's depth. Raises ValueError if the schedule does not allow the shapes.
    """
    done: Counter[_Fact] = Counter()
    replicas = {
        (stage, replica): _Replica(stage, replica)
        for stage, shape in enumerate(pipeline)
        for replica in range(shape.replicas)
    }
    streams = _worker_streams(schedule, pipeline, minibatches, replicas)
    for worker in replicas.values():
        own = [action for stream in streams for at, action in stream if at is worker]
        _check_stream(worker, own, schedule, pipeline[worker.stage], minibatches)
    progress = True
    while progress:
        progress = False
        for todo in streams:
            while todo and _ready(*todo[0], done, pipeline):
                _perform(*todo.popleft(), done, schedule, pipeline)
                progress = True
    stuck = next((todo for todo in streams if todo), None)
    if stuck is not None:
        raise ReplayError(
            f"schedule {schedule.name} deadlocks with replicas and depths "
            f"{[(s.replicas, s.depth) for s in pipeline]}: {stuck[0][0]} waits for ever at {stuck[0][1]}"
        )
    return {place: worker.peak for place, worker in replicas.items()}


def _worker_streams(
    schedule: Schedule,
    pipeline: Sequence[StageShape],
    minibatches: int,
    replicas: Mapping[ReplayedWorker, _Replica],
) -> list[deque[tuple[_Replica, Action]]]:
    """The actions of every worker in order, each with the replica of the stage that runs it."""
    if schedule.virtual is None:
        return [
            deque((worker, action) for action in schedule.stream(pipeline, *place, minibatches))
            for place, worker in replicas.items()
        ]
    seats = sorted({(shape.device or 0, shape.replicas) for shape in pipeline})
    return [
        deque(
            (replicas[stage, replica], action)
            for stage, action in device_actions(schedule, pipeline, device, replica, minibatches)
        )
        for device, count in seats
        for replica in range(count)
    ]


def _check_stream(
    worker: _Replica, stream: Iterable[Action], schedule: Schedule, shape: StageShape, minibatches: int
) -> None:
    """Raises ReplayError unless the stream holds exactly the actions that this replica must run."""
    seen: dict[ActionKind, list[int]] = {kind: [] for kind in ActionKind}
    for action in stream:
        seen[action.kind].append(action.index)
    own = list(own_minibatches(worker.replica, shape.replicas, minibatches, shape.shares))
    groups = list(range(group_count(schedule.group_size(shape), minibatches))) if schedule.trains else []
    per_minibatch = (ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.WEIGHTS)
    expected = {kind: own if kind in per_minibatch else groups for kind in ActionKind}
    for kind, indices in seen.items():
        wanted = expected[kind] if kind in schedule.kinds else []
        if sorted(indices) != wanted:
            raise ReplayError(f"schedule {schedule.name}: {worker} runs {kind.value} of {indices}, expected {wanted}")


def _ready(worker: _Replica, action: Action, done: Counter[_Fact], pipeline: Sequence[StageShape]) -> bool:
    """Whether an action can run now."""
    match action.kind:
        case ActionKind.FORWARD:
            return worker.stage == 0 or done[action.kind, worker.stage - 1, action.index] > 0
        case ActionKind.BACKWARD:
            return worker.stage == len(pipeline) - 1 or done[action.kind, worker.stage + 1, action.index] > 0
        case ActionKind.UPDATE:
            return done[ActionKind.REDUCE, worker.stage, action.index] == pipeline[worker.stage].replicas
    return True


def _perform(
    worker: _Replica, action: Action, done: Counter[_Fact], schedule: Schedule, pipeline: Sequence[StageShape]
) -> None:
    """Run an action: check it against the rules, then record its effects."""
    done[action.kind, worker.stage, action.index] += 1
    match action.kind:
        case ActionKind.FORWARD:
            shape = pipeline[worker.stage]
            if replica_of(action.index, shape.replicas, shape.shares) != worker.replica:
                raise ReplayError(f"{worker} runs {action}, which is another replica's")
            version = schedule.version(pipeline, worker.stage, action.index)
            if worker.updates < version:
                raise ReplayError(f"{worker} runs {action} on version {version}, but has made {worker.updates} updates")
            if schedule.trains:
                worker.in_flight.append(action.index)
                worker.awaiting.append(action.index)
                worker.peak = max(worker.peak, len(worker.in_flight))
            if len(worker.awaiting) > shape.depth or worker.peak > schedule.held(shape):
                raise ReplayError(f"{worker} has {worker.in_flight} in flight, above depth")
        case ActionKind.BACKWARD:
            if action.index not in worker.awaiting:
                raise ReplayError(f"{worker} runs {action} before its forward")
            worker.awaiting.remove(action.index)
            if not schedule.splits:
                worker.in_flight.remove(action.index)
        case ActionKind.WEIGHTS:
            if action.index in worker.awaiting or action.index not in worker.in_flight:
                raise ReplayError(f"{worker} runs {action} before its backward")
            worker.in_flight.remove(action.index)
        case ActionKind.REDUCE:
            if worker.in_flight and schedule.flushes:
                raise ReplayError(f"{worker} runs {action} with {worker.in_flight} in flight")
        case ActionKind.UPDATE:
            if action.index != worker.updates:
                raise ReplayError(f"{worker} runs {action} after {worker.updates} updates")
            worker.updates += 1
