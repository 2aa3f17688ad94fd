"""Runs short programs on all hosts at the same time: copying and checks before training."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import tarfile
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import IO, Self

from pipeplan_launch.errors import LaunchError, print_status
from pipeplan_launch.launchers.hosts_file import Host
from pipeplan_launch.launchers.ssh_connection import CHECK, Launch, closed_program, host_program, start_ssh


@dataclass(frozen=True)
class Reply:
    """The result of one program on one host."""

    status: int
    output: str = ""
    errors: str = ""


class Abandoned(Exception):
    """The user stopped the launch while programs ran on the hosts."""


class HostRequests:
    """Runs programs on hosts. If an exception leaves the context, programs that still run are ended and waited for."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._abandoned = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.abandon()

    def on_all(self, request: Callable[[int], Reply]) -> list[Reply]:
        """Call `request` with the number of every host, each in its own thread; returns the replies in that order."""
        count = len(self.launch.hosts)
        with ThreadPoolExecutor(count) as pool:
            try:
                # A signal handler may raise here, also before the last request is under way.
                pending = [pool.submit(request, number) for number in range(count)]
                wait(pending)
            except BaseException:
                self.abandon()  # before the pool waits for its threads
                raise
            return [future.result() for future in pending]

    def run(self, number: int, feed: Callable[[IO[bytes]], None]) -> Reply:
        """Run one program on one host. `feed` writes the program and its input to the standard input of ssh."""
        # The output goes to files, because a background process of ssh (ControlPersist) may hold a pipe open.
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            process = self._start(number, output, errors)
            try:
                assert process.stdin is not None
                # A host that cannot be reached takes no input. The reason is in `errors`.
                with suppress(BrokenPipeError), process.stdin as stdin:
                    feed(stdin)
                status = process.wait()
            finally:
                with self._lock:
                    self._running.discard(process)
            return Reply(status, _content(output), _content(errors))

    def abandon(self) -> None:
        """End all programs, and ssh with everything that it has started here. No further program begins."""
        with self._lock:
            self._abandoned = True
            for process in self._running:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM)

    def _start(self, number: int, output: IO[bytes], errors: IO[bytes]) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._abandoned:
                raise Abandoned
            process = start_ssh(self.launch, number, output, errors)
            self._running.add(process)
            return process


