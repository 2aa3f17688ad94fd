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

import pytest
from commandline import Run, run_once
from rich import box
from rich.console import Console

from pipeplan.drawing.model_graph import LINE_GAP, NODE_DISTANCE, NODE_SIZE, RANKS_IN_LINE, layer_groups, model_graph
from pipeplan.drawing.tables import FittingTable
from pipeplan.profile_data.layers import Layer, Tensor
from pipeplan.profile_data.profile import Profile

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


BRANCHES = 5


def _broom() -> Profile:
    """A chain that fills one line, and then layers that all read its last one."""
    names = [f"chain{number}" for number in range(RANKS_IN_LINE)]
    ends = [f"end{number}" for number in range(BRANCHES)]
    tensors = [Tensor(f"{name}.out", name, (names[at + 1],), 10, 10) for at, name in enumerate(names[:-1])]
    tensors.append(Tensor("last", names[-1], tuple(ends), 10, 10))
    layers = tuple(Layer(name, 1e-3, 1e-3, 10, 10) for name in [*names, *ends])
    return Profile(layers=layers, tensors=tuple(tensors), minibatch=1)


def test_a_line_is_as_high_as_its_widest_rank() -> None:
    profile = _broom()
    graph = model_graph(profile, *layer_groups(profile, {layer.name: 0 for layer in profile.layers}))
    tops = dict(zip(graph.nodes["name"], graph.nodes["y"], strict=True))
    assert {tops[f"chain{number}"] for number in range(RANKS_IN_LINE)} == {0}
    second = NODE_SIZE[1] + LINE_GAP
    assert sorted(tops[f"end{number}"] for number in range(BRANCHES)) == [
        second + number * NODE_DISTANCE[1] for number in range(BRANCHES)
    ]
    assert graph.height == second + (BRANCHES - 1) * NODE_DISTANCE[1] + NODE_SIZE[1]
    assert len(graph.bends) == BRANCHES, "each of these edges goes around to the next line"
    assert all(points[2] == points[4] == NODE_SIZE[1] + LINE_GAP / 2 for points in graph.bends)


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


def _fits(printed: str) -> None:
    lines = [ESCAPE.sub("", line) for line in printed.splitlines()]
    assert max(map(len, lines)) <= WIDTH


@pytest.mark.parametrize(
    "arguments",
    [
        ["simulate", "plan"],
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
