"""The options of launch-ssh.sh. It passes on all options that it does not know to launch.sh, in their order."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pipeplan_launch.errors import LaunchError

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
