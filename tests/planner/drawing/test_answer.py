"""The answer of `pipeplan solve`, tables that fit, and colours for terminals alone."""

from __future__ import annotations

import io
import math
import os
import pty
import re
import subprocess
import sys
import termios
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from commandline import Run, run_once
from rich import box
from rich.console import Console

import pipeplan
from pipeplan.drawing.answer import LABEL, answer_lines
from pipeplan.drawing.tables import FittingTable
from pipeplan.planning.choose import Choice
from pipeplan.planning.figure import TOLERANCE

SETTINGS = pipeplan.Settings(time_limit_s=None, solver="dp", certify=False)
LABELS = ["RUN", "ALSO", "WHY", "TRUST", "NEXT"]
NEXT = "plan/launch.sh --epochs 1  |  pipeplan explain plan"
RATE = re.compile(r"([0-9.]+) samples/s")


def _solved(model: str, cluster: str, **more: object) -> pipeplan.Outcome:
    """The answer on cluster C, or on two servers of cluster A."""
    profile, where = pipeplan.read_profile(model), pipeplan.cluster(cluster, servers=2 if cluster == "A" else None)
    return pipeplan.solve(profile, where, **{"settings": SETTINGS} | more)  # type: ignore[arg-type]


CASES: dict[str, Callable[[], pipeplan.Outcome]] = {
    "a pipeline with idle workers": lambda: _solved("vgg16-v100", "A", microbatch=64),
    "data parallelism": lambda: _solved("vgg16-v100", "C", batch=256),
    "old gradients allowed": lambda: _solved("vgg16-v100", "A", microbatch=64, staleness=math.inf),
    "many stages": lambda: _solved("mnist-v100", "C", microbatch=8),
    "a named schedule": lambda: _solved("mnist-v100", "C", schedule="2bw", batch=128),
    "a long straight pipeline": lambda: _solved(
        "awd-lm-v100", "A", schedule="1f1b-flush", max_replicas=1, stages=7, settings=replace(SETTINGS, simulate=False)
    ),
    "stages asked for": lambda: _solved("mnist-v100", "C", stages=3, microbatch=8),
    "inference": lambda: _solved("vgg16-v100", "C", inference=True),
    "a divided optimiser": lambda: _solved("mnist-v100", "C", batch=128, shard_optimizer=True, max_stages=1),
}


@cache
def _outcome(case: str) -> pipeplan.Outcome:
    return CASES[case]()


def _chosen(case: str) -> tuple[pipeplan.Outcome, Choice]:
    outcome = _outcome(case)
    assert outcome.choice is not None
    return outcome, outcome.choice


def _parts(lines: list[str]) -> dict[str, list[str]]:
    """The lines under every label; the heading has none."""
    parts: dict[str, list[str]] = {"": []}
    label = ""
    for line in lines:
        label = line[:LABEL].strip() or label if not line[:1].islower() and line[:LABEL].strip() in LABELS else label
        parts.setdefault(label, []).append(line)
    return parts


def _rates(lines: list[str]) -> list[float]:
    return [float(found[1]) for line in lines if (found := RATE.search(line))]


@pytest.mark.parametrize("case", CASES)
def test_the_answer_has_at_most_twenty_lines_that_fit(case: str) -> None:
    for asked in (20, 59, 60, 80, 100, 101, 500):
        lines, width = answer_lines(_outcome(case), asked, NEXT), min(max(asked, 60), 100)
        assert len(lines) <= 20, "\n".join(lines)
        assert max(map(len, lines)) <= width
        assert all(line == line.rstrip() for line in lines)
        labels = [line[:LABEL].strip() for line in lines if line[:LABEL].strip() in LABELS]
        assert labels == LABELS
        assert lines == answer_lines(_outcome(case), width, NEXT)


def test_idle_workers_are_explained_by_the_best_plan_that_was_found_on_more() -> None:
    outcome, choice = _chosen("a pipeline with idle workers")
    widest = next(one for one in choice.rivals if one.plan.busy == outcome.problem.cluster.workers)
    for factor, said in ((1.2, "no faster"), (0.98, "2.0% faster")):
        figure = replace(widest.figure, formula_s=0.0, simulated_s=outcome.predicted_s * factor)
        known = replace(choice, widest=replace(widest, figure=figure))
        lines = answer_lines(replace(outcome, choice=known), 80, NEXT)
        assert f"idle; the best plan found on {widest.plan.busy} is {said}" in " ".join(lines)


def test_data_parallelism_is_listed_once() -> None:
    outcome, choice = _chosen("data parallelism")
    taken = choice.taken
    deeper = replace(taken.plan, stages=tuple(replace(stage, depth=2) for stage in taken.plan.stages))
    same = [replace(taken, kind=kind, plan=deeper) for kind in ("pipeline", "one server", "uniform pipeline")]
    wide = replace(taken, kind="uniform pipeline", plan=replace(taken.plan, accumulate=1))
    for case, more in (("data parallelism", same), ("a pipeline with idle workers", [wide])):
        outcome, choice = _chosen(case)
        beside = replace(outcome, choice=replace(choice, rivals=(*choice.rivals, *more)))
        assert answer_lines(beside, 80, NEXT) == answer_lines(outcome, 80, NEXT)


