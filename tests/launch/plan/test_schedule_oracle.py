"""Every rank's stream of every schedule, by the rules of `schedule_rules`: S ≤ 4 and r ≤ 4, and samples up to 16."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter

import pytest
from extents import first_few, slow_but_for
from schedule_rules import (
    ACCUMULATING,
    NAMES,
    SMALL,
    check,
    check_stream,
    deadlocked,
    every_count,
    pipelines,
    recipe,
    steady,
    streams_of,
)

from pipeplan_launch.plan.schedule import SCHEDULES, Action, StageShape
from pipeplan_launch.plan.schedule_check import ReplayError, replay_schedule

STAGES = first_few(range(1, 5), 3)
"""Numbers of stages: pipelines of four are slow tests."""


@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize("name", ACCUMULATING)
def test_every_small_pipeline_with_some_numbers_of_minibatches(name: str, stages: range) -> None:
    schedule, chance = SCHEDULES[name], random.Random(name)
    for replicas in (one for one in SMALL if len(one) in stages):
        for pipeline in pipelines(schedule, replicas):
            for count in {chance.choice(every_count(schedule, pipeline)), steady(pipeline)}:
                check(schedule, pipeline, count, links=len(replicas) < 4)


@pytest.mark.parametrize("workers", slow_but_for([range(5)], [range(5), range(5, 6)]), ids=str)
@pytest.mark.parametrize("name", ACCUMULATING)
def test_smaller_pipelines_with_every_number_of_minibatches(name: str, workers: range) -> None:
    schedule = SCHEDULES[name]
    for replicas in SMALL:
        if sum(replicas) in workers:
            for pipeline in itertools.chain(pipelines(schedule, replicas), pipelines(schedule, replicas, 1)):
                for count in every_count(schedule, pipeline):
                    check(schedule, pipeline, count)


@pytest.mark.parametrize("stages", first_few(range(1, 5), 2))
@pytest.mark.parametrize("name", slow_but_for({*NAMES} - {*ACCUMULATING, "vertical-sync"}, NAMES))
def test_every_small_pipeline_with_every_number_of_minibatches(name: str, stages: range) -> None:
    schedule = SCHEDULES[name]
    for replicas in (one for one in SMALL if len(one) in stages):
        for more in (0, 1):
            for pipeline in pipelines(schedule, replicas, more):
                for count in (*every_count(schedule, pipeline), steady(pipeline)):
                    check(schedule, pipeline, count, links=len(replicas) < 4 and not more)


def large(name: str, samples: int, seed: int) -> None:
    """Up to 16 stages of up to 16 replicas, at the least depths and above."""
    schedule, chance = SCHEDULES[name], random.Random(f"{name} {seed}")
    for _ in range(samples):
        replicas = [chance.randint(1, 16) for _ in range(chance.randint(1, 16))]
        more = [chance.randint(0, 2) for _ in replicas]
        pipeline = chance.choice(list(pipelines(schedule, replicas, more)))
        check(schedule, pipeline, chance.randint(1, steady(pipeline)), links=False)


@pytest.mark.parametrize("samples", slow_but_for([2], [2, 12]))
@pytest.mark.parametrize("name", NAMES)
def test_samples_of_large_pipelines(name: str, samples: int) -> None:
    large(name, samples=samples, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_many_samples_of_large_pipelines(name: str) -> None:
    large(name, samples=400, seed=2)


def test_both_replays_find_the_same_deadlocks() -> None:
    """At depths taken at random, most of them too shallow or too deep."""
    chance, found = random.Random(3), Counter[bool]()
    for _ in range(250):
        schedule = SCHEDULES[chance.choice(NAMES)]
        replicas = [chance.randint(1, 4) for _ in range(chance.randint(1, 4))]
        accumulate = chance.randint(1, 12)
        pipeline = [StageShape(count, chance.randint(1, 4), accumulate) for count in replicas]
        if schedule.name == "gpipe":
            pipeline = [StageShape(count, math.ceil(accumulate / count), accumulate) for count in replicas]
        if schedule.splits:
            pipeline = [StageShape(one.replicas, one.depth, accumulate, chance.randint(0, 3)) for one in pipeline]
        if schedule.name == "2bw" and any(one.depth * one.replicas > accumulate for one in pipeline):
            continue
        count = chance.randint(1, 20)
        ours = bool(deadlocked(streams_of(schedule, pipeline, count), pipeline))
        try:
            replay_schedule(schedule, pipeline, count)
            theirs = False
        except ReplayError as error:
            theirs = "deadlocks" in str(error)
        assert ours == theirs, (schedule.name, pipeline, count)
        found[ours] += 1
    assert min(found.values()) > 20


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("1f1b-stashing", "F0 F2 F4 B0 R0 B2 U0 R1 B4 U1 R2 U2"),  # three in flight
        ("1f1b-stashing", "F0 F2 B0 R0 U0 F4 B2 R1 U1 B4 R2 U2"),  # a version too new
        ("1f1b-stashing", "F0 F2 B0 R0 F4 B2 R1 U0 B4 U1 R2 U2"),  # two all-reduces under way
        ("1f1b-stashing", "F0 F2 R0 B0 F4 B2 U0 R1 B4 U1 R2 U2"),  # a gradient too late for its group
        ("1f1b-stashing", "F0 F2 B0 R0 F4 B2 U0 R1 B4 U1 R2"),  # an update missing
        ("1f1b-stashing", "F0 F2 B2 R0 F4 B0 U0 R1 B4 U1 R2 U2"),  # backwards in another order
        ("1f1b-stashing", "F0 F3 B0 R0 F4 B3 U0 R1 B4 U1 R2 U2"),  # the other replica's minibatch
        ("vertical-sync", "F0 F2 B0 R0 F4 B2 R1 B4 R2 U0 U1 U2"),  # updates in a heap
        ("2bw", "F0 F2 B0 B2 F4 R0 B4 R1 U0 U1"),  # all right but for depth 1
        ("1f1b-flush", "F0 F2 B0 B2 F4 R0 U0 B4 R1 U1"),  # a forward before the flush
        ("zb-h1", "F0 F2 B0 W0 B2 R0 W2 U0 F4 B4 W4 R1 U1"),  # a gradient after its all-reduce
        ("zb-h1", "F0 F2 W0 B0 B2 W2 R0 U0 F4 B4 W4 R1 U1"),  # weights before the inputs
    ],
)
def test_what_is_wrong_is_found(name: str, wrong: str) -> None:
    shape = {"2bw": StageShape(2, 1, 4), "1f1b-flush": StageShape(2, 2, 4), "zb-h1": StageShape(2, 2, 4, 1)}.get(
        name, StageShape(2, 2)
    )
    pipeline = [shape, StageShape(1, 1, shape.accumulate)]
    stream = [Action.parse(text) for text in wrong.split()]
    formula = recipe(SCHEDULES[name], pipeline)
    check_stream(SCHEDULES[name].stream(pipeline, 0, 0, 5), formula, 0, 0, 5)
    with pytest.raises(AssertionError):
        check_stream(stream, formula, 0, 0, 5)
