"""The link benchmark: what is timed and until when, who was lost; and once for real, on this machine."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import time
from collections import Counter

import pytest
import torch

from pipeplan_launch.comm.timed_traffic import CONNECT, FEWEST, WARM, TimeLimits, time_over_sizes
from pipeplan_launch.errors import LaunchError
from pipeplan_measure import pair_schedule
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
        assert one.samples[-1][0] > one.samples[0][0], "several sizes"
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


def places(*sizes: int) -> list[str]:
    return [f"server {number}" for number, size in enumerate(sizes) for _ in range(size)]


def connected(pairs: set[tuple[int, int]], workers: int) -> bool:
    home = list(range(workers))
    for one, other in pairs:
        home = [home[one] if at == home[other] else at for at in home]
    return len(set(home)) == 1


@pytest.mark.parametrize("sizes", [(4,), (4, 4), (3, 1, 2), (8,) * 16, (40,), (1,) * 20], ids=str)
def test_pairs_connect_all_workers_and_share_no_machine(sizes: tuple[int, ...]) -> None:
    where = places(*sizes)
    rounds = pair_schedule.pair_rounds(where, where)
    pairs = [pair for one in rounds for pair in one]
    assert len(set(pairs)) == len(pairs)
    assert all(one < other for one, other in pairs)
    for one in rounds:
        machines = [machine for pair in one for machine in {where[rank] for rank in pair}]
        assert len(set(machines)) == len(machines), "two pairs on one machine disturb each other"
    assert connected(set(pairs), len(where))
    between = {frozenset((where[a], where[b])) for a, b in pairs if where[a] != where[b]}
    assert len(between) == len(sizes) * (len(sizes) - 1) // 2, "every two servers meet"
    if len(where) <= pair_schedule.MAX_WORKERS_ALL_PAIRS:
        assert set(pairs) == set(itertools.combinations(range(len(where)), 2))


def test_what_would_share_cores_or_a_cable_runs_alone() -> None:
    rounds = pair_schedule.pair_rounds(places(2, 2, 2), ["one machine"] * 6)
    assert {len(one) for one in rounds} == {1}
    where = places(*(4,) * 6)
    for one in pair_schedule.pair_rounds(where, where):
        across = [pair for pair in one if where[pair[0]] != where[pair[1]]]
        assert len(across) <= 1, "few pairs of servers might share a cable behind their switches"


def test_jobs_of_two_servers_of_four() -> None:
    where = places(4, 4)
    partitions = (((0, 1, 2, 3), (4, 5, 6, 7)), (tuple(range(8)),))
    jobs = pair_schedule.level_jobs(partitions, where)
    for job in jobs:
        ranks = list(itertools.chain(*job.teams))
        assert len(set(ranks)) == len(ranks)
    found = {
        (job.kind, job.level): [one.teams for one in jobs if (one.kind, one.level) == (job.kind, job.level)]
        for job in jobs
    }
    assert found["message", 1] == [((3, 4),)], "alone"
    assert found["together", 1] == [((0, 4), (1, 5), (2, 6), (3, 7))], "all of a server at once, over its one card"
    assert found["ring", 1] == [(tuple(range(8)),), ((0, 4),)]
    assert found["message", 0] == [((0, 1), (4, 5)), ((1, 2), (5, 6)), ((2, 3), (6, 7))], "servers do not disturb"
    assert found["together", 0] == [((0, 1), (2, 3), (4, 5), (6, 7))]
    assert ((0, 1, 2, 3), (4, 5, 6, 7)) in found["ring", 0]


def test_every_server_of_many_is_measured_with_two_others() -> None:
    where = places(*(2,) * 5)
    partitions = (tuple((rank, rank + 1) for rank in range(0, 10, 2)), (tuple(range(10)),))
    met = Counter(
        where[rank]
        for job in pair_schedule.level_jobs(partitions, where)
        if (job.kind, job.level) == ("message", 1)
        for team in job.teams
        for rank in team
    )
    assert set(met.values()) == {2}


def test_levels_that_join_one_component_have_no_jobs() -> None:
    partitions = (((0,), (1,)), ((0, 1),))
    assert {job.level for job in pair_schedule.level_jobs(partitions, places(1, 1))} == {1}
