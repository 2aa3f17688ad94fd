"""The link benchmark: what is timed and until when, who was lost; and once for real, on this machine."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time

import pytest
import torch

from pipeplan_launch.comm.timed_traffic import CONNECT, FEWEST, WARM, TimeLimits, time_over_sizes
from pipeplan_launch.errors import LaunchError
from pipeplan_measure.links import measure_links
from pipeplan_measure.pair_schedule import BenchmarkSettings, PairRates, ServerShare


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


def test_sizes_go_on_while_there_is_time_and_something_to_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    samples, number, log = timed([1, 4, 16, 64], TimeLimits(200.0), monkeypatch)
    assert samples == [(1, 1.0), (4, 4.0), (16, 16.0)], "64 would take another 64 · 4"
    assert log.count("end") == 3
    assert number == len(log)
    samples, number, _ = timed([1, 4, 16], TimeLimits(0.1), monkeypatch)
    assert [size for size, _ in samples] == [1, 4], "two sizes are measured however slow"
    assert number == CONNECT + 2 * (WARM + FEWEST + 1)
    samples, _, _ = timed([1, 4, 16, 64], TimeLimits(1e6, enough_s=3.0), monkeypatch)
    assert [size for size, _ in samples] == [1, 4], "a size that is enough is the last"


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


def test_two_workers_of_this_machine() -> None:
    steps: list[tuple[int, int, str]] = []
    found = measure_links(
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


def test_what_ends_a_benchmark_ends_all_its_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(found: PairRates) -> tuple[tuple[tuple[int, ...], ...], ...]:
        raise ValueError("no such levels")

    with pytest.raises(ValueError, match="no such levels"):
        measure_links(2, BenchmarkSettings(budget_s=0.2), refuse, nothing)
    with pytest.raises(LaunchError, match=r"^the file exists$"):
        measure_links(2, BenchmarkSettings(budget_s=60, refusal="the file exists"), all_at_once, nothing)
    with pytest.raises(LaunchError, match="there is no link with 1 worker"):
        measure_links(1, BenchmarkSettings(), all_at_once, nothing)
    if not torch.cuda.is_available():
        with pytest.raises(LaunchError, match="torch finds no CUDA device"):
            measure_links(2, BenchmarkSettings(device="cuda"), all_at_once, nothing)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(21000 + os.getpid() % 20000))
    with pytest.raises(LaunchError, match=r"^workers 2 and 3 did not come$"):
        measure_links(2, BenchmarkSettings(timeout_s=1.5), all_at_once, nothing, ServerShare(2, 0))
    assert not multiprocessing.active_children()


def test_a_worker_that_is_killed_is_named() -> None:
    earlier = children(os.getpid())  # of other tests in this process

    def strike(found: PairRates) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """In worker 0, whose parent's other new child is worker 1."""
        (other,) = (pid for pid in children(os.getppid()) if pid not in (*earlier, os.getpid()))
        os.kill(other, signal.SIGKILL)
        return all_at_once(found)

    with pytest.raises(LaunchError, match=r"^worker 1 was ended by SIGKILL; nothing was written$"):
        measure_links(2, BenchmarkSettings(budget_s=0.2), strike, nothing)
    assert not multiprocessing.active_children()


def children(parent: int) -> list[int]:
    with open(f"/proc/{parent}/task/{parent}/children", encoding="ascii") as listed:
        return [int(text) for text in listed.read().split()]
