"""Runs programs on the hosts of a launch over ssh.

Whichever login shell a host has, ssh makes it start bash. That bash reads its program from standard input up to a null
byte, so that no program needs quoting for a shell that we do not know. The program's own input follows the null byte.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import resources
from typing import IO

from pipeplan_launch.errors import LaunchError
from pipeplan_launch.launchers.hosts_file import Host

_BASH_READS_PROGRAM = """exec bash -c 'IFS= read -r -d "" program; eval "$program"'"""
_SSH_OPTIONS = (
    *("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15"),
    *("-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4"),
)
CONNECTION_LOST = 255
"""Exit status of ssh for an error of its own."""

CHECK = resources.files(__package__).joinpath("check_host.sh").read_text(encoding="utf-8")
"""Program that checks whether a host can take part. It prints `ok ADDRESS PORT`, or the problem."""
TRAIN = """
cd -- "$workdir" || exit 2
exec "$python" -m pipeplan_launch.launchers.host_supervisor "$grace" "$folder/launch.sh" "${arguments[@]}"
"""
"""Program that runs launch.sh under `host_supervisor`, which reads requests from standard input."""


@dataclass(frozen=True)
class Launch:
    """The facts of one launch that all hosts share."""

    hosts: Sequence[Host]
    """The hosts that take part, as many as the plan has servers."""
    plan_folder: str
    """Absolute path of the plan folder on this machine."""
    digest: str
    """Digest of the plan that this launch was rendered for."""
    python: str
    """Interpreter that launch.sh tries first where neither the hosts file nor the environment names one."""
    ssh: Sequence[str]
    """Command that takes the place of `ssh`."""
    workdir: str
    grace: str
    copy: bool
    port: str
    """MASTER_PORT; if empty, the first host finds a free one."""
    variables: Sequence[str]
    """Environment variables of all hosts, as NAME=VALUE."""
    arguments: Sequence[str]
    """Arguments of launch.sh."""

    def folder(self, number: int) -> str:
        """Plan folder on a host; a relative one is in the home folder there."""
        return (self.hosts[number].folder or self.plan_folder).removeprefix("~/")

    def with_rendezvous(self, address: str, port: str) -> Launch:
        """A copy of this launch with the address and port at which the workers of all hosts meet."""
        rendezvous = (f"MASTER_ADDR={address}", f"MASTER_PORT={port}")
        return replace(self, port=port, variables=(*self.variables, *rendezvous))


def ssh_command(launch: Launch, number: int) -> list[str]:
    """The command that runs a program on a host."""
    host = launch.hosts[number]
    port = ["-p", host.port] if host.port else []
    return [*launch.ssh, *_SSH_OPTIONS, *port, "--", host.name, _BASH_READS_PROGRAM]


def start_ssh(
    launch: Launch, number: int, stdout: int | IO[bytes] | None, stderr: int | IO[bytes] | None
) -> subprocess.Popen[bytes]:
    """Start ssh to a host. The caller writes a program (`host_program`, `closed_program`) and its input to `stdin`.

    It has a process group of its own, so that Ctrl-C in a terminal does not reach it. Raises `LaunchError`.
    """
    command = ssh_command(launch, number)
    try:
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=stdout, stderr=stderr, process_group=0)
    except OSError as error:
        raise LaunchError(f"cannot run {command[0]}: {error.strerror}") from error


def host_program(launch: Launch, number: int, program: str) -> bytes:
    """A program for a host, preceded by the variables that `CHECK` and `TRAIN` read, and ended by a null byte."""
    host = launch.hosts[number]
    folder = launch.folder(number)
    values = {
        "folder": folder,
        "workdir": launch.workdir,
        "digest": launch.digest,
        "grace": launch.grace,
        "copy": "yes" if launch.copy else "",
        "port": launch.port,
        "planned_python": launch.python,
    }
    exported = [f"NODE_RANK={number}", f"NNODES={len(launch.hosts)}", *launch.variables]
    lines = [f"{name}={shlex.quote(value)}" for name, value in values.items()]
    lines.append('[[ "$folder" == /* ]] || folder="$HOME/$folder"')
    lines.append(f"export {shlex.join(exported)}")
    if host.python:
        lines.append(f"export PYTHON={_in_home(host.python)}")
    if host.variables:
        lines.append(f"export {shlex.join(host.variables)}")
    lines.append(f"arguments=({shlex.join(launch.arguments)})")
    # launch.sh chooses its interpreter in the same way.
    lines.append('python="${PYTHON:-$planned_python}"')
    lines.append('[[ -n "${PYTHON:-}" || -x "$python" ]] || python=python3')
    return closed_program("\n".join([*lines, program]))


def closed_program(text: str) -> bytes:
    """A program as the bytes that bash on the host reads, with the null byte at its end."""
    return os.fsencode(text) + b"\0"


def _in_home(path: str) -> str:
    """A path as bash reads it, where `~/` is the home folder of the host."""
    if path.startswith("~/"):
        return '"$HOME"/' + shlex.quote(path[2:])
    return shlex.quote(path)
