"""The survey itself: who is there, what is timed and until when, who was lost; and once for real, on this machine."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from pipeplan_launch.errors import LaunchError, PeerLost
from pipeplan_launch.link_benchmark import rendezvous
from pipeplan_launch.link_benchmark.pair_schedule import BenchmarkSettings, PairRates
from pipeplan_launch.link_benchmark.rendezvous import (
    LossDetector,
    Participants,
    ReportedElsewhere,
    WorkerDescription,
    meet_workers,
)
from pipeplan_launch.link_benchmark.run import measure_on_this_machine, measure_under_torchrun
from pipeplan_launch.link_benchmark.traffic import CONNECT, FEWEST, WARM, TimeLimits, time_over_sizes

HELLO = WorkerDescription("place", "machine", "host", "cpu", 0, {})


def nothing(done: int, total: int, what: str) -> None:
    pass


def all_at_once(found: PairRates) -> tuple[tuple[tuple[int, ...], ...], ...]:
    return ((tuple(range(len(found.places))),),)


class Slow:
    """An operation whose time is its size."""

    def __init__(self, size: int, clock: list[float], log: list[str]) -> None:
        self.size, self.clock, self.log = size, clock, log

    def once(self) -> None:
        self.clock[0] += self.size
        self.log.append(f"{self.size}")

    def end(self) -> None:
        self.log.append("end")


def timed(
    sizes: list[int], limits: TimeLimits, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[tuple[int, float]], int, list[str]]:
    clock, log = [0.0], []  # type: ignore[var-annotated]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    samples, number = time_over_sizes(sizes, limits, lambda value: value, lambda size, _: Slow(size, clock, log))
    return list(samples), number, log


def test_sizes_go_on_while_there_is_time(monkeypatch: pytest.MonkeyPatch) -> None:
    samples, number, log = timed([1, 4, 16, 64], TimeLimits(200.0), monkeypatch)
    assert samples == [(1, 1.0), (4, 4.0), (16, 16.0)], "64 would take another 64 · 4"
    assert log.count("end") == 3
    assert number == len(log)


def test_two_sizes_are_measured_however_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    samples, number, _ = timed([1, 4, 16], TimeLimits(0.1), monkeypatch)
    assert [size for size, _ in samples] == [1, 4]
    assert number == CONNECT + 2 * (WARM + FEWEST + 1)


def test_a_size_that_is_enough_is_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    samples, _, _ = timed([1, 4, 16, 64], TimeLimits(1e6, enough_s=3.0), monkeypatch)
    assert [size for size, _ in samples] == [1, 4]


def test_who_has_no_part_counts_as_many_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers of messages must be the same everywhere."""
    said: list[float] = []
    monkeypatch.setattr(time, "perf_counter", iter(range(10**6)).__next__)
    clock, log = [0.0], []  # type: ignore[var-annotated]

    def speak(value: float) -> float:
        said.append(value)
        return value

    _, number = time_over_sizes([1, 4, 16], TimeLimits(100.0), speak, lambda size, _: Slow(size, clock, log))
    heard = iter(said)
    samples, idle = time_over_sizes(
        [1, 4, 16], TimeLimits(100.0), lambda value: max(value, next(heard)), lambda size, _: None
    )
    assert (samples, idle) == ((), number)


def test_missing_ranks_are_named() -> None:
    store = dist.HashStore()
    waiting: list[BaseException] = []

    def other() -> None:
        try:
            meet_workers(store, 2, 5, HELLO, 0.3)
        except ReportedElsewhere as error:
            waiting.append(error)

    thread = threading.Thread(target=other)
    thread.start()
    with pytest.raises(LaunchError, match=r"^ranks 1, 3 and 4 of 5 did not come within 0.3 s; nothing was written"):
        meet_workers(store, 0, 5, HELLO, 0.3)
    thread.join(20)
    assert len(waiting) == 1, "only rank 0 says so"


def test_rank_0_that_never_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "GRACE_S", 0.1)
    with pytest.raises(LaunchError, match=r"^rank 0 did not come within 0.1 s"):
        meet_workers(dist.HashStore(), 1, 2, HELLO, 0.1)


def test_one_that_cannot_take_part_is_quoted_by_rank_0() -> None:
    store = dist.HashStore()
    store.set("here/1", '"no CUDA device"')
    with pytest.raises(LaunchError, match=r"^rank 1: no CUDA device$"):
        meet_workers(store, 0, 2, HELLO, 5.0)
    with pytest.raises(ReportedElsewhere):
        meet_workers(store, 1, 2, "no CUDA device", 5.0)


def test_everyone_learns_what_all_said() -> None:
    store, met = dist.HashStore(), {}
    hellos = [replace(HELLO, place=f"place {rank}", facts={"cores": rank}) for rank in range(3)]

    def come(rank: int) -> None:
        met[rank] = meet_workers(store, rank, 3, hellos[rank], 20.0)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [met[rank].descriptions for rank in range(3)] == [tuple(hellos)] * 3


