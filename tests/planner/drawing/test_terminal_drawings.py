"""What is drawn in the terminal: within 80 columns, without colours where nobody sees them or nobody wants them."""

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
from rich.console import Console

from pipeplan.cluster_data.cluster import Cluster, Device, Level
from pipeplan.cost.evaluate import evaluate
from pipeplan.explanation.terminal import BAR, MOST_STAGES, share_bar, stage_bars
from pipeplan.plan.plan import Plan, Stage
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.layers import Layer, Tensor
from pipeplan.profile_data.profile import Profile

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


def test_a_bar_is_as_long_as_its_share() -> None:
    lengths = {
        share: len(share_bar(share, "red").plain.rstrip(" 0123456789%")) for share in (0.0, 1e-4, 0.2, 0.5, 1.0, 1.7)
    }
    assert lengths == {0.0: 0, 1e-4: 1, 0.2: 2, 0.5: 5, 1.0: BAR, 1.7: BAR}
    assert {len(share_bar(share / 100, "red").plain) for share in range(0, 300, 7)} == {BAR + 5}
    assert share_bar(1.7, "red").plain.endswith(" 170%")


def _straight(count: int) -> str:
    """What is drawn of so many stages of one layer each, the last of which takes half as long as the others."""
    depths, last = [2 * (count - n) for n in range(count)], count - 1
    held = [2**29 // depth for depth in depths]
    layers = tuple(Layer(f"l{n}", 1 - 0.5 * (n == last), 2 - (n == last), 100, held[n]) for n in range(count))
    tensors = tuple(Tensor(f"t{n}", f"l{n}", (f"l{n + 1}",), 75, 75) for n in range(count - 1))
    device = Device("x", "cpu", 2**30)
    cluster = Cluster("c", device, (Level("server", count, 100.0),))
    plan = Plan(tuple(Stage((layer.name,), (n,), depths[n], 1) for n, layer in enumerate(layers)))
    score = evaluate(plan, Problem(Profile(layers, tensors, 4, "m"), cluster, Options()))
    console = Console(width=WIDTH, file=io.StringIO())
    for part in stage_bars(score, 1, True):
        console.print(part)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_stages_of_a_straight_pipeline_by_hand() -> None:
    """Passes of 3 s, a message of 75 bytes at 100 bytes/s, and half a GiB for the minibatches in flight."""
    first, second = (line.split() for line in _straight(2).splitlines()[3:5])
    assert first == ["1", "█" * BAR, "100%", "0%", "██▌", "25%", "█████", "50%"]
    assert second == ["2", "█████", "50%", "0%", "█████", "50%"]


def test_of_very_many_stages_those_that_take_longest_are_drawn() -> None:
    lines = _straight(40).splitlines()
    assert "Of 40 stages those that take longest." in lines
    rows = [line.split()[0] for line in lines if "█" in line]
    assert len(rows) == MOST_STAGES
    assert "40" not in rows


@pytest.mark.slow
def test_the_stages_are_explained_by_bars(run: Run) -> None:
    """VGG-16 on cluster A is 15-1, its pace bound by the compute of stage 1."""
    lines = run("explain", "--cluster", "A", "--samples", "0").out.splitlines()
    start = lines.index("What each stage takes of the pace, and of the memory")
    first, second = (line.split() for line in lines[start + 4 : start + 6])
    assert first[:3] == ["1", "█" * BAR, "100%"]
    assert second[0] == "2"
    _fits("\n".join(lines))
