"""Ask all hosts whether they can take part, before any of them trains."""

from __future__ import annotations

import re
import sys
from functools import partial
from typing import IO

from pipeplan_launch.errors import LaunchError, terminal_line
from pipeplan_launch.launchers.hosts_file import Host
from pipeplan_launch.launchers.ssh_connection import CHECK, Launch, host_program
from pipeplan_launch.launchers.ssh_requests import HostRequests, Reply, last_line

_LOOPBACK = re.compile(r"127\.|::1$")
_NO_ADDRESS = "-"


def check_hosts(requests: HostRequests, address: str) -> Launch | None:
    """Run the program `CHECK` on all hosts; returns the launch with the address and port at which the workers meet.

    If some hosts cannot take part, prints an error line for each and returns None. `address`: the user's own, or empty.
    Raises `LaunchError` for an error that concerns no single host.
    """
    launch = requests.launch
    replies = requests.on_all(partial(_examine, requests))
    answers = [last_line(reply.output) for reply in replies]
    failed = [number for number, answer in enumerate(answers) if not answer.startswith("ok ")]
    for number in failed:
        problem = _problem(launch.hosts[number], replies[number], replies)
        print(f"error: {terminal_line(problem)}", file=sys.stderr, flush=True)
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
    """One line about a host that cannot take part. Raises `LaunchError` if launch.sh says the same on all hosts."""
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
    """The address at which other hosts reach the first one: that by which ssh reached it, else its name."""
    first, *others = addresses
    if _LOOPBACK.match(first):
        for host, address in zip(launch.hosts[1:], others, strict=True):
            if not _LOOPBACK.match(address):
                raise LaunchError(
                    f"ssh reaches {launch.hosts[0].name} at {first}, where {host.name} cannot reach it: give its "
                    "--address"
                )
    return launch.hosts[0].name.rpartition("@")[2] if first == _NO_ADDRESS else first
