"""A survey of this machine alone: the workers are forked from here, so that torch is imported once."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from pipeplan_launch.errors import LaunchError
from pipeplan_launch.interrupt import die_with_parent
from pipeplan_launch.linkprobe.joined import take_part
from pipeplan_launch.linkprobe.meeting import Silent, tcp_store
from pipeplan_launch.linkprobe.settings import Levels, Measured, Settings, Show

SHOW, DONE, FAILED = "show", "done", "failed"
PATIENCE_S = 10.0
"""For a worker that has told the last of it to end."""


def measure_here(workers: int, settings: Settings, levels: Levels, show: Show) -> Measured:
    """Measure the links between so many workers of this machine. However it ends, none of them is left.

    Raises `LaunchError`, and what `levels` raises.
    """
    if workers < 2:
        raise LaunchError(f"there is no link with {workers} worker: give --workers 2 or more")
    with socket.create_server(("127.0.0.1", 0)) as listening, _started(workers, settings, levels, listening) as ends:
        return _listen(ends, show)


@contextmanager
def _started(
    workers: int, settings: Settings, levels: Levels, listening: socket.socket
) -> Iterator[dict[Connection, BaseProcess]]:
    """The workers, by what they say. What can be known before they are there is the caller's to check."""
    context = multiprocessing.get_context("fork")
    ends: dict[Connection, BaseProcess] = {}
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        for rank in range(workers):
            mine, theirs = context.Pipe(duplex=False)
            arguments = (theirs, rank, workers, settings, levels, listening)
            ends[mine] = context.Process(target=_work, args=arguments, name=f"worker {rank}", daemon=True)
            ends[mine].start()
            theirs.close()
        yield ends
    finally:
        for process in ends.values():
            if process.pid is not None:
                process.kill()
                process.join()


def _listen(ends: dict[Connection, BaseProcess], show: Show) -> Measured:
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
    raise LaunchError("all workers ended, and none said why; nothing was written")


def _check_end(process: BaseProcess) -> None:
    process.join()
    status = process.exitcode or 0
    if status < 0:
        raise LaunchError(f"{process.name} was ended by {signal.Signals(-status).name}; nothing was written")


def _work(end: Connection, rank: int, world: int, settings: Settings, levels: Levels, listening: socket.socket) -> None:
    """What a worker does. It never returns: what this process has of the one it was forked from is not to be undone."""
    status = 2
    try:
        die_with_parent()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process hears it too, and ends the others
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.environ["LOCAL_RANK"] = str(rank)
        measured = take_part(
            _store(rank, listening, settings.timeout_s),
            rank,
            world,
            settings,
            levels,
            lambda *step: end.send((SHOW, *step)),
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


def _store(rank: int, listening: socket.socket, timeout_s: float) -> Any:
    """The common store, which rank 0 keeps at a port that is already open."""
    address, port = listening.getsockname()
    if rank:
        return tcp_store(address, port, timeout_s, keeps=False)
    return tcp_store(address, port, timeout_s, keeps=True, listening=os.dup(listening.fileno()))
