"""The benchmark in one worker: measures all pairs, then each level that rank 0 has found in their rates.

All workers go through the same steps, whether or not they take part in one, and wait for each other between steps.
Workers that wait do not disturb the measurement.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pipeplan_launch.comm.p2p import Transport, peer_loss_explained
from pipeplan_launch.elastic import process_groups
from pipeplan_launch.link_benchmark import pair_schedule
from pipeplan_launch.link_benchmark.pair_schedule import (
    ALL_PAIRS_AT_ONCE,
    KIB,
    MESSAGE,
    MIB,
    RING,
    SIZES,
    BenchmarkSettings,
    FindLevels,
    MeasuredLinks,
    PairRates,
    Partition,
    ShowProgress,
    TimedOperation,
)
from pipeplan_launch.link_benchmark.rendezvous import Participants, ReportedElsewhere
from pipeplan_launch.link_benchmark.server_check import check_servers
from pipeplan_launch.link_benchmark.traffic import (
    AllReduce,
    Operation,
    ProcessGroupExchange,
    TimeLimits,
    TransportExchange,
    agree_over,
    time_over_sizes,
)

PAIR_SIZES = (4 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB)
TOGETHER_SIZES = (64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB)
ENOUGH_S = 0.01
"""Time of a pair's message after which no larger size is measured: it would not help to find the levels."""
PAIRS_SHARE = 0.4
"""Share of the time budget for measuring pairs."""
SHORTEST_S, LONGEST_S, LONGEST_PAIR_S = 0.15, 3.0, 0.3
"""Limits of the time for one step, and for one pair."""


