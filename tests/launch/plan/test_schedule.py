"""Every rank's stream of every schedule: as pictures, and by the rules of `schedule_rules` for S ≤ 4 and r ≤ 4, and
samples up to 16. The replay that guards the executor finds the same deadlocks.
"""

from __future__ import annotations

import itertools
import math
import random
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest
from extents import slow_but_for
from schedule_rules import (
    ACCUMULATING,
    FORWARD,
    NAMES,
    SMALL,
    STASHING,
    TRAINING,
    check,
    deadlocked,
    every_count,
    fitted,
    least,
    pipelines,
    recipe,
    shapes,
    steady,
    streams_of,
)

from pipeplan_launch.plan.schedule import (
    SCHEDULES,
    Action,
    ActionKind,
    Schedule,
    StageShape,
    own_minibatches,
    replica_of,
    update_lag,
)
from pipeplan_launch.plan.schedule_check import ReplayError, replay_schedule

TWO_ONE = [StageShape(2, 2), StageShape(1, 1)]
ONE, TWO = [StageShape(1, 2, 3)], [StageShape(2, 1, 3)]
THREE = [StageShape(1, 3, 4), StageShape(1, 2, 4, 1), StageShape(1, 1, 4, 2)]
PICTURES = [
    ("1f1b-stashing", TWO_ONE, (0, 0), 5, "F0 F2 B0 R0 F4 B2 U0 R1 B4 U1 R2 U2"),
    # Replica 1 has no member of the last, short group: it still joins that group's all-reduce.
    ("1f1b-stashing", TWO_ONE, (0, 1), 5, "F1 F3 B1 R0 B3 U0 R1 U1 R2 U2"),
    ("1f1b-stashing", TWO_ONE, (1, 0), 3, "F0 B0 R0 U0 F1 B1 R1 U1 F2 B2 R2 U2"),
    ("1f1b-stashing", TWO_ONE, (0, 0), 0, ""),
    # Data parallelism: nothing is late.
    ("1f1b-stashing", [StageShape(2, 1)], (0, 0), 4, "F0 B0 R0 U0 F2 B2 R1 U1"),
    ("1f1b-stashing", [StageShape(2, 3)], (0, 1), 1, "R0 U0"),
    # The update of group 0 is due before minibatch 6, the first of group 2.
    ("2bw", ONE, (0, 0), 8, "F0 F1 B0 F2 B1 F3 B2 R0 F4 B3 F5 B4 U0 F6 B5 R1 F7 B6 B7 U1 R2 U2"),
    ("2bw", TWO, (0, 0), 7, "F0 B0 F2 B2 R0 F4 B4 U0 R1 F6 B6 U1 R2 U2"),
    ("gpipe", [StageShape(1, 3, 3)], (0, 0), 4, "F0 F1 F2 B0 B1 B2 R0 U0 F3 B3 R1 U1"),
    ("1f1b-flush", ONE, (0, 0), 4, "F0 F1 B0 F2 B1 B2 R0 U0 F3 B3 R1 U1"),
    # Minibatch i is on replica i mod r whatever group it is in; replica 0 has none of the last, short group.
    ("1f1b-flush", TWO, (0, 0), 6, "F0 B0 F2 B2 R0 U0 F4 B4 R1 U1"),
    ("1f1b-flush", TWO, (0, 0), 4, "F0 B0 F2 B2 R0 U0 R1 U1"),
    # Shares 3 and 1 of every 4 minibatches; the last group has 2, which are replica 0's.
    ("1f1b-flush", [StageShape(2, 1, 4, shares=(3, 1))], (0, 0), 6, "F0 B0 F1 B1 F2 B2 R0 U0 F4 B4 F5 B5 R1 U1"),
    ("1f1b-flush", [StageShape(2, 1, 4, shares=(3, 1))], (0, 1), 6, "F3 B3 R0 U0 R1 U1"),
    ("zb-h1", THREE, (0, 0), 4, "F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3 R0 U0"),
    ("zb-h1", THREE, (1, 0), 4, "F0 F1 B0 F2 B1 W0 F3 B2 W1 B3 W2 W3 R0 U0"),
    ("zb-h1", THREE, (2, 0), 5, "F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3 R0 U0 F4 B4 W4 R1 U1"),
]


