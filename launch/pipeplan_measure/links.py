"""The link benchmark: starts workers on this machine, which measure all pairs. The pairs' rates show the levels of the
network, and the workers then measure each level.

Workers are forked, so that torch is imported once, and join as in a run (`pipeplan_launch.elastic`). Each of several
machines starts its own workers, and worker 0 of the first machine has the result. All workers go through the same
steps, even without a part in a step. They wait for each other between steps, so that no worker disturbs a measurement.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist

from pipeplan_launch.comm.p2p import peer_loss_explained
from pipeplan_launch.comm.timed_traffic import TeamTimer, TimeLimits
from pipeplan_launch.devices.backend import backend_of
from pipeplan_launch.elastic import process_groups
from pipeplan_launch.elastic.local_workers import keep_inherited_objects, stay_on_loopback, worker_variables
from pipeplan_launch.elastic.process_groups import FailedElsewhere
from pipeplan_launch.elastic.rendezvous import join_attempt
from pipeplan_launch.elastic.signals import die_with_parent
from pipeplan_launch.elastic.store import serve_store
from pipeplan_launch.errors import LaunchError, PeerLost
from pipeplan_launch.rank_mapping.rank_assignment import RankAssignment
from pipeplan_launch.telemetry.memory import keep_freed_memory
from pipeplan_measure.pair_schedule import (
    ALL_PAIRS_AT_ONCE,
    MESSAGE,
    RING,
    SIZES,
    BenchmarkSettings,
    FindLevels,
    MeasuredLinks,
    MeasurementJob,
    PairRates,
    Partition,
    ServerShare,
    ShowProgress,
    TimedOperation,
    level_jobs,
    pair_rounds,
)
from pipeplan_measure.servers import check_servers

KIB, MIB = 2**10, 2**20
PAIR_SIZES = (4 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB)
TOGETHER_SIZES = (64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB)
ENOUGH_S = 0.01
"""If a pair's message takes longer, no larger size is measured, because it would not help to find the levels."""
PAIRS_SHARE = 0.4
"""Share of the time budget for measuring pairs."""
SHORTEST_S, LONGEST_S, LONGEST_PAIR_S = 0.15, 3.0, 0.3
"""Limits of the time for one step, and for one pair."""
SHOW, DONE, FAILED = "show", "done", "failed"
PATIENCE_S = 10.0
"""Seconds within which a worker must end after it has sent its results."""
GRACE_S = 3.0
"""Seconds after its own timeout that a worker waits for worker 0 to name the missing workers."""
DEATH_S = 1.0
"""Seconds within which a killed worker is found after its peers have lost it."""
_DESCRIPTIONS = {MESSAGE: "messages", ALL_PAIRS_AT_ONCE: "messages, all at once", RING: "all-reduce"}


def measure_links(
    workers: int, settings: BenchmarkSettings, levels: FindLevels, show: ShowProgress, share: ServerShare | None = None
) -> MeasuredLinks | None:
    """Measure the links between `workers` workers of this machine. All workers have ended when this returns or raises.

    With a `share`, this measures the links between several machines, and each machine calls it. The machines meet at
    MASTER_ADDR and MASTER_PORT. The first machine returns the result. The others return None, or raise `SystemExit` if
    the first machine reports an error. Raises `LaunchError`, and the errors that `levels` raises.
    """
    place = share or ServerShare()
    if workers * place.servers < 2:
        raise LaunchError(f"there is no link with {workers} worker: give --workers 2 or more")
    store = None if share else serve_store(timedelta(seconds=settings.timeout_s))
    with _started(workers, settings, levels, place, None if store is None else store.port) as ends:
        return _listen(ends, show, place)


@contextmanager
def _started(
    workers: int, settings: BenchmarkSettings, levels: FindLevels, share: ServerShare, port: int | None
) -> Iterator[dict[Connection, BaseProcess]]:
    """Start the workers; yields the process of each worker, by its message connection. `port`: as for `_work`."""
    context = multiprocessing.get_context("fork")
    ends: dict[Connection, BaseProcess] = {}
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        for rank in range(share.number * workers, (share.number + 1) * workers):
            mine, theirs = context.Pipe(duplex=False)
            arguments = (theirs, rank, workers * share.servers, settings, levels, port)
            ends[mine] = context.Process(target=_work, args=arguments, name=f"worker {rank}", daemon=True)
            ends[mine].start()
            theirs.close()
        yield ends
    finally:
        for process in ends.values():
            if process.pid is not None:
                process.kill()
                process.join()


