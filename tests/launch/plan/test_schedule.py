"""Every rank's stream, as pictures, by its formulas, and replayed by `pipeplan_launch.plan.schedule_check`.

`test_schedule_oracle.py` holds the streams to rules of its own.
"""

from __future__ import annotations

import itertools
import math
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
from extents import first_few, slow_but_for
from schedule_rules import ACCUMULATING, FORWARD, STASHING, TRAINING, fitted, least, shapes

from pipeplan_launch.plan.schedule import (
    SCHEDULES,
    Action,
    ActionKind,
    Schedule,
    StageShape,
    group_count,
    group_members,
    one_f_one_b,
    own_minibatches,
    replica_of,
    update_lag,
    version_used,
)
from pipeplan_launch.plan.schedule_check import ReplayError, replay_schedule


def every_pipeline() -> list[tuple[int, ...]]:
    return [r for stages in range(1, 5) for r in itertools.product(range(1, 5), repeat=stages)]


def text(pipeline: list[StageShape], stage: int, replica: int, minibatches: int) -> str:
    return " ".join(map(str, one_f_one_b(pipeline, stage, replica, minibatches)))


def test_streams_as_pictures() -> None:
    two_one = [StageShape(2, 2), StageShape(1, 1)]
    assert text(two_one, 0, 0, 5) == "F0 F2 B0 R0 F4 B2 U0 R1 B4 U1 R2 U2"
    # Replica 1 has no member of the last, short group: it still joins that group's all-reduce.
    assert text(two_one, 0, 1, 5) == "F1 F3 B1 R0 B3 U0 R1 U1 R2 U2"
    assert text(two_one, 1, 0, 3) == "F0 B0 R0 U0 F1 B1 R1 U1 F2 B2 R2 U2"
    # Data parallelism: nothing is late.
    assert text([StageShape(2, 1)], 0, 0, 4) == "F0 B0 R0 U0 F2 B2 R1 U1"
    assert text([StageShape(2, 3)], 0, 1, 1) == "R0 U0"
    assert text(two_one, 0, 0, 0) == ""


def test_replicas_may_take_unequal_shares() -> None:
    """Shares 3 and 1 of every 4 minibatches; the last group has 2, which are replica 0's."""
    shape, flush = StageShape(2, 1, 4, shares=(3, 1)), SCHEDULES["1f1b-flush"]
    streams = [" ".join(map(str, flush.stream([shape], 0, replica, 6))) for replica in (0, 1)]
    assert streams == ["F0 B0 F1 B1 F2 B2 R0 U0 F4 B4 F5 B5 R1 U1", "F3 B3 R0 U0 R1 U1"]
    replay_schedule(flush, [shape], 11)
    for replica, shares in itertools.product(range(3), [(1, 2, 4), (5, 1, 1)]):
        own = own_minibatches(replica, 3, 20, shares)
        assert own == [one for one in range(20) if replica_of(one, 3, shares) == replica]
    for wrong in ((3, 2), (4,), (4, 0), (2, 1, 1)):
        with pytest.raises(ValueError, match="cannot share 4 minibatches"):
            StageShape(2, 1, 4, shares=wrong)


def test_actions_round_trip() -> None:
    for kind in ActionKind:
        for index in (0, 7, 10, 12345):
            action = Action(kind, index)
            assert Action.parse(str(action)) == action
    for wrong in ("", "F", "3", "F-1", "F03", "f3", "X3", "F3 ", "F3\n", "F3.0", "F٣"):
        with pytest.raises(ValueError, match="not an action"):
            Action.parse(wrong)


def test_shapes_are_checked() -> None:
    for replicas, depth in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match="at least one replica"):
            StageShape(replicas, depth)


@pytest.mark.parametrize("extra", [0, 1])
def test_every_small_pipeline_finishes_within_its_depth(extra: int) -> None:
    for replicas in every_pipeline():
        pipeline = shapes(replicas, extra)
        for minibatches in (1, max(replicas) + 1, 3 * max(replicas) - 1):
            peaks = replay_schedule(STASHING, pipeline, minibatches)
            assert all(peak <= pipeline[stage].depth for (stage, _), peak in peaks.items())


def test_every_small_pipeline_serves_forward_only() -> None:
    for replicas in every_pipeline():
        pipeline = shapes(replicas)
        for minibatches in (0, 1, 2 * max(replicas) + 1):
            assert set(replay_schedule(FORWARD, pipeline, minibatches).values()) <= {0}


