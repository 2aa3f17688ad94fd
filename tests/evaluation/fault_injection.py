"""Injects a fault into an emulation that launchers run, and records how they handle it.

kill     a worker's process is killed (SIGKILL)
freeze   a worker's process is stopped for good (SIGSTOP)
cut      a cable is disconnected for good
flap     a cable is disconnected and connected again

/proc must show this process namespace, because launchers look for their workers there.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from network_namespaces import Network, start_in_namespace

from pipeplan_launch import launch_secret
from pipeplan_launch.child_processes import ENDED, PROC, states_of_children

EVERY_S = 0.03


@dataclass(frozen=True)
class InjectedFault:
    """A fault and the time at which it occurs."""

    kind: str
    """`kill`, `freeze`, `cut` or `flap`."""
    worker: int | None = None
    """The worker whose process is killed or stopped."""
    cable: str | None = None
    """Name of the node whose cable to the switch above is disconnected."""
    lasts_s: float | None = None
    """Time after which the cable is connected again."""
    after_minibatches: int | None = None
    """Minibatches after which the fault occurs; None if `after_s` sets the time."""
    after_s: float | None = None
    """Seconds since the first minibatch after which the fault occurs."""


class _Injector:
    """Injects a fault once it is due."""

    def __init__(self, fault: InjectedFault, network: Network) -> None:
        self._fault, self._network = fault, network
        self.injected_s: float | None = None
        self.healed_s: float | None = None
        self.done: int | None = None
        """Minibatches before the fault, as far as the workers reported them."""

    def look(self, launches: ServerLaunchers) -> None:
        """Inject or heal the fault if that is due. To be called often."""
        now, lasts = time.time(), self._fault.lasts_s
        if self.injected_s is None:
            if self._is_due(launches, now) and self._inject(launches):
                self.injected_s, self.done = time.time(), launches.done
        elif lasts is not None and self.healed_s is None and now >= self.injected_s + lasts:
            self._set_cable("up")
            self.healed_s = time.time()

    def _is_due(self, launches: ServerLaunchers, now: float) -> bool:
        if launches.trains_s is None:
            return False
        if self._fault.after_minibatches is not None:
            return launches.done >= self._fault.after_minibatches
        return now >= launches.trains_s + (self._fault.after_s or 0.0)

    def _inject(self, launches: ServerLaunchers) -> bool:
        if self._fault.worker is None:
            self._set_cable("down")
            return True
        pid = launches.pid_of(self._fault.worker)
        if pid is None:  # the worker is just being started
            return False
        os.kill(pid, signal.SIGKILL if self._fault.kind == "kill" else signal.SIGSTOP)
        return True

    def _set_cable(self, state: str) -> None:
        port = next(port for port in self._network.ports if port.node.name == self._fault.cable)
        command = ["ip", "-n", port.switch, "link", "set", port.interface, state]
        subprocess.run(command, check=True)


def run_with_fault(network: Network, order: Mapping[str, Any], port: int) -> dict[str, Any]:
    """Carry out an order that has a `fault`; returns the content of its results file."""
    injector = _Injector(InjectedFault(**order["fault"]), network)
    launches = ServerLaunchers()
    deadline = time.monotonic() + order["limit_s"]
    began = time.time()
    launches.start(network, [order["plan"], *order["arguments"]], port, Path(order["out"]).parent)
    while launches.running and time.monotonic() < deadline:
        launches.look()
        injector.look(launches)
        time.sleep(EVERY_S)
    launches.look()
    return {
        "began_s": began,
        "trains_s": launches.trains_s,
        "struck_s": injector.injected_s,
        "struck_after": injector.done,
        "healed_s": injector.healed_s,
        "ended_s": launches.ended_s,
        "statuses": launches.statuses,
        "workers": [asdict(life) for life in launches.lives],
        "lines": [asdict(line) for line in launches.lines],
    }


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
