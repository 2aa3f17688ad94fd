"""Every rank's stream, replayed by rules of the test's own as well as by `pipeplan_launch.replay`."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections import Counter

import pytest

from pipeplan_launch.replay import ReplayError, replay
from pipeplan_launch.schedule import (
    SCHEDULES,
    Action,
    Kind,
    StageShape,
    group_count,
    group_members,
    one_f_one_b,
    update_lag,
    version_used,
)

STASHING = SCHEDULES["1f1b-stashing"]
FORWARD = SCHEDULES["forward-only"]


def shapes(replicas: tuple[int, ...], extra: int = 0) -> list[StageShape]:
    """Shallow depths that do not deadlock: d_last = 1, d_s = 1 + ceil(d_{s+1} r_{s+1} / r_s)."""
    result: list[StageShape] = []
    depth = 1
    for stage in reversed(range(len(replicas))):
        if stage < len(replicas) - 1:
            depth = 1 + -(-depth * replicas[stage + 1] // replicas[stage])
        result.insert(0, StageShape(replicas[stage], depth + extra))
    return result


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


def test_actions_round_trip() -> None:
    for kind in Kind:
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
            peaks = replay(STASHING, pipeline, minibatches)
            assert all(peak <= pipeline[stage].depth for (stage, _), peak in peaks.items())


def test_every_small_pipeline_serves_forward_only() -> None:
    for replicas in every_pipeline():
        pipeline = shapes(replicas)
        for minibatches in (0, 1, 2 * max(replicas) + 1):
            assert set(replay(FORWARD, pipeline, minibatches).values()) <= {0}


def test_versions_follow_the_formula() -> None:
    for replicas, depth, stages in itertools.product(range(1, 5), range(1, 6), (1, 2)):
        shape = StageShape(replicas, depth)
        pipeline = [shape, StageShape(1, 1)][:stages]
        late = 1 if stages > 1 and replicas > 1 else 0
        assert update_lag(pipeline, 0) == late
        for minibatches, replica in itertools.product((1, 7, 12), range(replicas)):
            updates = 0
            for action in one_f_one_b(pipeline, 0, replica, minibatches):
                if action.kind is Kind.FORWARD:
                    assert updates == max(0, action.index // replicas - depth + 1 - late)
                    assert updates == version_used(action.index, shape, late)
                elif action.kind is Kind.UPDATE:
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
                        if action.kind is Kind.FORWARD:
                            pair = (action.index % replicas[stage], action.index % replicas[stage + 1])
                            assert pair[side - stage] == replica
                            seen.add((action.index, *pair))
            assert sent == taken
            assert len(sent) == 9


def test_too_shallow_a_depth_is_a_deadlock() -> None:
    with pytest.raises(ReplayError, match="deadlocks"):
        replay(STASHING, [StageShape(1, 1), StageShape(2, 2)], 6)


def test_the_schedule_does_not_import_torch() -> None:
    code = "import sys, pipeplan_launch.schedule, pipeplan_launch.replay; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