def _listen(ends: dict[Connection, BaseProcess], show: ShowProgress, share: ServerShare) -> MeasuredLinks | None:
    """Relay the progress of the workers until they have ended. Raises the error of a worker that fails."""
    open_ends = dict(ends)
    while open_ends:
        for end in wait(list(open_ends)):
            assert isinstance(end, Connection)
            try:
                kind, *content = end.recv()
            except EOFError:
                _refuse_killed([open_ends.pop(end)])
                continue
            if kind == SHOW:
                show(*content)
            elif kind == FAILED:
                if isinstance(content[0], PeerLost):  # the cause may be that another worker was killed
                    others = {process.sentinel: process for process in ends.values() if process is not ends[end]}
                    _refuse_killed(others[ended] for ended in wait(list(others), DEATH_S) if isinstance(ended, int))
                raise content[0]
            else:
                for process in ends.values():
                    process.join(PATIENCE_S)
                measured: MeasuredLinks = content[0]
                return measured
    if any(process.exitcode for process in ends.values()):
        raise SystemExit(2)
    if not share.number:
        raise LaunchError("all workers ended without giving a reason; nothing was written")
    return None


def _refuse_killed(processes: Iterable[BaseProcess]) -> None:
    """Raise `LaunchError` if a signal ended one of these processes."""
    for process in processes:
        process.join()
        if (status := process.exitcode or 0) < 0:
            raise LaunchError(f"{process.name} was ended by {signal.Signals(-status).name}; nothing was written")


def _work(
    end: Connection, rank: int, world: int, settings: BenchmarkSettings, levels: FindLevels, port: int | None
) -> None:
    """Run one worker. It never returns, so that nothing of the parent process is cleaned up a second time.

    `port`: the port at which the parent process serves the store; None if the machines meet at MASTER_ADDR and
    MASTER_PORT.
    """
    status = 2
    try:
        keep_inherited_objects()
        die_with_parent()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process receives it too, and ends the workers
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        variables = worker_variables(rank, world, port or 0)
        if port is None:  # worker 0 serves the store
            ours = {"MASTER_ADDR", "MASTER_PORT", "LOCAL_WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE"}
            variables = {name: value for name, value in variables.items() if name not in ours}
            os.environ.pop("LOCAL_WORLD_SIZE", None)
        os.environ |= variables
        torch.set_num_threads(1)
        keep_freed_memory()
        measured = LinkBenchmark(settings).run(levels, lambda *step: end.send((SHOW, *step)) if rank == 0 else None)
        dist.destroy_process_group()
        if rank == 0:
            end.send((DONE, measured))
        status = 0
    except FailedElsewhere:
        pass
    except Exception as error:
        with suppress(OSError):
            end.send((FAILED, error))
    finally:
        os._exit(status)


