"""The one order ends on devices that do one thing at a time and whose sends wait; segments end early."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from extents import first_few, slow_but_for
from order_rules import Drained, as_steps, check_nodes, queues_of, random_run, stuck_devices
from schedule_rules import (
    NAMES,
    SMALL,
    VIRTUAL,
    check_links,
    check_stream,
    deadlocked,
    of_devices,
    pipelines,
    recipe,
    steady,
)

from pipeplan_launch.plan.communication_order import (
    Computation,
    Node,
    Transfer,
    communication_order,
    stays,
    takes_part,
)
from pipeplan_launch.plan.schedule import SCHEDULES, Action, Schedule, StageShape, device_actions
from pipeplan_launch.runtime.action_stream import worker_actions
from pipeplan_launch.runtime.engine import Engine

STASHING = SCHEDULES["1f1b-stashing"]


def order_of(drained: Drained) -> list[Node]:
    """The order of a segment, which every device follows until it ends."""
    order = communication_order(drained.schedule, drained.pipeline, drained.count, drained.shared)
    return [node for node in order if stays(node, drained.schedule, drained.pipeline, drained.end)]


@pytest.mark.parametrize("seeds", first_few(range(5000), 12))
def test_random_runs_finish_in_complete_orders(seeds: range) -> None:
    """Nothing comes before what it waits for."""
    for seed in seeds:
        run, steps = random_run(seed), []
        for number, drained in enumerate(run):
            nodes = order_of(drained)
            steps += as_steps(nodes, drained.replicas, number)
            try:
                check_nodes(nodes, drained)
            except (AssertionError, KeyError) as error:
                raise AssertionError(f"seed {seed}: {drained}") from error
        assert not stuck_devices(queues_of(steps)), f"seed {seed}: {'; '.join(map(str, run))}"


@pytest.mark.parametrize("ends", slow_but_for([range(2, 15, 4)], [range(2, 15, 4), range(1, 15)]), ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_a_segment_that_ends_early_keeps_the_order(name: str, ends: range) -> None:
    """Ended anywhere, what is left out of the longer order leaves a whole one, which waits for nothing that is gone."""
    schedule = SCHEDULES[name]
    for replicas in ([1, 1], [2, 1], [1, 2, 1], [3, 2]):
        for pipeline in pipelines(schedule, replicas):
            for end in ends:
                drained = Drained(schedule, pipeline, 15, end)
                check_nodes(order_of(drained), drained)


def test_a_depth_without_an_order_is_refused() -> None:
    def no_gradients(_: object, stage: int, __: int, ___: int) -> object:
        return iter([Action.parse("F0"), Action.parse("B0")][: 2 - stage])

    broken = Schedule("broken", no_gradients, STASHING.kinds, True, STASHING.version)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="broken has no order: stage 0 replica 0 waits for ever at B0"):
        list(communication_order(broken, [StageShape(1, 1), StageShape(1, 1)], 1))


def test_the_order_of_two_stages_is_that_of_their_timeline_of_which_each_worker_takes_its_part() -> None:
    one, two = [StageShape(1, 2), StageShape(1, 1)], [StageShape(2, 2), StageShape(1, 1)]
    shown = [
        f"{node.action}/{node.place[0]}" if isinstance(node, Computation) else f"{'ag'[node.direction]}{node.minibatch}"
        for node in order_of(Drained(STASHING, one, 3, 3))
        if isinstance(node, Transfer) or (isinstance(node, Computation) and node.action.kind in "FB")
    ]
    assert " ".join(shown) == "F0/0 a0 F0/1 F1/0 a1 B0/1 g0 B0/0 F1/1 B1/1 F2/0 g1 a2 B1/0 F2/1 B2/1 g2 B2/0"
    for node in order_of(Drained(STASHING, two, 5, 5)):
        devices = as_steps([node], [2, 1])[0].devices
        assert [place for place in ((0, 0), (0, 1), (1, 0)) if takes_part(node, place)] == sorted(devices)


def ended_early(
    schedule: Schedule, shapes: Sequence[StageShape], stages: Sequence[int], replica: int, count: int, end: int
) -> list[tuple[int, Action]]:
    """What a worker does on its stages in a segment of `count` minibatches that is told to end before `end`."""
    plan, engines = SimpleNamespace(shapes=tuple(shapes), schedule=schedule), []
    for stage in stages:
        engine: Any = object.__new__(Engine)
        engine.place = SimpleNamespace(stage=stage, replica=replica, plan=plan)
        engine.schedule, engine.shapes, engine.count = schedule, shapes, count
        engine.limit = lambda index: end if index >= end else None
        engines.append(engine)
    done = list(worker_actions(engines))
    assert len({engine.count for engine in engines}) == 1  # a replica without a later minibatch does not know
    return done


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
                streams = {
                    (stage, replica): [a for _, a in ended_early(schedule, pipeline, [stage], replica, count, end)]
                    for stage, shape in enumerate(pipeline)
                    for replica in range(shape.replicas)
                }
                where = f"{name} {[(s.replicas, s.depth, s.accumulate) for s in pipeline]}: {end} of {count}"
                assert not deadlocked(streams, pipeline), where
                check_links(streams, pipeline)
                for (stage, replica), stream in streams.items():
                    try:
                        check_stream(stream, recipe(schedule, pipeline), stage, replica, end)
                    except AssertionError as error:
                        raise AssertionError(f"{where}: {stage, replica} {' '.join(map(str, stream))}") from error


@pytest.mark.parametrize("schedule", VIRTUAL, ids=lambda schedule: schedule.name)
def test_a_segment_of_workers_with_several_stages_that_ends_early_is_whole(schedule: Schedule) -> None:
    shapes = of_devices(schedule, 2, 2, 2, 5)
    for end, (device, replica) in itertools.product(range(16), ((0, 0), (1, 1))):
        stages = [stage for stage, shape in enumerate(shapes) if shape.device == device]
        found = ended_early(schedule, shapes, stages, replica, 15, end)
        wanted = list(device_actions(schedule, shapes, device, replica, end))
        assert Counter(found) == Counter(wanted)
        if end % 5 == 0:  # an update is never divided, so the order is that of a segment of that length
            assert found == wanted
