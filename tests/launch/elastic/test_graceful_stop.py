"""Where all workers stop, agreed through a store that changes between any two look-ups; and who hangs is ended."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from schedule_rules import FORWARD, TRAINING, fitted, least
from torch.distributed import HashStore  # type: ignore[attr-defined]

from pipeplan_launch.elastic import graceful_stop, signals
from pipeplan_launch.elastic.graceful_stop import GRANT_S, STOP_KEY, GracefulStop, HangWatch
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.plan.schedule import Action, Schedule, StageShape, own_minibatches
from pipeplan_launch.plan.schedule_check import replay_schedule
from pipeplan_launch.runtime.action_stream import worker_actions
from pipeplan_launch.runtime.engine import Engine


def stopped_at(schedule: Schedule, planned: int, end: int) -> Schedule:
    """The schedule as the engine runs it where a segment of `planned` minibatches is ended before minibatch `end`."""

    def stream(pipeline: Sequence[StageShape], stage: int, replica: int, _: int) -> Iterator[Action]:
        engine: Any = object.__new__(Engine)
        engine.schedule, engine.count = schedule, planned
        engine.place, engine.shapes = SimpleNamespace(stage=stage, replica=replica), pipeline
        engine.limit = lambda index: end if index >= end else None
        return iter([action for _, action in worker_actions([engine])])

    return replace(schedule, stream=stream)


@pytest.mark.parametrize("schedule", [*TRAINING, FORWARD], ids=lambda schedule: schedule.name)
def test_no_schedule_deadlocks_wherever_all_stop(schedule: Schedule) -> None:
    """The replay checks depths, groups, versions and that every minibatch before the end runs once.

    `test_virtual_stages.py` has the schedules whose workers run several stages.
    """
    draw = random.Random(7)
    small = [shape for stages in (1, 2, 3) for shape in itertools.product((1, 2, 3), repeat=stages)]
    for replicas in (*small, *(tuple(draw.choices(range(1, 7), k=draw.randint(4, 7))) for _ in range(8))):
        accumulate = max(least(schedule, replicas), 2)
        planned = 2 * accumulate + max(replicas)
        pipeline, ends = fitted(schedule, replicas, accumulate), range(planned + 1)
        for end in ends if replicas in small else draw.sample(ends, k=6):
            replay_schedule(stopped_at(schedule, planned, end), pipeline, end)


class Memory(HashStore):
    """A store in this process, which counts changes."""

    changes = 0

    def compare_set(self, *given: str) -> bytes:
        self.changes += 1
        return super().compare_set(*given)  # type: ignore[no-any-return]


class Later:
    """A look-up that runs when it is waited for, or earlier if the test lets it."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work: Callable[[], None] | None = work

    def done(self) -> bool:
        return self._work is None

    def result(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            work()


@pytest.fixture(autouse=True)
def no_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "handle_requests_with", lambda _request: None)


class Clock:
    """A clock that the test moves on, or that moves on by so many seconds whenever it is read."""

    def __init__(self, each_s: float = 0.0) -> None:
        self.now_s, self._each_s = 0.0, each_s

    def __call__(self) -> float:
        self.now_s += self._each_s
        return self.now_s


def worker(store: Memory, accumulate: int = 1, clock: Any = None, begin: Any = Later) -> GracefulStop:
    """One worker's view, in its first segment."""
    plan: Any = SimpleNamespace(accumulate=accumulate, schedule=SimpleNamespace(accumulates=accumulate > 1))
    made = GracefulStop(store, plan, clock=clock or Clock(), begin_look_up=begin)
    made.begin()
    return made


REPLICAS, PLANNED = [(0, 2), (1, 2), (0, 1), (0, 3), (1, 3), (2, 3)], 24


def run_together(seed: int, workers: list[GracefulStop], look_ups: list[Later]) -> set[tuple[bool, int]]:
    """All workers' forwards and look-ups, in a random order; at some moment one is asked to stop. What each is told at
    its end."""
    draw = random.Random(seed)
    todo = [list(own_minibatches(replica, count, PLANNED)) for replica, count in REPLICAS]
    begun, ends = set[int](), dict[int, tuple[bool, int]]()
    for moment in itertools.count():
        if moment == seed % 90:
            draw.choice(workers).request()
        running = [one for one in range(len(workers)) if one not in ends]
        if not running:
            break
        if look_ups and draw.random() < 0.3:
            look_ups.pop(draw.randrange(len(look_ups))).result()
        one = draw.choice(running)
        if todo[one] and workers[one].limit(todo[one][0]) is None:
            begun.add(todo[one].pop(0))
        else:
            ends[one] = (workers[one].end(), workers[one].reached(PLANNED))
    assert begun == set(range(ends[0][1])), "what has begun is what counts as run, by whoever"
    return set(ends.values())


