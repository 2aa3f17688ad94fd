"""`pipeplan doctor --hosts` and `--servers`: measure several servers, and say why they are slow."""

from __future__ import annotations

import math
import os
import secrets
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from rich.console import RenderableType

from pipeplan.cli.output import note, print_answer, print_json, print_line, print_warning
from pipeplan.cli.profile.links import cluster_of, measure_servers
from pipeplan.errors import InputError
from pipeplan.explanation.slow_servers import ServerFacts, diagnose_servers, servers_lines, with_others, with_speeds
from pipeplan.profile_data.profile import Profile
from pipeplan.util.deadline import Deadline
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.launchers.hosts_file import Host, read_hosts
from pipeplan_measure.pair_schedule import ALL_PAIRS_AT_ONCE, MESSAGE, BenchmarkSettings, MeasuredLinks, TimedOperation

BUDGET_S, TIMEOUT_S, PREDICTING_S = 45.0, 60.0, 20.0
"""Seconds for the measurements, for waiting for a worker, and for the predictions."""
GRACE_S, SIGN_OF_LIFE_S = 5.0, 5.0
"""Seconds that the command on a host has to end, and seconds between the lines that keep it running."""
FIRST_PORT, PORTS = 20_000, 10_000


def examine_servers(profile: Profile, servers: int, workers: int | None, as_json: bool) -> None:
    """Measure as one of several servers; the first worker of the first server prints the answer."""
    settings = BenchmarkSettings("", TIMEOUT_S, BUDGET_S, servers=True)
    measured = measure_servers(workers, servers, settings)
    if measured is None:
        return
    facts = facts_of(measured)
    if len(facts.names) < 2:
        raise InputError("all workers are on one server: there is nothing to compare; give --hosts or --servers 2")
    cluster = with_speeds(cluster_of(measured, "servers").cluster, facts.speeds)
    deadline = Deadline.after(PREDICTING_S)
    found = with_others(diagnose_servers(profile, cluster, facts, deadline), profile, deadline)
    print_warning(profile, cluster, as_json=as_json)
    if as_json:
        print_json(found.to_json())
        return
    lines: Iterator[RenderableType] = servers_lines(found)
    print_answer(lines)


def facts_of(measured: MeasuredLinks) -> ServerFacts:
    """The facts about the servers whose links were measured."""
    check = measured.servers
    assert check is not None
    places = list(dict.fromkeys(measured.found.places))
    number = {rank: places.index(place) for rank, place in enumerate(measured.found.places)}
    own = [[rank for rank in number if number[rank] == server] for server in range(len(places))]
    slowest_s = [max(check.compute_s[rank] for rank in ranks) for ranks in own]
    return ServerFacts(
        tuple(_names([measured.hosts[ranks[0]] for ranks in own])),
        tuple(min(slowest_s) / seconds for seconds in slowest_s),
        tuple((number[one.sender], number[one.receiver], one.rate) for one in check.one_way),
        _together(measured.timed, number),
        max(check.clock_s) - min(check.clock_s),
    )


def _names(hosts: Sequence[str]) -> Iterator[str]:
    """Names of servers: their host names, with numbers from 0 if several are equal, as may happen with containers."""
    for number, host in enumerate(hosts):
        yield host if hosts.count(host) == 1 else f"{host} #{number}"


def _together(timed: Sequence[TimedOperation], number: dict[int, int]) -> float:
    """Rate of a pair of servers while all pairs send at once, relative to its rate alone; at most 1, and 1 if unknown.

    Several pairs of workers on the same two servers do not count, because they share network cards, not a switch.
    """

    def rates(kind: str) -> list[float]:
        between = [one for one in timed if one.kind == kind and number[one.ranks[0]] != number[one.ranks[1]]]
        pairs = {tuple(sorted((number[one.ranks[0]], number[one.ranks[1]]))) for one in between}
        apart = len({server for pair in pairs for server in pair}) == 2 * len(pairs) > 2
        return [one.samples[-1][0] / one.samples[-1][1] for one in between] if apart or kind == MESSAGE else []

    alone, at_once = rates(MESSAGE), rates(ALL_PAIRS_AT_ONCE)
    return min(1.0, min(at_once) / max(alone)) if alone and at_once else 1.0


