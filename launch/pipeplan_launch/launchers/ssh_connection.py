"""Runs programs on the hosts of a launch over ssh.

Whichever login shell a host has, ssh makes it start bash. That bash reads its program from standard input up to a null
byte, so that no program has to be quoted for an unknown shell. The program's own input follows the null byte.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from typing import IO

from pipeplan_launch.errors import LaunchError
from pipeplan_launch.launchers.hosts_file import Host

# The options of launch-ssh.sh. It passes on all options that it does not know to launch.sh, in their order.

USAGE = """\
usage: launch-ssh.sh --hosts FILE [options] [options of launch.sh]

  --hosts FILE        one host a line, in the order of the plan's servers; # begins a comment
                        user@host [port=N] [folder=DIR] [python=PATH] [address=ADDR] [NAME=VALUE …]
                        folder: where the plan lies on the host (the same path as here)
                        python: an interpreter on the host that has pipeplan
                        NAME: a variable, in capitals
  --env NAME[=VALUE]  set a variable on all hosts; without VALUE, to its value here; may be given again
  --workdir DIR       the folder to work in, on all hosts (this one)
  --copy              first copy the plan and the file of its model to the hosts, to the same paths as here
  --with PATH         with --copy: copy this file or folder too; may be given again
  --address ADDR      the address at which the others reach the first host (MASTER_ADDR; the one that ssh uses)
  --port N            a free port of the first host (MASTER_PORT; one that is found)
  --ssh COMMAND       a command to run instead of ssh, such as 'ssh -F config'
  --label             put the host's name before every line
  --grace S           seconds that a checkpoint may take after this script or its connection is gone (300)

All other options go to launch.sh on every host: see `launch.sh --help`.
Ctrl-C ends training at a checkpoint; a second one ends it at once.
"""
_WITH_VALUE = ("--hosts", "--env", "--workdir", "--with", "--address", "--port", "--ssh", "--grace")


@dataclass
class SshOptions:
    """The options of one call."""

    hosts_file: str = ""
    variables: list[str] = field(default_factory=list)
    """Environment variables of all hosts, as NAME=VALUE."""
    workdir: str = ""
    copy: bool = False
    copy_too: list[str] = field(default_factory=list)
    """Absolute paths of files and folders to copy besides the plan."""
    address: str = ""
    port: str = ""
    ssh: list[str] = field(default_factory=lambda: ["ssh"])
    label: bool = False
    grace: str = "300"
    help: bool = False
    launch_arguments: list[str] = field(default_factory=list)
    """Arguments of launch.sh on every host."""

    @classmethod
    def parse(cls, arguments: Sequence[str], environment: Mapping[str, str], workdir: str) -> SshOptions:
        """Parse a command line. Raises `LaunchError` for an invalid value."""
        options = cls(
            workdir=workdir, address=environment.get("MASTER_ADDR", ""), port=environment.get("MASTER_PORT", "")
        )
        waiting = list(arguments)
        while waiting:
            word = waiting.pop(0)
            name, equals, value = word.partition("=")
            if word in ("-h", "--help"):
                options.help = True
                return options
            if word == "--copy":
                options.copy = True
            elif word == "--label":
                options.label = True
            elif name not in _WITH_VALUE:
                options.launch_arguments.append(word)
            elif equals:
                options._set(name, value, environment)
            elif waiting:
                options._set(name, waiting.pop(0), environment)
            else:
                raise LaunchError(f"{name} needs a value")
        return options

    def _set(self, name: str, value: str, environment: Mapping[str, str]) -> None:
        match name:
            case "--hosts":
                self.hosts_file = value
            case "--env":
                self.variables.append(_assignment(value, environment))
            case "--with":
                if not os.path.exists(value):
                    raise LaunchError(f"--with {value}: there is no such file or folder")
                self.copy_too.append(os.path.abspath(value))
            case "--ssh":
                self.ssh = value.split()
            case _:
                setattr(self, name.removeprefix("--"), value)

    def check(self) -> None:
        """Raise `LaunchError` for values that do not go together or are not numbers."""
        if not re.fullmatch(r"[1-9][0-9]{0,5}", self.grace):
            raise LaunchError(f"--grace takes a number of seconds, not '{self.grace}'")
        if not re.fullmatch(r"([0-9]{1,5})?", self.port):
            raise LaunchError(f"the port must be a number, not '{self.port}'")
        if self.copy_too and not self.copy:
            raise LaunchError("--with names a file to copy besides the plan: add --copy")


def _assignment(value: str, environment: Mapping[str, str]) -> str:
    """NAME=VALUE of an `--env`, whose value may be left to this machine's environment."""
    name, equals, _ = value.partition("=")
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise LaunchError(f"--env takes NAME or NAME=VALUE, not '{value}'")
    if equals:
        return value
    if name not in environment:
        raise LaunchError(f"--env {name}: this variable is not set here")
    return f"{name}={environment[name]}"


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
    """Interpreter that launch.sh tries first if neither the hosts file nor the environment names one."""
    ssh: Sequence[str]
    """Command that is run instead of `ssh`."""
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
        """Plan folder on a host; a relative path starts at the host's home folder."""
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
    """A program for a host: first the variables that `CHECK` and `TRAIN` read, then the program, then a null byte."""
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
    """A path in the syntax of bash, in which `~/` is the home folder of the host."""
    if path.startswith("~/"):
        return '"$HOME"/' + shlex.quote(path[2:])
    return shlex.quote(path)
