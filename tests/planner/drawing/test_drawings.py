"""Tables and drawings: no cell is cut short, a drawing wraps like text, and colours are for terminals alone."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
import termios
from pathlib import Path

from commandline import Run, run_once
from rich import box
from rich.console import Console

from pipeplan.drawing.tables import FittingTable

ROWS = [("first", "123456", "7.89 ms", "44%"), ("second", "654321", "12.3 ms", "9%")]


def _printed(width: int) -> str:
    table = FittingTable(box=box.SIMPLE_HEAD, padding=0, pad_edge=False, expendable=("time\nms", "bytes", "absent"))
    for heading in ("layer", "bytes", "time\nms", "share"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in ROWS:
        table.add_row(*row)
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(table)
    console.print(table)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    half = len(text) // 2
    assert text[:half] == text[half:], "printing a table does not change it"
    return str(text[:half])


def test_columns_are_dropped_in_their_order_and_named() -> None:
    for width, shown, left_out in (
        (40, (0, 1, 2, 3), ""),
        (22, (0, 1, 3), "Not shown in 22 columns: time ms."),
        (16, (0, 3), "Not shown in 16 columns: time ms, bytes."),
    ):
        text = _printed(width)
        for row in ROWS:
            assert [cell in text for cell in row] == [number in shown for number in range(4)]
        assert "…" not in text
        assert left_out in " ".join(text.split())
        assert ("Not shown" in text) == bool(left_out)


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


def test_colours_are_for_terminals_that_want_them(run: Run, tmp_path: Path) -> None:
    assert run_once(run, "solve", "mnist-v100", "--cluster", "C", "--solver", "dp").code == 0
    piped = run("simulate", "plan")
    assert (piped.code, "\x1b" in piped.out) == (0, False)
    coloured, plain = (_on_a_terminal(tmp_path, "simulate", "plan", **more) for more in ({}, {"NO_COLOR": "1"}))
    assert COLOUR.search(coloured)
    assert not COLOUR.search(plain)
    for printed in (piped.out, coloured):
        assert max(len(ESCAPE.sub("", line)) for line in printed.splitlines()) <= WIDTH
    said, unsaid = ([line.rstrip() for line in ESCAPE.sub("", text).splitlines()] for text in (coloured, plain))
    assert said == unsaid