@pytest.mark.parametrize("accumulate", [1, 4])
def test_all_workers_stop_at_the_same_minibatch(accumulate: int) -> None:
    early = 0
    for seed in range(300):
        store, look_ups = Memory(), list[Later]()

        def begin(work: Callable[[], None], begun: list[Later] = look_ups) -> Later:
            begun.append(Later(work))
            return begun[-1]

        workers = [worker(store, accumulate, Clock(GRANT_S / (1 + seed % 7)), begin) for _ in REPLICAS]
        ((stop, end),) = run_together(seed, workers, look_ups)
        assert end == PLANNED or end % accumulate == 0
        assert stop or end == PLANNED
        assert store.check([STOP_KEY]) or not stop
        early += end < PLANNED
    assert early > 50


def test_a_request_after_a_segment_was_closed_ends_the_next() -> None:
    store = Memory()
    first, second = worker(store), worker(store)
    assert first.limit(0) is None
    assert not first.end()
    second.request()
    assert second.limit(5) is None  # too late for this segment: the other has left it
    assert not second.end()
    for one in (second, first):
        one.begin()
        assert one.limit(0) == 0
        assert one.end()


def test_looking_up_is_rare_and_seldom_holds_up_training() -> None:
    """As far ahead as the step time says: a look-up of half a grant's time holds up every fifth minibatch at most."""
    for minibatches, in_a_grant in ((40, 10), (1000, 100)):
        store, begun, clock, held_up = Memory(), list[Later](), Clock(), list[int]()

        def begin(work: Callable[[], None], begun: list[Later] = begun) -> Later:
            begun.append(Later(work))
            return begun[-1]

        stopping = worker(store, clock=clock, begin=begin)
        for index in range(minibatches):
            under_way = [one for one in begun if not one.done()]
            assert stopping.limit(index) is None
            held_up += [index] if any(one.done() for one in under_way) else []
            clock.now_s += GRANT_S / in_a_grant
        # Minibatch 0 is granted with minibatch 1, and 2 with 3. From then on the step time is known.
        assert held_up[0] == 2
        assert all(late - early >= 5 for early, late in itertools.pairwise(held_up[1:]))
    assert int(store.get("grant/0")) == pytest.approx(1000, abs=101)
    assert store.changes < 50


def test_a_request_without_the_secret_is_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPEPLAN_SECRET", "the secret of this launch")
    for value in ("", "stop", "0" * 64):
        store = Memory()
        first = worker(store)
        store.set(STOP_KEY, value)
        assert first.limit(0) is None
        assert not first.end()
        second = worker(store)
        second.request()
        first.begin()
        assert first.end(), "one that knows it is heard"


def test_a_wrong_grant_is_one_line_at_the_next_minibatch() -> None:
    for value in ("x", "-1", "9" * 5000, "3 finally", "3 final\n", "\x1b[2J"):
        store = Memory()
        stopping = worker(store)
        assert stopping.limit(0) is None
        assert stopping.limit(1) is None  # begins a look-up
        store.set("grant/0", value)
        with pytest.raises(LaunchError, match=r"^the workers' common store holds a wrong value") as caught:
            stopping.limit(2)
        assert str(caught.value).isprintable()


def test_only_an_action_that_does_not_end_is_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graceful_stop, "GRACE_S", 0.2)
    ended, hung = list[float](), threading.Event()
    watch = HangWatch(0.2, lambda seconds: ended.append(seconds) or hung.set())  # type: ignore[func-returns-value]
    assert not hung.wait(0.6), "nothing has begun"
    watch.progress()
    watch.rest()
    assert not hung.wait(0.6), "the segment has ended"
    began = time.monotonic()
    watch.progress()
    assert hung.wait(30)
    assert 0.4 < ended[0] <= time.monotonic() - began
