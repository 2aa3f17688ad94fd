"""Runs the link benchmark: as one worker under torchrun, or with workers forked from this process.

Forking imports torch once for all workers.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist

from pipeplan_launch.allocator import keep_freed_memory
from pipeplan_launch.elastic import process_groups
from pipeplan_launch.elastic.local_workers import keep_inherited_objects, worker_variables
from pipeplan_launch.elastic.loopback_store import serve_store
from pipeplan_launch.elastic.signals import die_with_parent
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.link_benchmark.pair_schedule import (
    BenchmarkSettings,
    FindLevels,
    MeasuredLinks,
    ServerShare,
    ShowProgress,
)
from pipeplan_launch.link_benchmark.rendezvous import (
    LossDetector,
    ReportedElsewhere,
    WorkerDescription,
    describe_worker,
    env_store,
    join_process_group,
    meet_workers,
)
from pipeplan_launch.link_benchmark.survey import LinkBenchmark
from pipeplan_launch.typed_document import shortened, whole_number

QUIET_S = 1.5
"""Delay before a worker without a message ends. torchrun kills all workers as soon as one has ended, and the one that
reports the error must come first."""
SHOW, DONE, FAILED = "show", "done", "failed"
PATIENCE_S = 10.0
"""Time for a worker to end after it has sent its results."""


def measure_under_torchrun(settings: BenchmarkSettings, levels: FindLevels, show: ShowProgress) -> MeasuredLinks | None:
    """Run the worker that RANK and WORLD_SIZE name, as torchrun sets them; returns the result at rank 0, else None.

    Raises `LaunchError`, or `SystemExit` if another worker reports the error.
    """
    rank, world = _number("RANK"), _number("WORLD_SIZE")
    if not 0 <= rank < world:
        raise LaunchError(f"RANK is {rank} and WORLD_SIZE {world}: ranks count from 0 to WORLD_SIZE - 1")
    if world < 2:
        raise LaunchError("WORLD_SIZE is 1, and there is no link without a second worker: start at least two")
    try:
        return run_benchmark_worker(env_store(rank, settings.timeout_s), rank, world, settings, levels, show)
    except ReportedElsewhere:
        time.sleep(QUIET_S)
        raise SystemExit(2) from None


def run_benchmark_worker(
    store: Any, rank: int, world: int, settings: BenchmarkSettings, levels: FindLevels, show: ShowProgress
) -> MeasuredLinks | None:
    """Meet the other workers in a store, and measure; returns the result at rank 0, else None.

    Raises `LaunchError`, or `ReportedElsewhere` if another worker reports the error.
    """
    torch.set_num_threads(1)
    keep_freed_memory()
    participants = meet_workers(store, rank, world, _description_or_refusal(settings), settings.timeout_s)
    loss_detector = LossDetector(participants)
    try:
        device, backend = join_process_group(participants, settings.timeout_s)
        survey = LinkBenchmark(participants, settings, device, backend)
        measured = survey.run(levels, show)
        process_groups.wait_for(survey.everyone)
        loss_detector.end()
        dist.destroy_process_group()
    except LaunchError as error:
        raise loss_detector.explain(error) from error
    return measured


def _description_or_refusal(settings: BenchmarkSettings) -> WorkerDescription | str:
    if settings.refusal:
        return settings.refusal
    try:
        return describe_worker(settings)
    except LaunchError as error:
        return str(error)


def _number(name: str) -> int:
    text = os.environ.get(name, "")
    if (number := whole_number(text)) is None:
        raise LaunchError(f"{name} is {shortened(text)}: it must be a number, as torchrun sets it")
    return number


def measure_on_this_machine(
    workers: int, settings: BenchmarkSettings, levels: FindLevels, show: ShowProgress, share: ServerShare | None = None
) -> MeasuredLinks | None:
    """Measure the links between `workers` workers of this machine. All of them have ended when this returns or raises.

    With a `share`, the links between several machines are measured, on each of which this is called. The machines meet
    at MASTER_ADDR and MASTER_PORT. The first one returns the result; the others return None, or raise `SystemExit` if
    the first one reports an error. Raises `LaunchError`, and the errors that `levels` raises.
    """
    if workers * (share or ServerShare()).servers < 2:
        raise LaunchError(f"there is no link with {workers} worker: give --workers 2 or more")
    store = None if share else serve_store(timedelta(seconds=settings.timeout_s))
    place = share or ServerShare()
    with _started(workers, settings, levels, place, None if store is None else store.port) as ends:
        return _listen(ends, show, place)


@contextmanager
def _started(
    workers: int, settings: BenchmarkSettings, levels: FindLevels, share: ServerShare, port: int | None
) -> Iterator[dict[Connection, BaseProcess]]:
    """Start the workers; yields them by the connection on which each sends its messages. `port`: as for `_work`."""
    context = multiprocessing.get_context("fork")
    ends: dict[Connection, BaseProcess] = {}
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        world = workers * share.servers
        for rank in range(share.number * workers, (share.number + 1) * workers):
            mine, theirs = context.Pipe(duplex=False)
            # One worker is enough to report that the file cannot be written.
            own = settings if rank == 0 else replace(settings, refusal="")
            arguments = (theirs, rank, world, own, levels, port)
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
    open_ends = dict(ends)
    while open_ends:
        for end in wait(list(open_ends)):
            assert isinstance(end, Connection)
            try:
                kind, *content = end.recv()
            except EOFError:
                _check_end(open_ends.pop(end))
                continue
            if kind == SHOW:
                show(*content)
            elif kind == FAILED:
                raise content[0]
            else:
                measured = content[0]
                assert isinstance(measured, MeasuredLinks)
                for process in ends.values():
                    process.join(PATIENCE_S)
                return measured
    if not share.number:
        raise LaunchError("all workers ended without giving a reason; nothing was written")
    if any(process.exitcode for process in ends.values()):
        raise SystemExit(2)
    return None


def _check_end(process: BaseProcess) -> None:
    process.join()
    status = process.exitcode or 0
    if status < 0:
        raise LaunchError(f"{process.name} was ended by {signal.Signals(-status).name}; nothing was written")


def _work(
    end: Connection,
    rank: int,
    world: int,
    settings: BenchmarkSettings,
    levels: FindLevels,
    port: int | None,
) -> None:
    """Run one worker. It never returns, so that nothing of the parent process is cleaned up twice.

    `port`: where the parent process serves the store; None if the machines meet at MASTER_ADDR and MASTER_PORT.
    """
    status = 2
    try:
        keep_inherited_objects()
        die_with_parent()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process receives it too, and ends the workers
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if port is None:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
            os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"  # worker 0 serves the store
        else:
            os.environ |= worker_variables(rank, world, port)
        measured = run_benchmark_worker(
            env_store(rank, settings.timeout_s),
            rank,
            world,
            settings,
            levels,
            lambda *step: end.send((SHOW, *step)) if rank == 0 else None,
        )
        if rank == 0:
            end.send((DONE, measured))
        status = 0
    except ReportedElsewhere:
        pass
    except Exception as error:
        with suppress(OSError):
            end.send((FAILED, error))
    finally:
        os._exit(status)
