"""The link benchmark without a launcher: workers are forked from this process, so that torch is imported once."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from pipeplan_launch.errors import LaunchError
from pipeplan_launch.interrupt import die_with_parent
from pipeplan_launch.linkprobe.joined import take_part
from pipeplan_launch.linkprobe.meeting import Silent, env_store, tcp_store
from pipeplan_launch.linkprobe.settings import Levels, Measured, Settings, Share, Show

SHOW, DONE, FAILED = "show", "done", "failed"
PATIENCE_S = 10.0
"""Time for a worker to end after it has sent its results."""


def measure_here(
    workers: int, settings: Settings, levels: Levels, show: Show, share: Share | None = None
) -> Measured | None:
    """Measure the links between `workers` workers of this machine. All of them have ended when this returns or raises.

    With a `share`, the links between several machines are measured, on each of which this is called. The machines meet
    at MASTER_ADDR and MASTER_PORT. The first one returns the result; the others return None, or raise `SystemExit` if
    the first one reports an error. Raises `LaunchError`, and the errors that `levels` raises.
    """
    if workers * (share or Share()).servers < 2:
        raise LaunchError(f"there is no link with {workers} worker: give --workers 2 or more")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        place = share or listening
        with _started(workers, settings, levels, place) as ends:
            return _listen(ends, show, share or Share())


@contextmanager
def _started(
    workers: int, settings: Settings, levels: Levels, place: Share | socket.socket
) -> Iterator[dict[Connection, BaseProcess]]:
    """Start the workers; yields them by the connection on which each sends its messages."""
    context = multiprocessing.get_context("fork")
    ends: dict[Connection, BaseProcess] = {}
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        share = place if isinstance(place, Share) else Share()
        for rank in range(share.number * workers, (share.number + 1) * workers):
            mine, theirs = context.Pipe(duplex=False)
            # One worker is enough to report that the file cannot be written.
            own = settings if rank == 0 else replace(settings, refusal="")
            arguments = (theirs, rank, workers * share.servers, own, levels, place)
            ends[mine] = context.Process(target=_work, args=arguments, name=f"worker {rank}", daemon=True)
            ends[mine].start()
            theirs.close()
        yield ends
    finally:
        for process in ends.values():
            if process.pid is not None:
                process.kill()
                process.join()


def _listen(ends: dict[Connection, BaseProcess], show: Show, share: Share) -> Measured | None:
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
                assert isinstance(measured, Measured)
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
    end: Connection, rank: int, world: int, settings: Settings, levels: Levels, place: Share | socket.socket
) -> None:
    """Run one worker. It never returns, so that nothing of the parent process is cleaned up twice."""
    status = 2
    try:
        die_with_parent()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process receives it too, and ends the workers
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.environ["LOCAL_RANK"] = str(rank)
        measured = take_part(
            _store(rank, place, settings.timeout_s),
            rank,
            world,
            settings,
            levels,
            lambda *step: end.send((SHOW, *step)) if rank == 0 else None,
        )
        if rank == 0:
            end.send((DONE, measured))
        status = 0
    except Silent:
        pass
    except Exception as error:
        with suppress(OSError):
            end.send((FAILED, error))
    finally:
        os._exit(status)


def _store(rank: int, place: Share | socket.socket, timeout_s: float) -> Any:
    """The common store, which rank 0 keeps. On one machine it uses a port that is already open."""
    if isinstance(place, Share):
        return env_store(rank, timeout_s)
    address, port = place.getsockname()
    if rank:
        return tcp_store(address, port, timeout_s, keeps=False)
    return tcp_store(address, port, timeout_s, keeps=True, listening=os.dup(place.fileno()))
