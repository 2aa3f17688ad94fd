"""The one order ends on devices that do one thing at a time and whose sends wait; orders that are not shared do not."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from extents import first_few, slow_but_for
from order_rules import Drained, as_steps, check_nodes, random_run
from rendezvous import Queues, Step, queues_of, stuck_devices
from schedule_rules import (
    NAMES,
    SMALL,
    check_links,
    check_stream,
    deadlocked,
    pipelines,
    recipe,
    steady,
)
from schedule_shapes import VIRTUAL, of_devices

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
    order = communication_order(drained.schedule, drained.pipeline, drained.count, drained.crossings, drained.shared)
    return [node for node in order if stays(node, drained.schedule, drained.pipeline, drained.end)]


def run_steps(run: list[Drained]) -> list[Step]:
    return list(itertools.chain(*(as_steps(order_of(one), one.replicas, number) for number, one in enumerate(run))))


def straight(depths: list[int], count: int, replicas: list[int] | None = None) -> Drained:
    shapes = [StageShape(r, d) for r, d in zip(replicas or [1] * len(depths), depths, strict=True)]
    return Drained(STASHING, shapes, [(s, s + 1) for s in range(len(depths) - 1)], count, count)


@pytest.mark.parametrize("seeds", first_few(range(5000), 12))
def test_random_runs_finish(seeds: range) -> None:
    for seed in seeds:
        run = random_run(seed)
        assert not stuck_devices(queues_of(run_steps(run))), f"seed {seed}: {'; '.join(map(str, run))}"


@pytest.mark.parametrize("seeds", first_few(range(5000, 6000), 6))
def test_orders_are_complete_and_nothing_comes_before_what_it_waits_for(seeds: range) -> None:
    for seed in seeds:
        for drained in random_run(seed):
            try:
                check_nodes(order_of(drained), drained)
            except (AssertionError, KeyError) as error:
                raise AssertionError(f"seed {seed}: {drained}") from error


@pytest.mark.parametrize("ends", slow_but_for([range(2, 15, 4)], [range(2, 15, 4), range(1, 15)]), ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_a_segment_that_ends_early_keeps_the_order(name: str, ends: range) -> None:
    """Ended anywhere, what is left out of the longer order leaves a whole one, which waits for nothing that is gone."""
    schedule = SCHEDULES[name]
    for replicas in ([1, 1], [2, 1], [1, 2, 1], [3, 2]):
        for pipeline in pipelines(schedule, replicas):
            crossings = [(s, s + 1) for s in range(len(replicas) - 1)]
            for end in ends:
                drained = Drained(schedule, pipeline, crossings, 15, end)
                check_nodes(order_of(drained), drained)


def test_a_depth_without_an_order_is_refused() -> None:
    def no_gradients(_: object, stage: int, __: int, ___: int) -> object:
        return iter([Action.parse("F0"), Action.parse("B0")][: 2 - stage])

    broken = Schedule("broken", no_gradients, STASHING.kinds, True, STASHING.version)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="broken has no order: stage 0 replica 0 waits for ever at B0"):
        list(communication_order(broken, [StageShape(1, 1), StageShape(1, 1)], 1))


def test_the_order_of_two_stages_is_that_of_their_timeline() -> None:
    nodes = order_of(straight([2, 1], 3))
    shown = [
        f"{node.action}/{node.place[0]}" if isinstance(node, Computation) else f"{'ag'[node.direction]}{node.minibatch}"
        for node in nodes
        if isinstance(node, Transfer) or (isinstance(node, Computation) and node.action.kind in "FB")
    ]
    assert " ".join(shown) == "F0/0 a0 F0/1 F1/0 a1 B0/1 g0 B0/0 F1/1 B1/1 F2/0 g1 a2 B1/0 F2/1 B2/1 g2 B2/0"


def test_a_worker_takes_its_own_part() -> None:
    nodes = order_of(straight([2, 1], 5, [2, 1]))
    shares = {place: [node for node in nodes if takes_part(node, place)] for place in [(0, 0), (0, 1), (1, 0)]}
    for node in nodes:
        devices = as_steps([node], [2, 1])[0].devices
        assert [place for place, share in shares.items() if node in share] == sorted(devices)


def pairs_with_one_peer(queues: Queues) -> list[tuple[object, int]]:
    """(device, the first of two of its steps next to each other with the same other device)."""
    return [
        (device, number)
        for device, steps in queues.items()
        for number, (one, two) in enumerate(itertools.pairwise(steps))
        if one.is_shared and set(one.devices) == set(two.devices)
    ]


@pytest.mark.parametrize("seeds", first_few(range(1000), 6))
def test_a_pair_that_one_device_swaps_is_a_deadlock(seeds: range) -> None:
    """So the order has to be shared, and `stuck_devices` notices where it is not."""
    tried = 0
    for seed in seeds:
        queues = queues_of(run_steps(random_run(seed)))
        pairs = pairs_with_one_peer(queues)
        for device, first in random.Random(seed).sample(pairs, min(3, len(pairs))):
            tried += 1
            steps = list(queues[device])
            steps[first : first + 2] = reversed(steps[first : first + 2])
            assert stuck_devices({**queues, device: steps}), f"seed {seed}: {device} {first}"
    assert tried > len(seeds) / 2


def ended_early(
    schedule: Schedule, shapes: Sequence[StageShape], stages: Sequence[int], replica: int, count: int, end: int
) -> list[tuple[int, Action]]:
    """What a worker does on its stages in a segment of `count` minibatches that is told to end before `end`."""
    plan, engines = SimpleNamespace(shapes=tuple(shapes), schedule=schedule), []
    for stage in stages:
        engine: Any = object.__new__(Engine)
        engine.place = SimpleNamespace(stage=stage, replica=replica, plan=plan)
        engine.schedule, engine.shapes, engine._count = schedule, shapes, count
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
