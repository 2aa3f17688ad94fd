"""Calls the command line in this process and says what is wrong with how a call ended."""

from __future__ import annotations

import contextlib
import io
import json
import resource
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from pipeplan.cli import main

LIMIT_S = 30
"""CPU time. Not a measure of speed: what takes so long on problems of a few layers does not end at all."""
WAITING_LIMIT_S = 300
"""Wall time, for what waits without computing: so much that other programs on the machine change nothing."""
MEMORY_BYTES = 1 << 30
"""Address space that a call may take beyond what the process has already."""


class Hang(BaseException):
    """A call that does not end."""


class Ended(NamedTuple):
    """Exit code, what was printed, and the traceback where there was one."""

    code: int
    out: str
    err: str
    trace: str


def call(arguments: list[str]) -> Ended:
    """Run `pipeplan` with these arguments."""
    out, err = io.StringIO(), io.StringIO()
    code, trace = -1, ""
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch.object(sys, "argv", ["pipeplan", *arguments]),
        warnings.catch_warnings(),
        _limited(),
    ):
        # They would be lines on stderr that say nothing to the user.
        warnings.simplefilter("error", RuntimeWarning)
        try:
            main()
        except SystemExit as stopped:
            code = int(stopped.code or 0)
        except (Exception, Hang):
            trace = traceback.format_exc()
    return Ended(code, out.getvalue(), err.getvalue(), trace)


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    """Stop what does not end, and refuse memory without end."""

    def stop(*_: Any) -> None:
        raise Hang(f"no end after {LIMIT_S} s of CPU time, or {WAITING_LIMIT_S} s")

    before = [(number, signal.signal(number, stop)) for number in (signal.SIGALRM, signal.SIGPROF)]
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY_BYTES, hard))
    signal.alarm(WAITING_LIMIT_S)
    signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        for number, handler in before:
            signal.signal(number, handler)


def listing(folder: Path) -> dict[str, bytes]:
    """Every file in a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.stat().st_size < 1 << 26
    }


def complaint(ended: Ended, before: dict[str, bytes], after: dict[str, bytes]) -> str:
    """What is wrong with an ending, empty where nothing is: an answer, or one clear line and nothing written."""
    if ended.trace:
        return ended.trace
    if any(ord(letter) < 32 and letter != "\n" for letter in ended.out + ended.err):
        return f"control characters in the output: {ended.err[-300:]!r} {ended.out[:300]!r}"
    if ended.code == 0:
        return _answered(before, after)
    if ended.code != 2:
        return f"exit code {ended.code}: {ended.err[-600:]}"
    lines = ended.err.splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    if len(errors) != 1 or lines[-1] is not errors[0]:
        return f"not one line: {ended.err[-600:]}"
    if len(errors[0]) < len("error: x y") or len(errors[0]) > 1200:
        return f"not a clear line: {errors[0][:200]}"
    if after != before:
        changed = sorted({name for name in {*before, *after} if before.get(name) != after.get(name)})
        return f"complained, but changed {changed}: {errors[0]}"
    return ""


def _answered(before: dict[str, bytes], after: dict[str, bytes]) -> str:
    for name, data in after.items():
        if name in before and before[name] == data:
            continue
        if "/." in name or name.startswith("."):
            return f"left a temporary file: {name}"
        folder, _, last = name.rpartition("/")
        if last == "plan.json" or folder.endswith("stages"):
            text = data.decode()
            if "NaN" in text or "Infinity" in text:
                return f"{name} holds a number that is none"
            json.loads(text)
        if last == "plan.json" and f"{folder}/launch.sh" not in after:
            return f"{folder} is half written"
    return ""
