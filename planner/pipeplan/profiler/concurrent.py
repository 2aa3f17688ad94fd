"""Measure a model in several processes at the same time.

A layer's time depends on what else the machine does: processes share caches, memory bandwidth, cores and their clock.
Where a plan will run on one machine, the times that it meets are those under the load of its other workers. So as many
processes as will run measure the same model, begin their timed passes together, and go on until the last has finished.

Who else measures at the same time: nobody, or other processes that start and end their timed passes together.
"""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

from pipeplan.errors import InputError
from pipeplan.profile_data.layers import Layer, Size
from pipeplan.profile_data.profile import Profile
from pipeplan.profiler.options import Options, Progress


class Company(Protocol):
    """Those that a process measures together with, itself included."""

    processes: int

    def start(self) -> None:
        """Wait until all are about to begin their timed passes."""

    def finish(self, go_on: Callable[[], None]) -> None:
        """Having measured enough, call `go_on` again and again until all have: the others' load stays what it was."""


class Alone:
    """One process, which waits for nobody."""

    processes = 1

    def start(self) -> None:
        """There is nobody to wait for."""

    def finish(self, go_on: Callable[[], None]) -> None:
        """There is nobody whose load to keep up."""


class Member:
    """One of several, which meet through the process that started them (`pipeplan.profiler.concurrent`)."""

    HERE, GO = "here", "go"

    def __init__(self, connection: Connection, processes: int) -> None:
        self._connection, self.processes = connection, processes

    def start(self) -> None:
        """Say that it is here, and wait for the others."""
        self._connection.send(self.HERE)
        self._take()

    def finish(self, go_on: Callable[[], None]) -> None:
        """Say that it is here, and keep the core busy until the others are."""
        self._connection.send(self.HERE)
        while not self._connection.poll():
            go_on()
        self._take()

    def _take(self) -> None:
        word = self._connection.recv()
        assert word == self.GO, word


PATIENCE_S = 5.0
"""How long a process that has sent its profile may take to end."""


def profile_together(ref: str, options: Options, progress: Progress) -> Profile:
    """The medians over `options.processes` profiles that were measured at the same time.

    Raises `InputError` for what any of the processes says of the model, and for one that ends without an answer.
    """
    with ExitStack() as stack:
        members = [stack.enter_context(_Process(number)) for number in range(options.processes)]
        for member in members:
            member.connection.send((ref, options))
        return combined(_attend(members, ref, progress))


class _Process:
    """A measuring process; it is ended when the context is left, however that comes about."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __enter__(self) -> _Process:
        ours, theirs = socket.socketpair()
        command = [
            sys.executable,
            "-P",
            "-m",
            "pipeplan.profiler.concurrent_process",
            str(theirs.fileno()),
            str(os.getpid()),
        ]
        # What the user's code prints is wanted once. A group of its own: Ctrl-C is for the process that ends the rest.
        output = 2 if self.number == 0 else subprocess.DEVNULL
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=[theirs.fileno()],
            process_group=0,
        )
        theirs.close()
        self.connection = Connection(ours.detach())
        return self

    def __exit__(self, *exception: object) -> None:
        if exception[0] is None:
            try:
                self.process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
        else:
            self.process.kill()
        self.process.wait()
        self.connection.close()


def _attend(members: Sequence[_Process], ref: str, progress: Progress) -> list[Profile]:
    """Let the members meet, pass on the first one's progress, and collect what they found."""
    profiles: dict[int, Profile] = {}
    here: set[int] = set()
    by_connection = {member.connection: member for member in members}
    while len(profiles) < len(members):
        waiting = [connection for connection, member in by_connection.items() if member.number not in profiles]
        for ready in wait(waiting):
            assert isinstance(ready, Connection)
            member = by_connection[ready]
            said = _said(member, ref)
            if said == Member.HERE:
                here.add(member.number)
            elif said[0] == "error":
                raise InputError(said[1])
            elif said[0] == "profile":
                profiles[member.number] = said[1]
            elif member.number == 0:
                progress(*said[1])
        if len(here) == len(members):
            here.clear()
            for member in members:
                member.connection.send(Member.GO)
    return [profiles[member.number] for member in members]


def _said(member: _Process, ref: str) -> Any:
    try:
        return member.connection.recv()
    except (EOFError, ConnectionResetError):
        status = member.process.wait()
        how = f"ended with status {status}"
        if status < 0:
            how = f"was ended by signal {-status}; too little memory for so many is the likeliest cause"
        raise InputError(
            f"process {member.number} of those that measure {ref!r} {how}; try fewer --processes, or one to see why"
        ) from None


def combined(profiles: Sequence[Profile]) -> Profile:
    """One profile with the medians over several of the same model: times and spreads; of peak memory the most."""
    first = profiles[0]
    if any(one.graph_hash != first.graph_hash for one in profiles):
        raise InputError("the processes did not trace the same graph: the model depends on chance or on the process")
    sizes = tuple(
        replace(
            size,
            layers=_layers([one.sizes[index].layers for one in profiles]),
            **_whole([one.sizes[index] for one in profiles]),
        )
        for index, size in enumerate(first.sizes)
    )
    return replace(
        first,
        layers=_layers([one.layers for one in profiles]),
        sizes=sizes,
        peak_bytes=max(one.peak_bytes for one in profiles),
        **_whole(profiles),
    )


def _layers(of_processes: Sequence[tuple[Layer, ...]]) -> tuple[Layer, ...]:
    times = ("forward_s", "backward_s", "forward_spread_s", "backward_spread_s", "update_s")
    return tuple(
        replace(same[0], **{name: statistics.median(getattr(one, name) for one in same) for name in times})
        for same in zip(*of_processes, strict=True)
    )


def _whole(of_processes: Sequence[Profile | Size]) -> dict[str, Any]:
    forward = [one.whole_forward_s for one in of_processes if one.whole_forward_s is not None]
    backward = [one.whole_backward_s for one in of_processes if one.whole_backward_s is not None]
    return {"whole_forward_s": statistics.median(forward), "whole_backward_s": statistics.median(backward)}