class Answering:
    """A store in which some ranks answer a fault at once."""

    def __init__(self, alive: tuple[int, ...], errors: tuple[int, ...] = ()) -> None:
        self.keys = {f"alive/{rank}" for rank in alive} | {f"error/{rank}" for rank in errors}

    def clone(self) -> Answering:
        return self

    def check(self, keys: list[str]) -> bool:
        return set(keys) <= self.keys

    def set(self, key: str, value: str) -> None:
        if key != "fault":  # the watching thread of this process has nothing to do here
            self.keys.add(key)


@pytest.mark.parametrize(
    ("rank", "alive", "errors", "error", "said"),
    [
        (0, (0, 1, 3), (), PeerLost("closed"), "rank 2 was lost while links were measured; nothing was written"),
        (1, (0, 1, 3), (), PeerLost("closed"), None),
        (1, (1, 3), (), PeerLost("closed"), "ranks 0 and 2 were lost while links were measured; nothing was written"),
        (0, (0, 1, 2, 3), (), PeerLost("timed out"), "timed out"),
        (1, (0, 1, 2, 3), (), LaunchError("no memory"), "no memory"),
        (0, (0, 1, 2, 3), (1,), PeerLost("closed"), None),
    ],
    ids=["one", "not-the-lowest", "two", "nobody", "own", "anothers"],
)
def test_who_was_lost_is_said_once(
    rank: int, alive: tuple[int, ...], errors: tuple[int, ...], error: LaunchError, said: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("pipeplan_launch.link_benchmark.rendezvous.ANSWER_S", 0.05)
    loss_detector = LossDetector(Participants(Answering(alive, errors), rank, (HELLO,) * 4))
    loss_detector.end()
    explained = loss_detector.explain(error)
    if said is None:
        assert isinstance(explained, ReportedElsewhere)
    else:
        assert isinstance(explained, LaunchError)
        assert str(explained) == said


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"RANK": "0", "WORLD_SIZE": "1"}, "WORLD_SIZE is 1, and there is no link without a second worker"),
        ({"RANK": "3", "WORLD_SIZE": "3"}, "RANK is 3 and WORLD_SIZE 3"),
        ({"RANK": "one", "WORLD_SIZE": "3"}, "RANK is 'one': it must be a number"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR and MASTER_PORT of rank 0 must be set"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "x"}, "MASTER_PORT is 'x'"),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}, "nothing answers at"),
    ],
    ids=["alone", "beyond", "no-number", "no-address", "no-port", "nobody"],
)
def test_an_environment_that_makes_no_sense(
    variables: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LaunchError, match=said):
        measure_under_torchrun(BenchmarkSettings(timeout_s=0.2), all_at_once, nothing)


def test_two_workers_of_this_machine() -> None:
    steps: list[tuple[int, int, str]] = []
    found = measure_on_this_machine(
        2, BenchmarkSettings(budget_s=0.5, facts={"cores": 5}), all_at_once, lambda *step: steps.append(step)
    )
    assert len(set(found.found.places)) == 1
    assert found.found.pairs.keys() == {(0, 1)}
    assert found.facts == ({"cores": 5},) * 2
    kinds = {(one.kind, one.level, one.ranks): one for one in found.timed}
    assert kinds.keys() == {("message", 0, (0, 1)), ("ring", 0, (0, 1))}
    assert {one.way for one in found.timed} == {"Gloo"}
    for one in found.timed:
        assert len(one.samples) >= 2
        assert all(seconds > 0 for _, seconds in one.samples)
        assert one.samples[-1][1] > one.samples[0][1], "more bytes take longer"
    assert steps[-1][0] == steps[-1][1]
    assert not multiprocessing.active_children()


def test_what_finding_levels_raises_comes_out() -> None:
    def refuse(found: PairRates) -> tuple[tuple[tuple[int, ...], ...], ...]:
        raise ValueError("no such levels")

    with pytest.raises(ValueError, match="no such levels"):
        measure_on_this_machine(2, BenchmarkSettings(budget_s=0.2), refuse, nothing)
    assert not multiprocessing.active_children()


def test_a_worker_that_is_killed_is_named() -> None:
    earlier = children(os.getpid())  # of other tests in this process

    def strike(found: PairRates) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """In worker 0, whose parent's other new child is worker 1."""
        (other,) = (pid for pid in children(os.getppid()) if pid not in (*earlier, os.getpid()))
        os.kill(other, signal.SIGKILL)
        return all_at_once(found)

    with pytest.raises(LaunchError, match=r"^worker 1 was ended by SIGKILL; nothing was written$"):
        measure_on_this_machine(2, BenchmarkSettings(budget_s=0.2), strike, nothing)
    assert not multiprocessing.active_children()


def children(parent: int) -> list[int]:
    with open(f"/proc/{parent}/task/{parent}/children", encoding="ascii") as listed:
        return [int(text) for text in listed.read().split()]


def test_one_worker_has_no_links() -> None:
    with pytest.raises(LaunchError, match="there is no link with 1 worker"):
        measure_on_this_machine(1, BenchmarkSettings(), all_at_once, nothing)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_no_device_is_said() -> None:
    with pytest.raises(LaunchError, match="torch finds no CUDA device"):
        measure_on_this_machine(2, BenchmarkSettings(device="cuda"), all_at_once, nothing)