def test_streams_as_pictures() -> None:
    for name, pipeline, worker, minibatches, picture in PICTURES:
        assert " ".join(map(str, SCHEDULES[name].stream(pipeline, *worker, minibatches))) == picture


def test_replicas_may_take_unequal_shares() -> None:
    replay_schedule(SCHEDULES["1f1b-flush"], [StageShape(2, 1, 4, shares=(3, 1))], 11)
    for replica, shares in itertools.product(range(3), [(1, 2, 4), (5, 1, 1)]):
        own = own_minibatches(replica, 3, 20, shares)
        assert own == [one for one in range(20) if replica_of(one, 3, shares) == replica]
    for wrong in ((3, 2), (4,), (4, 0), (2, 1, 1)):
        with pytest.raises(ValueError, match="cannot share 4 minibatches"):
            StageShape(2, 1, 4, shares=wrong)


def test_actions_round_trip() -> None:
    for kind, index in itertools.product(ActionKind, (0, 7, 10, 12345)):
        action = Action(kind, index)
        assert Action.parse(str(action)) == action
    for wrong in ("", "F", "3", "F-1", "F03", "f3", "X3", "F3 ", "F3\n", "F3.0", "F٣"):
        with pytest.raises(ValueError, match="not an action"):
            Action.parse(wrong)


def test_shapes_that_no_schedule_can_run_are_refused() -> None:
    for replicas, depth, accumulate in ((0, 1, None), (1, 0, None), (1, 1, 0)):
        with pytest.raises(ValueError, match="at least one"):
            StageShape(replicas, depth, accumulate)
    with pytest.raises(ValueError, match="2bw needs at least as many minibatches per update"):
        replay_schedule(SCHEDULES["2bw"], [StageShape(2, 2, 3), StageShape(1, 1, 3)], 9)
    for name in ACCUMULATING:
        with pytest.raises(ValueError, match="needs a number of minibatches per update"):
            replay_schedule(SCHEDULES[name], [StageShape(1, 1)], 3)


@pytest.mark.parametrize("everything", slow_but_for([False], [False, True]))
@pytest.mark.parametrize("name", NAMES)
def test_every_small_pipeline(name: str, everything: bool) -> None:
    """With every number of minibatches if there are few workers, or few cases of the schedule; else with some."""
    schedule, chance = SCHEDULES[name], random.Random(name)
    few = 5 if not everything else 6 if schedule.accumulates else 17
    for replicas in (one for one in SMALL if everything or len(one) < 4):
        for pipeline in itertools.chain(pipelines(schedule, replicas), pipelines(schedule, replicas, 1)):
            counts = every_count(schedule, pipeline)
            for count in counts if sum(replicas) < few else {chance.choice(counts), steady(pipeline)}:
                check(schedule, pipeline, count, links=len(replicas) < 4)


@pytest.mark.parametrize("samples", slow_but_for([2], [2, 400]))
@pytest.mark.parametrize("name", NAMES)
def test_samples_of_large_pipelines(name: str, samples: int) -> None:
    """Up to 16 stages of up to 16 replicas, at the least depths and above."""
    schedule, chance = SCHEDULES[name], random.Random(f"{name} {samples}")
    for _ in range(samples):
        replicas = [chance.randint(1, 16) for _ in range(chance.randint(1, 16))]
        more = [chance.randint(0, 2) for _ in replicas]
        pipeline = chance.choice(list(pipelines(schedule, replicas, more)))
        check(schedule, pipeline, chance.randint(1, steady(pipeline)), links=False)