class LinkBenchmark:
    """The measurements of one worker."""

    def __init__(
        self, participants: Participants, settings: BenchmarkSettings, device: torch.device, backend: str
    ) -> None:
        """Connect to all other workers, which do the same at the same time."""
        self._participants, self._settings, self._device, self._backend = participants, settings, device, backend
        self._rank, self._world = participants.rank, participants.world
        self._began = time.monotonic()
        self._number = 0
        """Messages so far. The count is the same in all workers, so that no two messages have the same number."""
        timeout = timedelta(seconds=settings.timeout_s + 10 * LONGEST_S)
        with peer_loss_explained("the workers could not connect to each other"):
            self.everyone: Any = dist.new_group(list(range(self._world)), backend="gloo", timeout=timeout)
        self._transport = Transport(0, self._rank, device, self.everyone)

    def run(self, levels: FindLevels, show: ShowProgress) -> MeasuredLinks | None:
        """Measure; returns the result at rank 0, else None. Raises `LaunchError` (also `PeerLost`) or
        `ReportedElsewhere`."""
        with peer_loss_explained("a link failed"):
            return self._run(levels, show)

    def _run(self, levels: FindLevels, show: ShowProgress) -> MeasuredLinks | None:
        pairs = self._pairs(show)
        found = PairRates(self._participants.places, {(one.ranks[0], one.ranks[1]): _rate(one) for one in pairs})
        partitions: tuple[Partition, ...] | None = None
        try:
            partitions = levels(found) if self._rank == 0 else None
        finally:  # also if `levels` raises, because the other workers wait for this message
            partitions = process_groups.broadcast(partitions, 0, self.everyone, tuple[Partition, ...] | None)
        if partitions is None:
            raise ReportedElsewhere
        timed = self._levels(partitions, show)
        machines, places = self._participants.machines, self._participants.places
        servers = check_servers(places, self._device, self.everyone) if self._settings.servers else None
        if self._rank:
            return None
        facts, hosts = zip(*((one.facts, one.host) for one in self._participants.descriptions), strict=True)
        return MeasuredLinks(found, machines, hosts, facts, tuple(timed), servers)

    def _pairs(self, show: ShowProgress) -> list[TimedOperation]:
        rounds = pair_schedule.pair_rounds(self._participants.places, self._participants.machines)
        each = self._settings.budget_s * PAIRS_SHARE / len(rounds)
        limits = TimeLimits(min(LONGEST_PAIR_S, max(SHORTEST_S / 3, each)), ENOUGH_S)
        direct = self._backend == "nccl"
        if direct:  # NCCL connects all workers at its first operation, so a first message would need all of them
            dist.all_reduce(torch.zeros(1, device=self._device))
        mine: list[TimedOperation] = []
        for number, pairs in enumerate(rounds):
            show(number, len(rounds), f"pairs of workers: {' '.join(f'{one}-{two}' for one, two in pairs[:4])}")
            mine += self._measure(
                pair_schedule.MeasurementJob(MESSAGE, -1, tuple(pairs)), PAIR_SIZES, limits, direct=direct
            )
        return self._collected(mine)

    def _levels(self, partitions: Iterable[Partition], show: ShowProgress) -> list[TimedOperation]:
        jobs = pair_schedule.level_jobs(tuple(partitions), self._participants.machines)
        groups = self._groups(jobs)
        left = process_groups.broadcast(
            self._began + self._settings.budget_s - time.monotonic(), 0, self.everyone, float
        )
        limits = TimeLimits(min(LONGEST_S, max(SHORTEST_S, left / len(jobs))))
        mine: list[TimedOperation] = []
        for number, job in enumerate(jobs):
            show(number, len(jobs), f"level {job.level + 1}: {_DESCRIPTIONS[job.kind]}")
            sizes = TOGETHER_SIZES if job.kind == ALL_PAIRS_AT_ONCE else SIZES
            mine += self._measure(job, sizes, limits, groups)
        show(len(jobs), len(jobs), "done")
        return self._collected(mine)

    def _groups(self, jobs: Iterable[pair_schedule.MeasurementJob]) -> dict[tuple[int, ...], Any]:
        """A process group for every group that reduces. All workers make all of them in the same order."""
        timeout = timedelta(seconds=self._settings.timeout_s)
        wanted = dict.fromkeys(team for job in jobs if job.kind == RING for team in job.teams)
        return {team: dist.new_group(list(team), timeout=timeout, backend=self._backend) for team in wanted}

    def _measure(
        self,
        job: pair_schedule.MeasurementJob,
        sizes: tuple[int, ...],
        limits: TimeLimits,
        groups: dict[tuple[int, ...], Any] | None = None,
        *,
        direct: bool = False,
    ) -> list[TimedOperation]:
        """This worker's times, if it takes part in the job."""
        team = next((team for team in job.teams if self._rank in team), None)

        def make(size: int, number: int) -> Operation | None:
            if team is None:
                return None
            if job.kind == RING:
                assert groups is not None
                return AllReduce(groups[team], size, self._device)
            peer = team[0] if team[1] == self._rank else team[1]
            if direct:
                return ProcessGroupExchange(self._rank, peer, size, self._device, None)
            return TransportExchange(self._transport, self._rank, peer, size, self._number + number, self._device)

        samples, messages = time_over_sizes(sizes, limits, agree_over(self.everyone), make)
        self._number += messages
        return [] if team is None else [TimedOperation(job.kind, job.level, team, self._way(job, direct), samples)]

    def _way(self, job: pair_schedule.MeasurementJob, direct: bool) -> str:
        return "NCCL" if direct or (job.kind == RING and self._backend == "nccl") else "Gloo"

    def _collected(self, mine: list[TimedOperation]) -> list[TimedOperation]:
        """At rank 0, the times of every team: at each size the longest time of its members."""
        merged: dict[tuple[str, int, tuple[int, ...]], TimedOperation] = {}
        for one in (
            one for each in process_groups.gather_at(mine, 0, self.everyone, list[TimedOperation]) for one in each
        ):
            known = merged.setdefault((one.kind, one.level, one.ranks), one)
            samples = tuple(max(pair) for pair in zip(known.samples, one.samples, strict=True))
            merged[one.kind, one.level, one.ranks] = TimedOperation(one.kind, one.level, one.ranks, one.way, samples)
        return list(merged.values())


_DESCRIPTIONS = {MESSAGE: "messages", ALL_PAIRS_AT_ONCE: "messages, all at once", RING: "all-reduce"}


def _rate(timed: TimedOperation) -> float:
    """Rate at the largest size, in bytes/s."""
    size, seconds = timed.samples[-1]
    return size / seconds
