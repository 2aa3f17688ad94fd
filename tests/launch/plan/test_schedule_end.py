"""A segment that is told to end early, as the executor's own engine then goes on: each rank comes out of it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from extents import slow_but_for
from schedule_rules import (
    NAMES,
    SMALL,
    Streams,
    Worker,
    check_links,
    check_stream,
    deadlocked,
    pipelines,
    recipe,
    steady,
)

from pipeplan_launch.plan.schedule import SCHEDULES, Action, ActionKind, Schedule, StageShape
from pipeplan_launch.runtime.action_stream import run_stages
from pipeplan_launch.runtime.data import Batches, MinibatchSizes
from pipeplan_launch.runtime.engine import Engine, Segment


class Noted(Engine):
    """The executor's engine with nothing behind its actions."""

    def __init__(self, schedule: Schedule, pipeline: Sequence[StageShape], worker: Worker) -> None:
        stage, replica = worker
        here = pipeline[stage].replicas
        place: Any = SimpleNamespace(
            plan=SimpleNamespace(shapes=tuple(pipeline), plan="", schedule=schedule),
            rank=0,
            stage=stage,
            replica=replica,
            replicas=here,
            program=SimpleNamespace(model_inputs=()),
            is_first=True,  # and not the last: nothing is received, and nothing read
            is_last=False,
        )
        self.actions: list[Action] = []
        handlers = {kind: lambda index, kind=kind: self.actions.append(Action(kind, index)) for kind in ActionKind}
        super().__init__(place, schedule, _Silent(), None, handlers)  # type: ignore[arg-type]


class _Silent:
    in_order = False

    def open(self) -> None: ...

    def drain(self) -> None: ...


def ended_early(schedule: Schedule, pipeline: Sequence[StageShape], count: int, end: int) -> Streams:
    """What every worker does in a segment of `count` minibatches that is told to end before minibatch `end`."""
    dataset: Any = range(count)
    batches = Batches(dataset, MinibatchSizes(count, 1, dynamic=True, training=False), seed=0, epoch=0)
    found = {}
    for worker in itertools.chain(*([(stage, one) for one in range(s.replicas)] for stage, s in enumerate(pipeline))):
        engine = Noted(schedule, pipeline, worker)
        engine.limit = lambda index: end if index >= end else None
        run_stages([engine], Segment(0, batches))
        found[worker] = engine.actions
    return found


EVERY = [(range(1, 5), 4), (range(1, 5), 1), (range(5, 7), 3)]
"""How many workers, and the step from one minibatch that ends a segment to the next."""


@pytest.mark.parametrize("every", slow_but_for(EVERY[:1], EVERY), ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_a_segment_that_ends_early_is_whole(name: str, every: tuple[range, int]) -> None:
    """Wherever it is told to end, each rank does what a segment of that length asks of it, and comes out."""
    schedule, (workers, step) = SCHEDULES[name], every
    for replicas in SMALL:
        if len(replicas) > 3 or sum(replicas) not in workers:
            continue
        for pipeline in pipelines(schedule, replicas):
            count = max(2 * max(schedule.group_size(shape) for shape in pipeline) + 1, steady(pipeline))
            for end in range(1, count + 1, step):
                streams = ended_early(schedule, pipeline, count, end)
                where = f"{name} {[(s.replicas, s.depth, s.accumulate) for s in pipeline]}: {end} of {count}"
                assert not deadlocked(streams, pipeline), where
                check_links(streams, pipeline)
                for (stage, replica), stream in streams.items():
                    try:
                        check_stream(stream, recipe(schedule, pipeline), stage, replica, end)
                    except AssertionError as error:
                        raise AssertionError(f"{where}: {stage, replica} {' '.join(map(str, stream))}") from error