@pytest.mark.parametrize("schedule", TRAINING, ids=lambda schedule: schedule.name)
def test_a_stage_has_as_many_in_flight_as_its_depth_and_no_more(schedule: Schedule) -> None:
    """Gradients of weights that come apart are kept as well, up to the number that may be put off."""
    for replicas in (one for one in SMALL if len(one) <= 3):
        start = least(schedule, replicas)
        for accumulate in (start, start + max(replicas)) if schedule.accumulates else (1,):
            pipeline = fitted(schedule, replicas, accumulate) if schedule.accumulates else shapes(replicas)
            peaks = replay_schedule(schedule, pipeline, max(3 * accumulate - 1, steady(pipeline)))
            for stage, shape in enumerate(pipeline):
                held = shape.depth
                if schedule.splits:
                    held = min(held + shape.deferred, -(-accumulate // shape.replicas))
                assert max(peaks[stage, replica] for replica in range(shape.replicas)) == held
    assert set(replay_schedule(FORWARD, shapes((3, 1, 2)), 7).values()) == {0}


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


def test_the_replay_refuses_what_would_train_wrongly() -> None:
    with pytest.raises(ReplayError, match="deadlocks"):
        replay_schedule(STASHING, [StageShape(1, 1), StageShape(2, 2)], 6)
    eager = replace(SCHEDULES["gpipe"], version=lambda _pipeline, _stage, minibatch: minibatch)
    with pytest.raises(ReplayError, match="on version 1, but has made 0 updates"):
        replay_schedule(eager, [StageShape(1, 3, 3)], 3)


@pytest.mark.parametrize("schedule", TRAINING, ids=lambda schedule: schedule.name)
def test_versions_are_those_of_the_formulas(schedule: Schedule) -> None:
    for replicas in ((1,), (2,), (1, 1, 1), (2, 1), (1, 2), (3, 2, 1), (2, 3), (4, 1, 2)):
        for more in (0, 1):
            for pipeline in pipelines(schedule, replicas, more):
                formula = recipe(schedule, pipeline)
                for stage, minibatch in itertools.product(range(len(replicas)), range(2 * steady(pipeline))):
                    assert schedule.version(pipeline, stage, minibatch) == formula.version(stage, minibatch)


def versions_kept(schedule: Schedule, pipeline: list[StageShape], stage: int, minibatches: int) -> int:
    """The most versions from the oldest that a replica of the stage still needs up to the newest."""
    most = 0
    for replica in range(pipeline[stage].replicas):
        own = list(range(replica, minibatches, pipeline[stage].replicas))
        done = updates = 0
        for action in schedule.stream(pipeline, stage, replica, minibatches):
            done += action.kind is ActionKind.BACKWARD
            updates += action.kind is ActionKind.UPDATE
            oldest = schedule.version(pipeline, stage, own[done]) if done < len(own) else updates
            most = max(most, updates - oldest + 1)
    return most


def test_two_buffers_hold_two_versions() -> None:
    """What is still to be used, and the current weights, are never more than two."""
    schedule = SCHEDULES["2bw"]
    for replicas in ((1, 1, 1), (2, 1), (1, 2), (3, 2, 1)):
        for pipeline in pipelines(schedule, replicas):
            minibatches = 3 * schedule.group_size(pipeline[0]) - 1
            assert all(versions_kept(schedule, pipeline, stage, minibatches) <= 2 for stage in range(len(replicas)))


def test_vertical_sync_keeps_what_the_input_stage_has_in_flight() -> None:
    schedule = SCHEDULES["vertical-sync"]
    for replicas in (one for one in SMALL if len(one) in (2, 3)):
        pipeline = shapes(replicas)
        late = [update_lag(pipeline, stage) for stage in range(len(replicas))]
        delay = (pipeline[0].depth + late[0]) * replicas[0]
        count = delay * 3 + 4 * math.lcm(*replicas)
        for stage, here in enumerate(replicas):
            expected = 1 + -(-(delay - math.gcd(replicas[0], here)) // here)
            assert versions_kept(schedule, pipeline, stage, count) + late[stage] == expected, (replicas, stage)


def test_the_schedule_does_not_import_torch() -> None:
    modules = "pipeplan_launch.plan.schedule, pipeplan_launch.plan.schedule_check"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
