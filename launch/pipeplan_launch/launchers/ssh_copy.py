"""Copies the plan, the file of its model and the paths of `--with` to every host, for `--copy`."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from functools import partial
from typing import IO

from pipeplan_launch.errors import terminal_line
from pipeplan_launch.launchers.ssh_connection import closed_program
from pipeplan_launch.launchers.ssh_requests import HostRequests, Reply, last_line

_IDENTITY = ("stat", "-c", "%i %z", "--")
"""Command that prints the inode and the time of the last change, which are equal only for the same file."""
_RECEIVE = """
if [[ "$(TZ=UTC0 stat -c "%i %z" -- "$mark" 2>/dev/null)" == "$identity" ]]; then cat >/dev/null; exit 0; fi
mkdir -p -- "$to" && tar -C "$to" -xf -
"""
"""Program: unpack an archive, unless the host sees this machine's files (shared file system, or this very machine)."""


def copy_to_all(requests: HostRequests, paths: Sequence[str]) -> bool:
    """Copy the plan folder without its runs, then `paths`, to all hosts. Prints an error line for each that fails."""
    replies = requests.on_all(partial(_copy_to, requests, paths))
    for host, reply in zip(requests.launch.hosts, replies, strict=True):
        if reply.status:
            problem = f"{host.name}: nothing could be copied there: {last_line(reply.errors)}"
            print(f"error: {terminal_line(problem)}", file=sys.stderr)
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
    """Copy `name` from a local folder to the folder `to` of a host, unless the host sees this very file `mark`."""
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
    """Identity of a file on this machine as `_RECEIVE` sees it, or a text that no file has."""
    command = [*_IDENTITY, path]
    try:
        done = subprocess.run(command, env={**os.environ, "TZ": "UTC0"}, capture_output=True, text=True, check=False)
    except OSError:
        return "none"
    return done.stdout.strip() or "none"


def _without_runs(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if entry.name in ("runs", "./runs") else entry
