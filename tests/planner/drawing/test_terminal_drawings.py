"""What is drawn in the terminal: within 80 columns, without colours where nobody sees them or nobody wants them."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from commandline import Run, run_once

COLOUR = re.compile(r"\x1b\[[0-9;]*\b(?:3[0-8]|4[0-8]|9[0-7]|10[0-7])[0-9;]*m")
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
WIDTH = 80


def _on_a_terminal(folder: Path, *arguments: str, **environment: str) -> str:
    """What a command prints on a terminal of 80 columns that knows colours."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (50, WIDTH))
    given = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "FORCE_COLOR")}
    process = subprocess.Popen(
        [sys.executable, "-m", "pipeplan", *arguments],
        cwd=folder,
        stdin=theirs,
        stdout=theirs,
        stderr=subprocess.DEVNULL,
        env=given | {"TERM": "xterm-256color"} | environment,
    )
    os.close(theirs)
    read = b""
    try:
        while more := os.read(ours, 65536):
            read += more
    except OSError:
        pass  # how Linux says that the other end is closed
    os.close(ours)
    assert process.wait() == 0
    return read.decode().replace("\r\n", "\n")


SENTENCES = ("Plan ", "Predicted: ", "  over ", "Verdict: ")
"""Lines of a solve that are not broken, so that they can be searched for."""


def _fits(printed: str) -> None:
    lines = [ESCAPE.sub("", line) for line in printed.splitlines()]
    assert max(len(line) for line in lines if not line.startswith(SENTENCES)) <= WIDTH


@pytest.mark.parametrize(
    "arguments",
    [
        ["simulate", "plan"],
        pytest.param(["solve", "--cluster", "A", "--solver", "dp", "--force"], marks=pytest.mark.slow),
        pytest.param(["explain", "--cluster", "A", "--samples", "0"], marks=pytest.mark.slow),
    ],
    ids=lambda arguments: arguments[0],
)
def test_colours_are_for_terminals_that_want_them(run: Run, tmp_path: Path, arguments: list[str]) -> None:
    assert run_once(run, "solve", "mnist-v100", "--cluster", "C", "--solver", "dp").code == 0
    piped = run(*arguments)
    assert piped.code == 0
    assert "\x1b" not in piped.out
    _fits(piped.out)
    coloured, plain = _on_a_terminal(tmp_path, *arguments), _on_a_terminal(tmp_path, *arguments, NO_COLOR="1")
    assert COLOUR.search(coloured)
    assert not COLOUR.search(plain)
    _fits(coloured)
    said, unsaid = ([line.rstrip() for line in ESCAPE.sub("", text).splitlines()] for text in (coloured, plain))
    # The solvers' seconds differ from run to run.
    assert len(said) == len(unsaid)
    assert [line for line in said if " s" not in line] == [line for line in unsaid if " s" not in line]
