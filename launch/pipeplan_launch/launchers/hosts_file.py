"""Reads the hosts file of a launch over ssh: one host per line, in the order of the plan's servers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from pipeplan_launch.errors import LaunchError
from pipeplan_launch.files import read_file

MAX_BYTES = 2**20
_ASSIGNMENT = re.compile(r"[A-Z_][A-Z0-9_]*=")


@dataclass(frozen=True)
class Host:
    """One line of the file."""

    name: str
    """Destination for ssh: `gpu1`, `me@gpu2`, or a name of ~/.ssh/config."""
    port: str = ""
    """Port of its ssh server; if empty, ssh decides."""
    folder: str = ""
    """Plan folder on the host; a relative path starts at the host's home folder. Empty: the same path as on this
    machine."""
    python: str = ""
    """Interpreter on the host that has pipeplan; `~/` is the home folder of the host. Empty: launch.sh decides."""
    address: str = ""
    """Address at which the other hosts reach this host. Used for the first host only."""
    variables: tuple[str, ...] = ()
    """Environment variables for this host only, as NAME=VALUE."""


def read_hosts(path: str) -> list[Host]:
    """Read a hosts file. Raises `LaunchError`, with the number of the line, for an unknown word."""
    try:
        text = read_file(Path(path), MAX_BYTES).decode("utf-8", "surrogateescape")
    except OSError as error:
        raise LaunchError(f"cannot read {path}: {error.strerror or error}") from error
    hosts = []
    for number, line in enumerate(text.split("\n"), 1):
        words = line.partition("#")[0].split()
        if words:
            hosts.append(_host(words, f"{path}, line {number}"))
    return hosts


def _host(words: list[str], place: str) -> Host:
    name, *rest = words
    if name.startswith("-"):  # ssh would treat it as an option
        raise LaunchError(f"{place}: '{name}' is not the name of a host")
    fields: dict[str, str] = {}
    variables: list[str] = []
    for word in rest:
        key, equals, value = word.partition("=")
        if equals and key in ("port", "folder", "python", "address"):
            fields[key] = value
        elif _ASSIGNMENT.match(word):
            variables.append(word)
        else:
            raise LaunchError(f"{place}: '{word}' is none of port=, folder=, python=, address= and NAME=VALUE")
    return Host(name, variables=tuple(variables), **fields)
