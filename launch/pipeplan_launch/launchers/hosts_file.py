"""Reads the hosts file of a launch over ssh: one host per line, in the order of the plan's servers."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
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


# Arguments of the modules that rendered scripts call: facts of the plan, `--`, and the user's arguments.


def parse_script_arguments(
    parser: argparse.ArgumentParser, arguments: Sequence[str]
) -> tuple[argparse.Namespace, list[str]]:
    """Parse the facts of the plan with `parser`, after adding the facts that all scripts have. The user's arguments
    stay unparsed.
    """
    parser.add_argument("--plan", required=True, help="the plan folder")
    parser.add_argument("--digest", required=True, help="digest of the plan: another plan is refused")
    end = list(arguments).index("--") if "--" in arguments else len(arguments)
    return parser.parse_args(arguments[:end]), list(arguments[end + 1 :])


def check_digest(plan_folder: str, digest: str, kind: str) -> None:
    """Raise `LaunchError` unless `plan_folder` still holds the plan that the script was rendered for.

    `digest`: the digest of that plan, which stage files name. `kind`: `ssh` or `slurm`.
    """
    stage = Path(plan_folder, "stages", "stage-0.json")
    try:
        same = digest in stage.read_text(encoding="utf-8", errors="replace")
    except OSError:
        same = False
    if not same:
        raise LaunchError(
            f"the plan in {plan_folder} is not the one that this file was rendered for: run pipeplan export {kind} "
            "--force"
        )
