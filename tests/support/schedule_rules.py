"""Rules for streams of actions, pipelines to hold to them, and depths of stages with which a schedule can run.

`pipeplan_launch.plan.schedule_check`, which guards the executor, is not asked.

A worker does its actions in order. A forward waits for the stage before, a backward for the stage after, an update for
the all-reduce of every replica; sending never waits. Whoever still waits when nobody can go on is in a deadlock.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from literal import Recipe

from pipeplan_launch.plan.schedule import SCHEDULES, Action, ActionKind, Schedule, StageShape
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


Worker = tuple[int, int]
"""(stage, replica)."""
Streams = dict[Worker, list[Action]]
NAMES = [name for name, schedule in SCHEDULES.items() if schedule.virtual is None]
"""The schedules whose workers run one stage each."""
ACCUMULATING = [name for name in NAMES if SCHEDULES[name].accumulates]
SMALL = [r for stages in range(1, 5) for r in itertools.product(range(1, 5), repeat=stages)]
"""Every S ≤ 4 and r ≤ 4."""


def streams_of(schedule: Schedule, pipeline: Sequence[StageShape], count: int) -> Streams:
    return {
        (stage, replica): list(schedule.stream(pipeline, stage, replica, count))
        for stage, shape in enumerate(pipeline)
        for replica in range(shape.replicas)
    }


def deadlocked(streams: Streams, pipeline: Sequence[StageShape]) -> dict[Worker, Action]:
    """The workers that wait for ever, and where."""
    done: set[tuple[ActionKind, int, int]] = set()
    joined: Counter[tuple[int, int]] = Counter()
    waiting: dict[tuple[ActionKind, int, int], list[Worker]] = defaultdict(list)
    position = dict.fromkeys(streams, 0)
    ready = deque(streams)
    while ready:
        worker = ready.popleft()
        stage, _ = worker
        for action in streams[worker][position[worker] :]:
            needed = _needed(action, stage, len(pipeline))
            if needed is not None and needed not in done:
                waiting[needed].append(worker)
                break
            position[worker] += 1
            fact = (action.kind, stage, action.index)
            if action.kind is ActionKind.REDUCE:
                joined[stage, action.index] += 1
                if joined[stage, action.index] < pipeline[stage].replicas:
                    continue
            done.add(fact)
            ready.extend(waiting.pop(fact, ()))
    return {worker: stream[position[worker]] for worker, stream in streams.items() if position[worker] < len(stream)}


def _needed(action: Action, stage: int, stages: int) -> tuple[ActionKind, int, int] | None:
    if action.kind is ActionKind.FORWARD and stage > 0:
        return ActionKind.FORWARD, stage - 1, action.index
    if action.kind is ActionKind.BACKWARD and stage < stages - 1:
        return ActionKind.BACKWARD, stage + 1, action.index
    if action.kind is ActionKind.UPDATE:
        return ActionKind.REDUCE, stage, action.index
    return None


def recipe(schedule: Schedule, pipeline: Sequence[StageShape]) -> Recipe:
    replicas, depths = tuple(one.replicas for one in pipeline), tuple(one.depth for one in pipeline)
    deferred = tuple(one.deferred for one in pipeline)
    accumulate = pipeline[0].accumulate or 1
    return Recipe(schedule.name, replicas, depths, accumulate, minibatch=1, epochs=1, deferred=deferred)


def check_stream(stream: Iterable[Action], formula: Recipe, stage: int, replica: int, count: int) -> None:
    """One worker's actions: its own minibatches once and in order, groups whole, versions there, and no more in flight
    than the depth. Where gradients of weights come apart, no more of them are put off than is said."""
    own = list(range(replica, count, formula.replicas[stage]))
    if formula.semantics == "forward-only":
        assert [str(action) for action in stream] == [f"F{index}" for index in own]
        return
    members = Counter(formula.group_of(stage, index) for index in own)
    splits = formula.semantics == "zb-h1"
    begun = finished = weighed = reduced = updated = collected = 0
    for action in stream:
        match action.kind:
            case ActionKind.FORWARD:
                assert action.index == own[begun]
                owed = formula.version(stage, action.index)
                newest = formula.semantics in ("1f1b-stashing", "gpipe", "1f1b-flush", "zb-h1")
                assert owed == updated if newest else owed <= updated, f"{action} is owed {owed} of {updated}"
                begun += 1
                if splits:
                    assert finished - weighed <= formula.deferred[stage]
                assert begun - finished <= formula.depths[stage]
            case ActionKind.BACKWARD:
                assert action.index == own[finished]
                assert finished < begun
                assert formula.group_of(stage, action.index) == reduced  # what comes before R belongs to it
                finished += 1
                collected += not splits
            case ActionKind.WEIGHTS:
                assert splits
                assert action.index == own[weighed]
                assert weighed < finished
                weighed += 1
                collected += 1
            case ActionKind.REDUCE:
                assert action.index == reduced == updated  # one all-reduce under way, no more
                assert collected == members[reduced]
                reduced, collected = reduced + 1, 0
            case ActionKind.UPDATE:
                assert action.index == updated
                assert updated < reduced
                updated += 1
    assert begun == finished == len(own)
    assert weighed == (len(own) if splits else 0)
    assert reduced == updated == (formula.group_of(stage, count - 1) + 1 if count else 0)


def check_links(streams: Streams, pipeline: Sequence[StageShape]) -> None:
    """Between two workers, messages are awaited in the order in which they are sent."""
    for stage in range(len(pipeline) - 1):
        before, after = pipeline[stage].replicas, pipeline[stage + 1].replicas
        for one, other in itertools.product(range(before), range(after)):
            for kind in (ActionKind.FORWARD, ActionKind.BACKWARD):
                ends = [
                    [a.index for a in streams[stage + side, mine] if a.kind is kind and a.index % peers == theirs]
                    for side, mine, peers, theirs in ((0, one, after, other), (1, other, before, one))
                ]
                assert ends[0] == ends[1]


def check(schedule: Schedule, pipeline: Sequence[StageShape], count: int, links: bool = True) -> None:
    where = f"{schedule.name} {[(s.replicas, s.depth, s.accumulate) for s in pipeline]}, {count} minibatches"
    streams = streams_of(schedule, pipeline, count)
    assert not deadlocked(streams, pipeline), where
    formula = recipe(schedule, pipeline)
    for (stage, replica), stream in streams.items():
        check_stream(stream, formula, stage, replica, count)
    if links:
        check_links(streams, pipeline)


def pipelines(schedule: Schedule, replicas: Sequence[int], more: Sequence[int] | int = 0) -> Iterator[list[StageShape]]:
    """With depths that a plan may state: the least and more, and for several numbers of minibatches per update."""
    depths = depths_for(replicas, [more] * len(replicas) if isinstance(more, int) else more)
    shapes = [StageShape(count, depth) for count, depth in zip(replicas, depths, strict=True)]
    if not schedule.accumulates:
        yield shapes
        return
    widest = max(replicas)
    least = max(one.replicas * one.depth for one in shapes) if schedule.name == "2bw" else 1
    for accumulate in sorted({least, least + 1, least + widest, max(least, 3 * widest)}):
        whole = [math.ceil(accumulate / count) for count in replicas]
        deep = whole if schedule.name == "gpipe" else depths
        shapes = [StageShape(count, depth, accumulate) for count, depth in zip(replicas, deep, strict=True)]
        yield shapes
        if schedule.splits:
            yield [replace(shape, deferred=2 * stage) for stage, shape in enumerate(shapes)]


def every_count(schedule: Schedule, pipeline: Sequence[StageShape]) -> range:
    """Up to three rounds of the widest stage, or three updates; at least one minibatch."""
    return range(1, 3 * max(schedule.group_size(shape) for shape in pipeline) + 1)


def steady(pipeline: Sequence[StageShape]) -> int:
    """Enough minibatches to fill the deepest stage, run steadily, and drain."""
    return 2 * max(one.replicas * one.depth for one in pipeline) + 1
