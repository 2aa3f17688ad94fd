"""Profile a model: measure it in this process or in several at the same time, or estimate it for another device.

A layer's time depends on what else the machine does, because processes share caches, memory bandwidth, cores and clock
frequency. If a plan will run on one machine, its layers run under the load of the plan's other workers. Therefore as
many processes as the plan will have can measure the same model. They begin their timed passes at the same time, and all
go on until the last one has finished.

Each process runs `python -P -m pipeplan.profiler.profiler FD PARENT`. It receives the model reference and the options
over the socket FD, and sends back the profile. PARENT is the process id of its parent.
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
from typing import Any

import torch

from pipeplan.cluster_data.devices import LOCAL_DEVICES
from pipeplan.errors import InputError
from pipeplan.profile_data.layers import Layer, Size
from pipeplan.profile_data.profile import Profile
from pipeplan.profiler.busy_cores import end_with_parent
from pipeplan.profiler.estimate.estimator import estimate_model
from pipeplan.profiler.measure import profile_in_process
from pipeplan.profiler.options import ProfilerOptions, Progress
from pipeplan.profiler.passes import MeasuringGroup

MAX_PROCESSES = 256
"""Most processes that may be asked for. A larger number is taken for a typing error."""
EXIT_TIMEOUT_S = 5.0
"""Time that a process may take to end after it has sent its profile."""


def profile_model(ref: str, options: ProfilerOptions, progress: Progress = lambda done, total, what: None) -> Profile:
    """Profile the model that `ref` names, or estimate its profile for a device that is not this machine's.

    Raises `InputError` if the model cannot be profiled, or if an option is wrong.
    """
    if options.device not in LOCAL_DEVICES:
        return estimate_model(ref, options, progress)
    _check(options)
    if options.processes > 1:
        progress(0, 0, f"starting {options.processes} processes")
        return profile_concurrently(ref, options, progress)
    return profile_in_process(ref, options, progress, MeasuringGroup())


def _check(options: ProfilerOptions) -> None:
    counts = [
        *(("microbatch size", size) for size in options.batches),
        ("number of repeats", options.repeats),
        ("number of processes", options.processes),
        ("number of threads", options.threads),
    ]
    for name, value in counts:
        if value is not None and value < 1:
            raise InputError(f"the {name} must be at least 1, not {value}")
    if options.halvings < 0:
        raise InputError(f"the number of halvings must be at least 0, not {options.halvings}")
    if options.processes > MAX_PROCESSES:
        raise InputError(f"the number of processes must be at most {MAX_PROCESSES}, not {options.processes}")
    if len(set(options.batches)) < len(options.batches):
        raise InputError(f"a microbatch size is given twice: {', '.join(map(str, options.batches))}")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise InputError("there is no CUDA device that this torch can use: write --device cpu, or install a CUDA build")
    if options.device == "cuda" and options.processes > 1:
        raise InputError("--processes is for the CPU, which the workers of a machine share: leave it out with cuda")


class GroupMember(MeasuringGroup):
    """One of several processes, which synchronise through their parent."""

    READY, GO = "ready", "go"

    def __init__(self, connection: Connection, processes: int) -> None:
        self._connection, self.processes = connection, processes

    def start(self) -> None:
        """Report to the parent, and wait until every process has."""
        self._connection.send(self.READY)
        self._receive_go()

    def finish(self, keep_busy: Callable[[], None]) -> None:
        """Report to the parent, and keep the core busy until every process has."""
        self._connection.send(self.READY)
        while not self._connection.poll():
            keep_busy()
        self._receive_go()

    def _receive_go(self) -> None:
        message = self._connection.recv()
        assert message == self.GO, message


def profile_concurrently(ref: str, options: ProfilerOptions, progress: Progress) -> Profile:
    """Profile the model in `options.processes` processes at the same time, and take the medians.

    Raises `InputError` if a process reports an error in the model, or ends without an answer.
    """
    with ExitStack() as stack:
        members = [stack.enter_context(_Process(number)) for number in range(options.processes)]
        for member in members:
            member.connection.send((ref, options))
        return combine_profiles(_collect_profiles(members, ref, progress))


class _Process:
    """A measuring process. It ends when the context is left, also if by an exception."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __enter__(self) -> _Process:
        ours, theirs = socket.socketpair()
        ids = str(theirs.fileno()), str(os.getpid())
        # Only the first process shows what the user's code prints. Each is in a process group of its own, so that
        # Ctrl-C reaches the parent only, which then ends the others.
        output = 2 if self.number == 0 else subprocess.DEVNULL
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "pipeplan.profiler.profiler", *ids],
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
                self.process.wait(EXIT_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
        else:
            self.process.kill()
        self.process.wait()
        self.connection.close()


def _collect_profiles(members: Sequence[_Process], ref: str, progress: Progress) -> list[Profile]:
    """Synchronise the processes, forward the first one's progress, and collect their profiles."""
    profiles: dict[int, Profile] = {}
    ready_members: set[int] = set()
    by_connection = {member.connection: member for member in members}
    while len(profiles) < len(members):
        waiting = [connection for connection, member in by_connection.items() if member.number not in profiles]
        for ready in wait(waiting):
            assert isinstance(ready, Connection)
            member = by_connection[ready]
            message = _receive(member, ref)
            if message == GroupMember.READY:
                ready_members.add(member.number)
            elif message[0] == "error":
                raise InputError(message[1])
            elif message[0] == "profile":
                profiles[member.number] = message[1]
            elif member.number == 0:
                progress(*message[1])
        if len(ready_members) == len(members):
            ready_members.clear()
            for member in members:
                member.connection.send(GroupMember.GO)
    return [profiles[member.number] for member in members]


def _receive(member: _Process, ref: str) -> Any:
    """The next message of a process. Raises `InputError` if it has ended."""
    try:
        return member.connection.recv()
    except (EOFError, ConnectionResetError):
        status = member.process.wait()
        how = f"ended with status {status}"
        if status < 0:
            how = f"was ended by signal {-status}; the likeliest cause is too little memory for so many processes"
        raise InputError(
            f"process {member.number} of those that measure {ref!r} {how}; try fewer --processes, or "
            "a single one to see why"
        ) from None


def combine_profiles(profiles: Sequence[Profile]) -> Profile:
    """Combine profiles of the same model: the medians of times and spreads, and the largest peak memory.

    Raises `InputError` if the profiles have different graphs.
    """
    first = profiles[0]
    if any(profile.graph_hash != first.graph_hash for profile in profiles):
        raise InputError("the processes did not trace the same graph: the model depends on chance or on the process")
    sizes = tuple(
        replace(
            size,
            layers=_median_layers([profile.sizes[index].layers for profile in profiles]),
            **_median_whole([profile.sizes[index] for profile in profiles]),
        )
        for index, size in enumerate(first.sizes)
    )
    return replace(
        first,
        layers=_median_layers([profile.layers for profile in profiles]),
        sizes=sizes,
        step_s=statistics.median(profile.step_s for profile in profiles),
        read_s=statistics.median(profile.read_s for profile in profiles),
        peak_bytes=max(profile.peak_bytes for profile in profiles),
        **_median_whole(profiles),
    )


def _median_layers(layers_by_process: Sequence[tuple[Layer, ...]]) -> tuple[Layer, ...]:
    times = ("forward_s", "backward_s", "forward_spread_s", "backward_spread_s", "update_s")
    return tuple(
        replace(same[0], **{name: statistics.median(getattr(layer, name) for layer in same) for name in times})
        for same in zip(*layers_by_process, strict=True)
    )


def _median_whole(profiles: Sequence[Profile | Size]) -> dict[str, Any]:
    forward = [profile.whole_forward_s for profile in profiles if profile.whole_forward_s is not None]
    backward = [profile.whole_backward_s for profile in profiles if profile.whole_backward_s is not None]
    return {"whole_forward_s": statistics.median(forward), "whole_backward_s": statistics.median(backward)}


def main(connection: Connection, parent: int) -> None:
    """Receive a model reference and options, and answer with (`progress`, `error` or `profile`, its content)."""
    end_with_parent(parent)
    ref, options = connection.recv()

    def progress(done: int, total: int, what: str) -> None:
        connection.send(("progress", (done, total, what)))

    try:
        profile = profile_in_process(ref, options, progress, GroupMember(connection, options.processes))
    except InputError as error:
        connection.send(("error", str(error)))
    else:
        connection.send(("profile", profile))


if __name__ == "__main__":
    try:
        main(Connection(int(sys.argv[1])), int(sys.argv[2]))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        sys.exit(1)  # the parent has gone