@pytest.mark.parametrize("case", CASES)
def test_no_line_contradicts_another(case: str) -> None:
    outcome = _outcome(case)
    parts = _parts(answer_lines(outcome, 100, NEXT))
    (rate,) = _rates(parts["RUN"])
    assert rate == pytest.approx(outcome.problem.profile.minibatch / outcome.predicted_s, rel=1e-3)
    same = [line for line in parts["ALSO"] if "old gradients" not in line and "--compress" not in line]
    faster = [other for other in _rates(same) if other > rate * (1 + TOLERANCE) * (1 + 1e-3)]
    if case == "a long straight pipeline":  # which is asked for, although data parallelism is faster
        assert faster
        assert not any("no plan found" in line for line in parts["RUN"])
    else:
        assert not faster, "\n".join([*parts["RUN"], *parts["ALSO"]])
    gain = re.search(r"([0-9.]+)x DDP", parts["RUN"][0])
    rival = next((_rates([line])[0] for line in same if re.search(r" (DDP|data parallelism),", f" {line}")), None)
    if gain is not None and rival is not None:
        assert rate / rival == pytest.approx(float(gain[1]), abs=0.006)
    stages = [line for line in parts["RUN"] if line.lstrip().startswith("stage ")]
    assert 0 < len(stages) <= 6
    assert stages[-1].split()[1] == str(len(outcome.plan.stages))
    assert ("DDP does not fit" in parts["RUN"][0]) is False
    if len(outcome.plan.stages) > len(stages):
        assert any("pipeplan explain has all" in line for line in parts["RUN"])
    idle = outcome.problem.cluster.workers - outcome.plan.busy
    assert any(f"{idle} of " in line and "workers idle" in line for line in parts["RUN"]) is (idle > 0)


def test_the_stages_that_are_left_out_are_named() -> None:
    for count, hidden in ((7, "stage 6"), (8, "stages 6 to 7"), (6, None)):
        outcome = _solved("alexnet-v100", "A", schedule="gpipe", stages=count, max_replicas=1, batch=64, microbatch=64)
        text = "\n".join(answer_lines(outcome, 80, NEXT))
        assert (f"… {hidden}; pipeplan explain has all" in text) is (hidden is not None)


def test_the_gap_in_trust_is_that_of_the_outcome() -> None:
    outcome = _outcome("a pipeline with idle workers")
    trust = " ".join(" ".join(_parts(answer_lines(outcome, 80, NEXT))["TRUST"]).split())
    assert trust == f"TRUST simulated, never run on this cluster; {outcome.verdict.text}"
    named = re.search(r"more than ([0-9.]+)% faster", trust)
    assert named is None or float(named[1]) / 100 == pytest.approx(outcome.gap, abs=6e-4)


def test_the_heading_has_the_batch_and_says_if_it_is_assumed_or_the_search_was_cut_off() -> None:
    outcome, choice = _chosen("a pipeline with idle workers")
    assert "Batch 512 (assumed; --batch), microbatch 64." in " ".join(_parts(answer_lines(outcome, 80, NEXT))[""])
    given = " ".join(answer_lines(_outcome("data parallelism"), 80, NEXT)[:2])
    assert "Batch 256, microbatch " in given
    assert "assumed" not in given
    said = "The search was cut off by the time limit."
    for finished, bound_s in ((True, outcome.bound_s), (False, outcome.bound_s), (False, outcome.predicted_s)):
        cut = replace(outcome, choice=replace(choice, finished=finished), bound_s=bound_s)
        stopped = not finished and cut.gap > TOLERANCE
        parts = _parts(answer_lines(cut, 80, NEXT))
        assert (said in " ".join(parts[""])) is stopped
        idle = next((line for line in parts["RUN"] if "workers idle" in line), "")
        assert idle.endswith("workers idle") is stopped or not idle


def test_old_gradients_have_a_line_with_what_was_measured_or_are_said_beside_the_plan() -> None:
    also = _parts(answer_lines(_outcome("a pipeline with idle workers"), 80, NEXT))["ALSO"]
    at = next(number for number, line in enumerate(also) if "old gradients (--staleness " in line)
    assert re.search(r"[0-9.]+ samples/s +[0-9.]+x RUN$", also[at])
    assert "NOT SAFE: SGD with momentum missed the goal in 5 of 5 runs" in " ".join(" ".join(also[at + 1 :]).split())
    parts = _parts(answer_lines(_outcome("old gradients allowed"), 80, NEXT))
    run = " ".join(" ".join(parts["RUN"]).split())
    assert re.search(r"gradients up to \d+ updates? old", run)
    assert ("NOT SAFE: SGD with momentum" in run, "trains like one process" in run) == (True, False)
    assert not any("old gradients" in line for line in parts["ALSO"])


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
