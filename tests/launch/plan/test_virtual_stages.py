"""Streams of workers that run several stages each: as pictures, and replayed by rules that share no code with them.

The rules: a worker does its actions in order; a forward waits for the stage before, a backward for the stage after, an
update for the all-reduce of all replicas of its stage. Sending never waits, except where a test says so.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
from schedule_rules import VIRTUAL, of_devices

from pipeplan_launch.plan.schedule import SCHEDULES, Schedule, StageShape, device_actions
from pipeplan_launch.plan.schedule_check import ReplayError, replay_schedule

Done = set[tuple[str, int, int]]


def streams_of(
    schedule: Schedule, shapes: list[StageShape], minibatches: int, *, trains: bool = True
) -> dict[tuple[int, int], list[tuple[str, int, int]]]:
    """The (kind, stage, index) of every worker, by (device, replica)."""
    workers = sorted({(shape.device or 0, replica) for shape in shapes for replica in range(shape.replicas)})
    return {
        (device, replica): [
            (action.kind.value, stage, action.index)
            for stage, action in device_actions(schedule, shapes, device, replica, minibatches, trains=trains)
        ]
        for device, replica in workers
    }


def replay(
    streams: dict[tuple[int, int], list[tuple[str, int, int]]], shapes: list[StageShape], most_queued: int | None = None
) -> dict[tuple[int, int], int]:
    """Run all streams; the most (stage, minibatch) that each worker held at once. `most_queued`: messages that a stage
    may have sent beyond those that the next stage has taken, if a forward waits for that."""
    stages, last = len(shapes), "W" if any(k == "W" for s in streams.values() for k, _, _ in s) else "B"
    done: Done = set()
    reduced: Counter[tuple[int, int]] = Counter()
    todo = {worker: list(reversed(stream)) for worker, stream in streams.items()}
    held = dict.fromkeys(streams, (0, 0))

    def ready(kind: str, stage: int, index: int) -> bool:
        if kind == "F":
            early = index - (most_queued or 0) * shapes[stage].replicas
            taken = most_queued is None or stage == stages - 1 or early < 0 or ("F", stage + 1, early) in done
            return taken and (stage == 0 or ("F", stage - 1, index) in done)
        if kind == "B":
            return ("F", stage, index) in done and (stage == stages - 1 or ("B", stage + 1, index) in done)
        if kind == "W":
            return ("B", stage, index) in done
        return kind == "R" or reduced[stage, index] == shapes[stage].replicas

    moved = True
    while moved:
        moved = False
        for worker, left in todo.items():
            while left and ready(*left[-1]):
                kind, stage, index = left.pop()
                assert (kind, stage, index) not in done or kind in "RU"
                done.add((kind, stage, index))
                reduced[stage, index] += kind == "R"
                now, most = held[worker]
                now += (kind == "F") - (kind == last)
                held[worker] = now, max(most, now)
                moved = True
    assert not any(todo.values()), {worker: left[-1] for worker, left in todo.items() if left}
    return {worker: most for worker, (_, most) in held.items()}


def passes(schedule: Schedule, devices: int, chunks: int, device: int, count: int) -> str:
    shapes = of_devices(schedule, devices, chunks, 1, count)
    return " ".join(f"{k}{stage}.{index}" for k, stage, index in streams_of(schedule, shapes, count)[device, 0])


def test_streams_as_pictures() -> None:
    interleaved, zero = SCHEDULES["interleaved-1f1b"], SCHEDULES["zb-v"]
    assert passes(interleaved, 2, 2, 1, 2) == "F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 R3.0 B1.0 B1.1 R1.0 U1.0 U3.0"
    assert passes(interleaved, 2, 2, 0, 1) == "F0.0 F2.0 B2.0 R2.0 B0.0 R0.0 U0.0 U2.0"
    assert passes(zero, 1, 2, 0, 1) == "F0.0 F1.0 B1.0 W1.0 R1.0 B0.0 W0.0 R0.0 U0.0 U1.0"
    assert passes(zero, 2, 2, 1, 2) == (
        "F1.0 F2.0 F1.1 F2.1 B2.0 W2.0 B1.0 W1.0 B2.1 W2.1 R2.0 B1.1 W1.1 R1.0 U1.0 U2.0"
    )


@pytest.mark.parametrize("count", [12, pytest.param(5000, marks=pytest.mark.slow)])
def test_random_pipelines_finish_with_as_much_in_flight_as_the_formula_says(count: int) -> None:
    """Also where a forward waits for its receiver: in evaluation at most two activations of a stage are on their way,
    and a stage that recomputes sends one."""
    random_ = random.Random(22)
    for _ in range(count):
        schedule = random_.choice(VIRTUAL)
        devices, replicas = random_.randint(1, 9), random_.randint(1, 3)
        chunks = 2 if schedule.name == "zb-v" else random_.randint(1, 4)
        accumulate = random_.choice([replicas * devices * random_.randint(1, 4), random_.randint(1, 40)])
        minibatches = accumulate * random_.randint(0, 2) + random_.randint(1, accumulate)
        shapes = of_devices(schedule, devices, chunks, replicas, accumulate)
        held = replay(streams_of(schedule, shapes, minibatches), shapes)
        own = -(-accumulate // replicas)
        for (device, _), most in held.items():
            if schedule.name == "interleaved-1f1b":  # Megatron's warm-up, and one more
                limit = min(own * chunks, 2 * (devices - device - 1) + (chunks - 1) * devices + 1)
                whole = own * replicas == accumulate <= minibatches and own % devices == 0
                assert most == limit if whole else most <= limit
            else:  # the activations of p whole stages of 1F1B, whatever the device
                assert most <= min(2 * devices, 2 * own)
        peaks = replay_schedule(schedule, shapes, minibatches)
        assert all(peak <= schedule.held(shapes[stage]) for (stage, _), peak in peaks.items())
        for trains in (True, False):
            replay(streams_of(schedule, shapes, minibatches, trains=trains), shapes, most_queued=3)


def test_a_depth_that_is_too_small_is_noticed() -> None:
    schedule = SCHEDULES["interleaved-1f1b"]
    shapes = of_devices(schedule, 2, 2, 1, 4)
    shapes[0] = StageShape(1, shapes[0].depth - 1, 4, 0, 0)
    with pytest.raises(ReplayError, match="above depth"):
        replay_schedule(schedule, shapes, 8)


def test_replicas_start_their_all_reduces_in_one_order() -> None:
    """Whatever minibatches a short group leaves to each of them."""
    for schedule in VIRTUAL:
        for accumulate in range(1, 12):
            shapes = of_devices(schedule, 3, 2, 3, accumulate)
            streams = streams_of(schedule, shapes, 2 * accumulate + 1)
            for device in range(3):
                orders = [[one for one in streams[device, replica] if one[0] in "RU"] for replica in range(3)]
                assert orders[0] == orders[1] == orders[2]