def stream(schedule: Schedule, pipeline: list[StageShape], stage: int, replica: int, minibatches: int) -> str:
    return " ".join(map(str, schedule.stream(pipeline, stage, replica, minibatches)))


def test_accumulating_streams_as_pictures() -> None:
    one, two = [StageShape(1, 2, 3)], [StageShape(2, 1, 3)]
    buffered, gpipe, flush = (SCHEDULES[name] for name in ("2bw", "gpipe", "1f1b-flush"))
    # The update of group 0 is due before minibatch 6, the first of group 2.
    assert stream(buffered, one, 0, 0, 8) == "F0 F1 B0 F2 B1 F3 B2 R0 F4 B3 F5 B4 U0 F6 B5 R1 F7 B6 B7 U1 R2 U2"
    assert stream(gpipe, [StageShape(1, 3, 3)], 0, 0, 4) == "F0 F1 F2 B0 B1 B2 R0 U0 F3 B3 R1 U1"
    assert stream(flush, one, 0, 0, 4) == "F0 F1 B0 F2 B1 B2 R0 U0 F3 B3 R1 U1"
    # Minibatch i is on replica i mod r whatever group it is in; replica 0 has none of the last, short group.
    assert stream(flush, two, 0, 0, 6) == "F0 B0 F2 B2 R0 U0 F4 B4 R1 U1"
    assert stream(flush, two, 0, 0, 4) == "F0 B0 F2 B2 R0 U0 R1 U1"
    zero, three = SCHEDULES["zb-h1"], [StageShape(1, 3, 4), StageShape(1, 2, 4, 1), StageShape(1, 1, 4, 2)]
    assert stream(zero, three, 0, 0, 4) == "F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3 R0 U0"
    assert stream(zero, three, 1, 0, 4) == "F0 F1 B0 F2 B1 W0 F3 B2 W1 B3 W2 W3 R0 U0"
    assert stream(zero, three, 2, 0, 5) == "F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3 R0 U0 F4 B4 W4 R1 U1"
    assert stream(buffered, two, 0, 0, 7) == "F0 B0 F2 B2 R0 F4 B4 U0 R1 F6 B6 U1 R2 U2"


def test_two_versions_do_for_no_more_than_a_group_in_flight() -> None:
    with pytest.raises(ValueError, match="2bw needs at least as many minibatches per update"):
        replay_schedule(SCHEDULES["2bw"], [StageShape(2, 2, 3), StageShape(1, 1, 3)], 9)
    for schedule in ACCUMULATING:
        with pytest.raises(ValueError, match="needs a number of minibatches per update"):
            replay_schedule(schedule, [StageShape(1, 1)], 3)
    with pytest.raises(ValueError, match="at least one minibatch"):
        StageShape(1, 1, 0)


def runs(schedule: Schedule, replicas: tuple[int, ...]) -> Iterator[tuple[list[StageShape], int]]:
    """Pipelines and numbers of minibatches up to three rounds of updates, the last of them short."""
    if not schedule.accumulates:
        yield from ((shapes(replicas), count) for count in (1, 3 * max(replicas) - 1))
        return
    start = least(schedule, replicas)
    for accumulate in (start, start + max(replicas)):
        pipeline = fitted(schedule, replicas, accumulate)
        yield from ((pipeline, count) for count in (accumulate, 3 * accumulate - 1) if count)