class LinkBenchmark:
    """The measurements of one worker."""

    def __init__(self, settings: BenchmarkSettings) -> None:
        """Join all other workers, found through torchrun's environment, and connect to them.

        Raises `LaunchError`, or `FailedElsewhere` if another worker reports an error.
        """
        backend = backend_of(settings.device)
        if settings.device == "cuda" and not backend.cards():
            raise LaunchError(f"--device cuda: torch finds no CUDA device on {socket.gethostname()}; give --device cpu")
        patience_s = settings.timeout_s + (GRACE_S if int(os.environ["RANK"]) else 0.0)
        attempt = join_attempt(patience_s, backend.cards())
        assignment = RankAssignment.of([attempt.world], attempt.locations)
        if len({bool(location.devices) for location in attempt.locations}) > 1:
            raise LaunchError("some workers measure cpu and some cuda: give all of them the same --device")
        if assignment.is_one_network:
            stay_on_loopback(os.environ)
        names = backend.process_groups(assignment.own_device_each())
        self._settings, self._locations, self._rank = settings, attempt.locations, attempt.rank
        self._backend = "nccl" if "nccl" in names else "gloo"
        self._device = backend.select(assignment.device(attempt.rank))
        timeout, longer = (timedelta(seconds=settings.timeout_s + more) for more in (0, 10 * LONGEST_S))
        with peer_loss_explained("the workers could not connect to each other"):
            place = {"store": attempt.torch_store, "rank": attempt.rank, "world_size": attempt.world}
            dist.init_process_group(names, timeout=timeout, **place)
            self._everyone: Any = dist.new_group(list(range(attempt.world)), backend="gloo", timeout=longer)
        if refusal := process_groups.broadcast(settings.refusal, 0, self._everyone, str):
            if attempt.rank:
                raise FailedElsewhere
            raise LaunchError(refusal)
        self._timer = TeamTimer(self._device, self._everyone)
        self._began = time.monotonic()

    @peer_loss_explained("a link failed; nothing was written")
    def run(self, levels: FindLevels, show: ShowProgress) -> MeasuredLinks | None:
        """Measure; returns the result at rank 0, else None. Raises `LaunchError` (also `PeerLost`) or
        `FailedElsewhere`.
        """
        machines = tuple(location.machine for location in self._locations)
        places = tuple(f"{location.machine}/{location.network}" for location in self._locations)
        pairs = self._pairs(pair_rounds(places, machines), show)
        rates = {(one.ranks[0], one.ranks[1]): one.samples[-1][0] / one.samples[-1][1] for one in pairs}
        found = PairRates(places, rates)
        partitions: tuple[Partition, ...] | None = None
        try:
            partitions = levels(found) if self._rank == 0 else None
        finally:  # also if `levels` raises, because the other workers wait for this message
            kind = tuple[Partition, ...] | None
            partitions = process_groups.broadcast(partitions, 0, self._everyone, kind)
        if partitions is None:
            raise FailedElsewhere
        timed = self._levels(level_jobs(partitions, machines), show)
        servers = check_servers(places, self._device, self._everyone) if self._settings.servers else None
        facts = process_groups.gather_at(dict(self._settings.facts), 0, self._everyone, dict[str, str | int | float])
        hosts = tuple(location.host for location in self._locations)
        process_groups.wait_for(self._everyone)
        return None if self._rank else MeasuredLinks(found, machines, hosts, tuple(facts), tuple(timed), servers)

    def _pairs(self, rounds: list[list[tuple[int, int]]], show: ShowProgress) -> list[TimedOperation]:
        each = self._settings.budget_s * PAIRS_SHARE / len(rounds)
        limits = TimeLimits(min(LONGEST_PAIR_S, max(SHORTEST_S / 3, each)), ENOUGH_S)
        direct = self._backend == "nccl"
        if direct:  # NCCL connects all workers at its first operation, so a first message would need all of them
            dist.all_reduce(torch.zeros(1, device=self._device))
        mine: list[TimedOperation] = []
        for number, pairs in enumerate(rounds):
            show(number, len(rounds), f"pairs of workers: {' '.join(f'{one}-{two}' for one, two in pairs[:4])}")
            mine += self._measure(MeasurementJob(MESSAGE, -1, tuple(pairs)), PAIR_SIZES, limits, direct=direct)
        return self._collected(mine)

    def _levels(self, jobs: list[MeasurementJob], show: ShowProgress) -> list[TimedOperation]:
        timeout = timedelta(seconds=self._settings.timeout_s)
        rings = dict.fromkeys(team for job in jobs if job.kind == RING for team in job.teams)
        # All workers make all groups, in the same order.
        groups = {team: dist.new_group(list(team), timeout=timeout, backend=self._backend) for team in rings}
        left = self._began + self._settings.budget_s - time.monotonic()
        left = process_groups.broadcast(left, 0, self._everyone, float)
        limits = TimeLimits(min(LONGEST_S, max(SHORTEST_S, left / len(jobs))))
        mine: list[TimedOperation] = []
        for number, job in enumerate(jobs):
            show(number, len(jobs), f"level {job.level + 1}: {_DESCRIPTIONS[job.kind]}")
            sizes = TOGETHER_SIZES if job.kind == ALL_PAIRS_AT_ONCE else SIZES
            mine += self._measure(job, sizes, limits, groups)
        show(len(jobs), len(jobs), "done")
        return self._collected(mine)

    def _measure(
        self,
        job: MeasurementJob,
        sizes: tuple[int, ...],
        limits: TimeLimits,
        groups: dict[tuple[int, ...], Any] | None = None,
        *,
        direct: bool = False,
    ) -> list[TimedOperation]:
        """This worker's times, if it takes part in the job. `direct`: pairs exchange messages through NCCL."""
        team = next((team for team in job.teams if self._rank in team), None)
        ring = groups[team] if groups is not None and team is not None and job.kind == RING else None
        samples = self._timer(team, sizes, limits, ring, direct=direct)
        way = "NCCL" if direct or (job.kind == RING and self._backend == "nccl") else "Gloo"
        return [] if team is None else [TimedOperation(job.kind, job.level, team, way, samples)]

    def _collected(self, mine: list[TimedOperation]) -> list[TimedOperation]:
        """The times of every team, at rank 0. The time at each size is the longest time of the team's members."""
        merged: dict[tuple[str, int, tuple[int, ...]], TimedOperation] = {}
        gathered = process_groups.gather_at(mine, 0, self._everyone, list[TimedOperation])
        for one in (one for each in gathered for one in each):
            known = merged.setdefault((one.kind, one.level, one.ranks), one)
            samples = tuple(max(pair) for pair in zip(known.samples, one.samples, strict=True))
            merged[one.kind, one.level, one.ranks] = TimedOperation(one.kind, one.level, one.ranks, one.way, samples)
        return list(merged.values())