def last_line(text: str) -> str:
    """The last line that is not blank."""
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _content(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode("utf-8", "surrogateescape")


# Ask all hosts whether they can take part, before any of them trains.

_LOOPBACK = re.compile(r"127\.|::1$")
_NO_ADDRESS = "-"


def check_hosts(requests: HostRequests, address: str) -> Launch | None:
    """Run the program `CHECK` on all hosts; returns the launch with the address and port at which the workers meet.

    If some hosts cannot take part, it prints an error line for each, and returns None. `address`: the address that the
    user gave, or empty. Raises `LaunchError` for an error that does not concern a single host.
    """
    launch = requests.launch
    replies = requests.on_all(partial(_examine, requests))
    answers = [last_line(reply.output) for reply in replies]
    failed = [number for number, answer in enumerate(answers) if not answer.startswith("ok ")]
    for number in failed:
        print_status(f"error: {_problem(launch.hosts[number], replies[number], replies)}")
    if failed:
        return None
    ends = [answer.split() for answer in answers]
    if not address:
        address = _address_of_first(launch, [end[1] for end in ends])
    return launch.with_rendezvous(address, launch.port or ends[0][2])


def _examine(requests: HostRequests, number: int) -> Reply:
    program = host_program(requests.launch, number, CHECK)

    def feed(stdin: IO[bytes]) -> None:
        stdin.write(program)

    return requests.run(number, feed)


def _problem(host: Host, reply: Reply, replies: list[Reply]) -> str:
    """One line about a host that cannot take part. Raises `LaunchError` if launch.sh reports the same on all hosts."""
    answer = last_line(reply.output)
    if not answer:
        return f"{host.name} cannot be reached: {last_line(reply.errors)}"
    _, is_error, message = answer.partition("error: ")
    if not is_error:
        return f"{host.name} {answer}"
    if len({line for one in replies for line in one.output.splitlines()}) == 1:
        raise LaunchError(message)  # an option of launch.sh is wrong
    return f"{host.name}: {message}"


def _address_of_first(launch: Launch, addresses: list[str]) -> str:
    """The address at which other hosts reach the first host: the address that ssh used, else its name."""
    first, *others = addresses
    if _LOOPBACK.match(first):
        for host, address in zip(launch.hosts[1:], others, strict=True):
            if not _LOOPBACK.match(address):
                raise LaunchError(
                    f"ssh reaches {launch.hosts[0].name} at {first}, where {host.name} cannot reach it: give its "
                    "--address"
                )
    return launch.hosts[0].name.rpartition("@")[2] if first == _NO_ADDRESS else first


# Copies the plan, the file of its model and the paths of `--with` to every host, for `--copy`.

_IDENTITY = ("stat", "-c", "%i %z", "--")
"""Command that prints the inode and the time of the last change, which are equal only for the same file."""
_RECEIVE = """
if [[ "$(TZ=UTC0 stat -c "%i %z" -- "$mark" 2>/dev/null)" == "$identity" ]]; then cat >/dev/null; exit 0; fi
mkdir -p -- "$to" && tar -C "$to" -xf -
"""
"""Program that unpacks an archive, unless the host sees this machine's files (a shared file system, or this
machine)."""


def copy_to_all(requests: HostRequests, paths: Sequence[str]) -> bool:
    """Copy the plan folder without its runs, then `paths`, to all hosts. Prints an error line for each host that
    fails.
    """
    replies = requests.on_all(partial(_copy_to, requests, paths))
    for host, reply in zip(requests.launch.hosts, replies, strict=True):
        if reply.status:
            print_status(f"error: {host.name}: nothing could be copied there: {last_line(reply.errors)}")
    return not any(reply.status for reply in replies)


def _copy_to(requests: HostRequests, paths: Sequence[str], number: int) -> Reply:
    plan_folder = requests.launch.plan_folder
    reply = _copy_path(requests, number, plan_folder, requests.launch.folder(number), ".", mark="plan.json")
    for path in paths:
        if reply.status == 0:
            folder, name = os.path.split(path)
            reply = _copy_path(requests, number, folder, folder, name, mark=name)
    return reply


def _copy_path(requests: HostRequests, number: int, folder: str, to: str, name: str, *, mark: str) -> Reply:
    """Copy `name` from a local folder to the folder `to` of a host, unless the host sees the local file `mark`
    itself.
    """
    values = {"to": to, "mark": f"{to}/{mark}", "identity": _identity(os.path.join(folder, mark))}
    program = " ".join(f"{key}={shlex.quote(value)}" for key, value in values.items()) + _RECEIVE
    problems = []

    def feed(stdin: IO[bytes]) -> None:
        stdin.write(closed_program(program))
        try:
            with tarfile.open(fileobj=stdin, mode="w|") as archive:
                archive.add(os.path.join(folder, name), name, filter=_without_runs if name == "." else None)
        except BrokenPipeError:
            raise
        except OSError as error:
            problems.append(str(error))

    reply = requests.run(number, feed)
    return Reply(1, errors=problems[0]) if problems else reply


def _identity(path: str) -> str:
    """Identity of a file on this machine, in the form that `_RECEIVE` compares; a text that no file has if it is
    missing.
    """
    command = [*_IDENTITY, path]
    try:
        done = subprocess.run(command, env={**os.environ, "TZ": "UTC0"}, capture_output=True, text=True, check=False)
    except OSError:
        return "none"
    return done.stdout.strip() or "none"


def _without_runs(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if entry.name in ("runs", "./runs") else entry