def check(schedule: Schedule, pipeline: list[StageShape], minibatches: int) -> None:
    peaks = replay_schedule(schedule, pipeline, minibatches)
    for (stage, _), peak in peaks.items():
        shape = pipeline[stage]
        held = shape.depth + shape.deferred
        assert peak <= held
        most = min(held, -(-shape.accumulate // shape.replicas)) if schedule.splits and shape.accumulate else held
        if schedule.trains and minibatches >= shape.replicas * held:
            assert max(peaks[stage, replica] for replica in range(shape.replicas)) == most


@pytest.mark.parametrize("schedule", TRAINING, ids=lambda schedule: schedule.name)
def test_every_schedule_finishes_on_small_pipelines(schedule: Schedule) -> None:
    for replicas in (one for one in every_pipeline() if len(one) <= 3):
        for pipeline, minibatches in runs(schedule, replicas):
            check(schedule, pipeline, minibatches)


@pytest.mark.parametrize("schedule", TRAINING, ids=lambda schedule: schedule.name)
@pytest.mark.parametrize("stages", first_few(range(1, 5), 2))
def test_every_schedule_finishes_whatever_the_minibatches_per_update(schedule: Schedule, stages: range) -> None:
    """S ≤ 4, r ≤ 4, M up to a round of the widest stage above the least, three updates, the last of one or M."""
    for replicas in (one for one in every_pipeline() if len(one) in stages):
        start = least(schedule, replicas)
        for accumulate in {start, start + 1, start + max(replicas)} if schedule.accumulates else (1,):
            pipeline = fitted(schedule, replicas, accumulate) if schedule.accumulates else shapes(replicas)
            size = schedule.group_size(pipeline[0])
            for minibatches in (2 * size + 1, 3 * size):
                check(schedule, pipeline, minibatches)


@pytest.mark.parametrize("schedule", TRAINING, ids=lambda schedule: schedule.name)
@pytest.mark.parametrize("samples", slow_but_for([8], [8, 60]))
def test_every_schedule_finishes_on_samples_of_large_pipelines(schedule: Schedule, samples: int) -> None:
    random_ = random.Random(16)
    for _ in range(samples):
        replicas = tuple(random_.randint(1, 16) for _ in range(random_.randint(5, 16)))
        if schedule.name == "2bw" and least(schedule, replicas) > 400:
            continue
        accumulate = least(schedule, replicas) + random_.randint(0, 40)
        pipeline = fitted(schedule, replicas, accumulate) if schedule.accumulates else shapes(replicas)
        check(schedule, pipeline, 2 * accumulate + random_.randint(0, 5))


def updates_at_forward(schedule: Schedule, pipeline: list[StageShape], stage: int, count: int) -> dict[int, int]:
    """How many updates a stage has made when it runs each minibatch forward, over all its replicas."""
    found = {}
    for replica in range(pipeline[stage].replicas):
        updates = 0
        for action in schedule.stream(pipeline, stage, replica, count):
            if action.kind is ActionKind.FORWARD:
                found[action.index] = updates
            updates += action.kind is ActionKind.UPDATE
    return found


@pytest.mark.parametrize("schedule", TRAINING, ids=lambda schedule: schedule.name)
def test_versions_used_are_those_that_exist(schedule: Schedule) -> None:
    """The newest with stashing and a flush; one older at most with 2BW; the input stage's under vertical sync."""
    for replicas in ((1, 1, 1), (2, 1), (1, 2), (3, 2, 1), (2, 3), (4, 1, 2)):
        for pipeline, minibatches in runs(schedule, replicas):
            for stage in range(len(replicas)):
                made = updates_at_forward(schedule, pipeline, stage, minibatches)
                used = {index: schedule.version(pipeline, stage, index) for index in made}
                late = {made[index] - used[index] for index in made}
                if schedule.name in ("1f1b-stashing", "gpipe", "1f1b-flush", "zb-h1"):
                    assert late == {0}
                elif schedule.name == "2bw":
                    assert late <= {0, 1}
                else:
                    assert min(late) >= 0
                    rounds = {index: pipeline[0].replicas * schedule.version(pipeline, 0, index) for index in made}
                    # No minibatch in it that is not in the input stage's, and none less than fits in whole groups.
                    assert all(0 <= rounds[i] - used[i] * replicas[stage] < replicas[stage] for i in made)


def test_gradients_of_a_flush_are_those_of_the_weights_that_one_process_would_have() -> None:
    for name in ("gpipe", "1f1b-flush", "zb-h1"):
        pipeline = [StageShape(2, 3, 5), StageShape(1, 5, 5)]
        assert [SCHEDULES[name].version(pipeline, 0, index) for index in range(11)] == [0] * 5 + [1] * 5 + [2]
    buffered = [StageShape(1, 1, 3)]
    assert [SCHEDULES["2bw"].version(buffered, 0, index) for index in range(10)] == [0] * 6 + [1] * 3 + [2]


def test_two_buffers_hold_two_versions() -> None:
    """What is still to be used, and the current weights, are never more than two."""
    schedule = SCHEDULES["2bw"]
    for replicas in ((1, 1, 1), (2, 1), (1, 2), (3, 2, 1)):
        for pipeline, minibatches in runs(schedule, replicas):
            for stage, shape in enumerate(pipeline):
                for replica in range(shape.replicas):
                    assert versions_kept(schedule, pipeline, stage, replica, minibatches) <= 2


def versions_kept(schedule: Schedule, pipeline: list[StageShape], stage: int, replica: int, minibatches: int) -> int:
    """The most versions from the oldest that this replica still needs up to the newest."""
    own = list(range(replica, minibatches, pipeline[stage].replicas))
    done = updates = most = 0
    for action in schedule.stream(pipeline, stage, replica, minibatches):
        done += action.kind is ActionKind.BACKWARD
        updates += action.kind is ActionKind.UPDATE
        oldest = schedule.version(pipeline, stage, own[done]) if done < len(own) else updates
        most = max(most, updates - oldest + 1)
    return most


def test_vertical_sync_keeps_what_the_input_stage_has_in_flight() -> None:
    schedule = SCHEDULES["vertical-sync"]
    for replicas in (one for one in every_pipeline() if len(one) in (2, 3)):
        pipeline = shapes(replicas)
        late = [update_lag(pipeline, stage) for stage in range(len(replicas))]
        delay = (pipeline[0].depth + late[0]) * replicas[0]
        count = delay * 3 + 4 * math.lcm(*replicas)
        for stage, here in enumerate(replicas):
            kept = max(versions_kept(schedule, pipeline, stage, replica, count) for replica in range(here))
            expected = 1 + -(-(delay - math.gcd(replicas[0], here)) // here)
            assert kept + late[stage] == expected, (replicas, stage)


def test_weights_that_do_not_exist_yet_are_found() -> None:
    eager = replace(SCHEDULES["gpipe"], version=lambda _pipeline, _stage, minibatch: minibatch)
    with pytest.raises(ReplayError, match="on version 1, but has made 0 updates"):
        replay_schedule(eager, [StageShape(1, 3, 3)], 3)


def test_versions_follow_the_formula() -> None:
    for replicas, depth, stages in itertools.product(range(1, 5), range(1, 6), (1, 2)):
        shape = StageShape(replicas, depth)
        pipeline = [shape, StageShape(1, 1)][:stages]
        late = 1 if stages > 1 and replicas > 1 else 0
        assert update_lag(pipeline, 0) == late
        for minibatches, replica in itertools.product((1, 7, 12), range(replicas)):
            updates = 0
            for action in one_f_one_b(pipeline, 0, replica, minibatches):
                if action.kind is ActionKind.FORWARD:
                    assert updates == max(0, action.index // replicas - depth + 1 - late)
                    assert updates == version_used(action.index, shape, late)
                elif action.kind is ActionKind.UPDATE:
                    assert action.index == updates
                    updates += 1
            assert updates == group_count(replicas, minibatches)


def test_groups_cover_every_minibatch_once() -> None:
    for replicas, minibatches in itertools.product(range(1, 5), range(12)):
        groups = [group_members(g, replicas, minibatches) for g in range(group_count(replicas, minibatches))]
        assert Counter(itertools.chain.from_iterable(groups)) == Counter(range(minibatches))
        assert all(0 < len(group) <= replicas for group in groups)


def test_messages_between_neighbours_agree() -> None:
    """Whatever a replica sends forward is what the next stage's replica expects, minibatch by minibatch."""
    for replicas in every_pipeline():
        pipeline = shapes(replicas)
        for stage in range(len(pipeline) - 1):
            sent: set[tuple[int, int, int]] = set()
            taken: set[tuple[int, int, int]] = set()
            for side, seen in ((stage, sent), (stage + 1, taken)):
                for replica in range(pipeline[side].replicas):
                    for action in one_f_one_b(pipeline, side, replica, 9):
                        if action.kind is ActionKind.FORWARD:
                            pair = (action.index % replicas[stage], action.index % replicas[stage + 1])
                            assert pair[side - stage] == replica
                            seen.add((action.index, *pair))
            assert sent == taken
            assert len(sent) == 9


def test_too_shallow_a_depth_is_a_deadlock() -> None:
    with pytest.raises(ReplayError, match="deadlocks"):
        replay_schedule(STASHING, [StageShape(1, 1), StageShape(2, 2)], 6)


def test_the_schedule_does_not_import_torch() -> None:
    modules = "pipeplan_launch.plan.schedule, pipeplan_launch.plan.schedule_check"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
