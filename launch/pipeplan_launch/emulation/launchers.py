"""Runs one launcher on each emulated server, as launch.sh does, and follows its workers. Torch-free.

/proc must show this process namespace, because launchers look for their workers there.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from pipeplan_launch import launch_secret
from pipeplan_launch.child_processes import ENDED, PROC, states_of_children
from pipeplan_launch.emulation.network_namespaces import Network, start_in_namespace

MASTER = "10.0.0.1"
_MINIBATCH = re.compile(r"\bminibatch (\d+)/\d+\b")


@dataclass
class WorkerProcess:
    """One process of a worker, with the times of its start and end in seconds since 1970."""

    rank: int
    pid: int
    began_s: float
    ended_s: float | None = None


@dataclass
class OutputLine:
    """One line of output of a launcher or one of its workers."""

    time_s: float
    server: int
    text: str


@dataclass
class _Server:
    pid: int
    log: IO[str]
    rest: str = ""
    status: int | None = None
    ended_s: float | None = None


@dataclass
class ServerLaunchers:
    """The launchers of all servers. Times are in seconds since 1970."""

    lives: list[WorkerProcess] = field(default_factory=list)
    lines: list[OutputLine] = field(default_factory=list)
    done: int = 0
    """Minibatches done, as far as the workers reported them."""
    trains_s: float | None = None
    """Time of the first report of a minibatch."""
    _servers: list[_Server] = field(default_factory=list)

    def start(self, network: Network, arguments: Sequence[str], port: int, folder: Path) -> None:
        """Start a launcher in every server's namespace. `arguments`: for the workers. `folder`: for their output."""
        os.environ[launch_secret.VARIABLE] = launch_secret.new_secret()
        for number, (name, workers) in enumerate(network.servers):
            path = folder / f"server-{number}.txt"
            path.touch()
            options = ["--nnodes", str(len(network.servers)), "--nproc-per-node", str(workers)]
            options += ["--node-rank", str(number), "--master-addr", MASTER, "--master-port", str(port)]
            command = [sys.executable, "-m", "pipeplan_launch.torchrun", *options, "-m", "pipeplan_launch", *arguments]
            pid = start_in_namespace(name, lambda path=path, command=command: _become(command, path))  # type: ignore[misc]
            self._servers.append(_Server(pid, path.open(errors="replace")))

    @property
    def running(self) -> bool:
        """Whether a launcher has not ended."""
        return any(server.status is None for server in self._servers)

    @property
    def statuses(self) -> list[int | None]:
        """Exit status of each server's launcher, negative for a signal; None while it runs."""
        return [server.status for server in self._servers]

    @property
    def ended_s(self) -> list[float | None]:
        """Time at which each server's launcher ended; None while it runs."""
        return [server.ended_s for server in self._servers]

    def pid_of(self, rank: int) -> int | None:
        """Process id of a worker; None while it has no process."""
        return next((life.pid for life in self.lives if life.rank == rank and life.ended_s is None), None)

    def look(self) -> None:
        """Note processes and lines that are new or have ended. To be called often."""
        now = time.time()
        self._note_workers(now)
        for number, server in enumerate(self._servers):
            if server.status is None:
                pid, status = os.waitpid(server.pid, os.WNOHANG)
                if pid:
                    server.status, server.ended_s = os.waitstatus_to_exitcode(status), now
            self._note_output(number, server, now)

    def _note_workers(self, now: float) -> None:
        launchers = {server.pid for server in self._servers if server.status is None}
        running = {pid for pid, state in states_of_children(launchers).items() if state not in ENDED}
        known = {life.pid: life for life in self.lives if life.ended_s is None}
        for pid, life in known.items():
            if pid not in running:
                life.ended_s = now
        for pid in running - known.keys():
            with suppress(OSError, KeyError, ValueError):  # between fork and exec a process has no rank
                self.lives.append(WorkerProcess(_rank_of(pid), pid, now))

    def _note_output(self, number: int, server: _Server, now: float) -> None:
        *lines, server.rest = (server.rest + server.log.read()).split("\n")
        for text in lines:
            if match := _MINIBATCH.search(text):
                self.done = int(match[1])
                self.trains_s = self.trains_s or now
            elif text.strip():
                self.lines.append(OutputLine(now, number, text))


def _become(command: list[str], path: Path) -> None:
    """Replace this process by a command whose output goes to a file."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.execv(command[0], command)


def _rank_of(pid: int) -> int:
    pairs = (entry.partition("=") for entry in (PROC / str(pid) / "environ").read_text(errors="replace").split("\0"))
    return int({name: value for name, _, value in pairs}["RANK"])
