"""What a solve reports while it runs, and the line that the command line makes of it."""

from __future__ import annotations

import io
import sys
import threading

import pytest
from commandline import Run
from long_chains import long_chain

import pipeplan
from pipeplan.cli import output
from pipeplan.cli.solving import PHASES, progress_text, solve_line
from pipeplan.planning.settings import SolveProgress


def test_a_solve_reports_its_phases_and_bounds_that_hold() -> None:
    states: list[SolveProgress] = []
    outcome = pipeplan.solve(
        long_chain(8), pipeplan.cluster("A"), stages=3, schedule="1f1b-stashing", progress=states.append
    )
    phases = list(dict.fromkeys(state.phase for state in states))
    assert phases == ["cuts", "DP", "ILP", "certificate", "baselines", "simulation"]
    assert set(phases) <= set(PHASES)
    best_s = min(result.objective_s for result in outcome.results)
    for state in states:
        assert state.best_s is None or state.best_s >= best_s * (1 - 1e-9)
        assert state.bound_s is None or state.bound_s <= best_s * (1 + 1e-9)
        assert state.gap is None or 0 <= state.gap < 1
    assert states[-1].best_s == pytest.approx(best_s)


def test_the_line_says_phase_best_bound_gap_and_seconds() -> None:
    began = SolveProgress.started().began
    assert progress_text(SolveProgress("cuts", began=began)) == "listing the model's cuts: 0 s"
    text = progress_text(SolveProgress("DP", 0.3, 0.25, began - 12.2))
    assert text == "searching with the DP: best 300 ms, bound 250 ms, gap 16.67%, 12 s"


def test_outside_of_terminals_a_line_is_printed_now_and_then(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert output.LINE_EVERY_S == 10.0
    assert "searching" not in run("solve", "mnist-v100", "--cluster", "C", "--solver", "dp", "--no-write").err
    monkeypatch.setattr(output, "LINE_EVERY_S", 0.01)
    asked: list[str] = []
    printed = threading.Event()

    def text() -> str:
        if len(asked) == 2:
            printed.set()  # both lines before this one have been printed
        asked.append(f"line {len(asked)}")
        return asked[-1]

    with output.live_line(text):
        assert printed.wait(60)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines()[:2] == ["line 0", "line 1"]


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_in_a_terminal_the_line_is_drawn_on_standard_error_and_goes_away(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with output.silenced(), solve_line() as report:
        report(SolveProgress("ILP"))
    assert terminal.getvalue() == "", "nothing is drawn while silenced"
    with solve_line() as report:
        report(SolveProgress("ILP", 0.3, 0.25, SolveProgress.started().began))
    drawn = terminal.getvalue()
    assert "confirming with the ILP" in drawn
    assert "gap 16.67%" in drawn
    assert drawn.rindex("\x1b[2K") > drawn.rindex("confirming"), "the line is cleared at the end"
    assert capsys.readouterr().out == ""
