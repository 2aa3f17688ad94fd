"""Calling the command line in a test."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple


class Ran(NamedTuple):
    """Exit code, and what was printed."""

    code: int
    out: str
    err: str


Run = Callable[..., Ran]


def refused(run: Run, *arguments: str) -> str:
    """The line of an error, with which a command ends without any other output and without changing a file."""
    before = {path: path.stat().st_mtime_ns for path in Path().rglob("*")}
    done = run(*arguments)
    assert (done.code, done.out, done.err.count("\n"), done.err[:7]) == (2, "", 1, "error: "), (arguments, done)
    assert {path: path.stat().st_mtime_ns for path in Path().rglob("*")} == before, arguments
    return done.err[7:-1]


def check_refusals(run: Run, cases: Mapping[str, str]) -> None:
    """Check that each command line ends in one line with the words beside it."""
    for line, said in cases.items():
        assert said in refused(run, *shlex.split(line)), line


_Files = dict[str, tuple[bytes, int]]
"""Content and mode of every file below a folder, by its path."""


class _Kept(NamedTuple):
    """What a command answered and wrote, and where that was."""

    ran: Ran
    written: _Files
    folder: bytes


_done: dict[tuple[tuple[str, ...], tuple[tuple[str, tuple[bytes, int]], ...]], _Kept] = {}


def run_once(run: Run, *arguments: str) -> Ran:
    """What `run(*arguments)` answers and writes, where a test only begins with that.

    The same command among the same files is run by the first test of a process. The others get copies of what it wrote,
    which name their own folder.
    """
    before = _files_here()
    key = arguments, tuple(sorted(before.items()))
    here = os.fsencode(Path.cwd())
    if key not in _done:
        ran = run(*arguments)
        written = {name: file for name, file in _files_here().items() if before.get(name) != file}
        _done[key] = _Kept(ran, written, here)
        return ran
    kept = _done[key]
    for name, (content, mode) in kept.written.items():
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.replace(kept.folder, here))
        path.chmod(mode)
    return kept.ran


def _files_here() -> _Files:
    paths = (path for path in Path().rglob("*") if path.is_file())
    return {str(path): (path.read_bytes(), path.stat().st_mode) for path in paths}