def run_on_hosts(path: Path, arguments: Sequence[str]) -> None:
    """Run `pipeplan doctor --servers N` with these arguments on all hosts of a file by ssh, and wait for its end.

    The first host's output is shown. Raises `InputError` with the message of the first host that failed.
    """
    try:
        hosts = read_hosts(str(path))
    except LaunchError as error:
        raise InputError(str(error)) from error
    if len(hosts) < 2:
        raise InputError(f"{path} must name two hosts or more, one a line")
    address = hosts[0].address or hosts[0].name.rpartition("@")[2]
    port = FIRST_PORT + secrets.randbelow(PORTS)
    commands = [
        _command(host, number, ["--servers", str(len(hosts)), *arguments], address, port)
        for number, host in enumerate(hosts)
    ]
    with tempfile.TemporaryDirectory() as folder, _started(hosts, commands, Path(folder)) as started:
        failed = _failed(started)
        said = [(Path(folder) / f"{number}.err").read_text(errors="replace").strip() for number in range(len(hosts))]
        answer = (Path(folder) / "0.out").read_text(errors="replace")
    if not failed:
        print_line(answer, newline=False)
        for line in said[0].splitlines():
            note(line)
        return
    reasons = [(number, (said[number].splitlines() or ["it gave no reason"])[-1]) for number in failed]
    # A host that waited for another reports only that; the other host knows the reason.
    number, line = min(reasons, key=lambda reason: "did not come" in reason[1])
    raise InputError(f"{hosts[number].name}: {line.removeprefix('error: ')}")


def _failed(started: Sequence[subprocess.Popen[bytes]]) -> list[int]:
    """Indices of failed processes, once all have ended, or a moment after the first failure."""
    ends = math.inf
    while time.monotonic() < ends and any(process.poll() is None for process in started):
        if ends == math.inf and any(process.poll() for process in started):
            ends = time.monotonic() + GRACE_S
        time.sleep(0.1)
    return [number for number, process in enumerate(started) if process.poll()]


def _command(host: Host, number: int, arguments: Sequence[str], address: str, port: int) -> list[str]:
    """The ssh command that runs pipeplan on one host, in a folder of the same name."""
    python = host.python or sys.executable
    variables = [f"NODE_RANK={number}", f"MASTER_ADDR={address}", f"MASTER_PORT={port}", *host.variables]
    supervised = [python, "-m", "pipeplan_launch.launchers.host_supervisor", f"{GRACE_S:g}"]
    command = shlex.join(["env", *variables, *supervised, python, "-m", "pipeplan", "doctor", *arguments])
    port_option = ["-p", host.port] if host.port else []
    folder = shlex.quote(host.folder or os.getcwd())
    return ["ssh", "-o", "BatchMode=yes", *port_option, "--", host.name, f"cd {folder} && {command}"]


@contextmanager
def _started(
    hosts: Sequence[Host], commands: Sequence[Sequence[str]], folder: Path
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The ssh processes. Their output goes to `N.out` and `N.err` in a folder.

    Each process gets a line of input every few seconds. The command on the host ends when these lines stop.
    """
    started: list[subprocess.Popen[bytes]] = []
    over = threading.Event()

    def keep_running() -> None:
        while not over.wait(SIGN_OF_LIFE_S):
            for process in started:
                assert process.stdin is not None
                with suppress(OSError, ValueError):
                    process.stdin.write(b"here\n")
                    process.stdin.flush()

    try:
        for number, command in enumerate(commands):
            with (folder / f"{number}.out").open("wb") as out, (folder / f"{number}.err").open("wb") as errors:
                pipe = subprocess.PIPE
                started.append(subprocess.Popen(command, stdin=pipe, stdout=out, stderr=errors, process_group=0))
        threading.Thread(target=keep_running, daemon=True).start()
        yield started
    except OSError as error:
        raise InputError(f"cannot run ssh to {hosts[len(started)].name}: {error.strerror}") from error
    finally:
        over.set()
        for process in started:
            if process.poll() is None:
                process.terminate()
