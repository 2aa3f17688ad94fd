"""What a solve reports while it runs, and what its answer has where the time limit or Ctrl-C ends it."""

from __future__ import annotations

import io
import json
import signal
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from commandline import Run
from long_chains import long_chain

import pipeplan
from pipeplan.cli import output
from pipeplan.cli.solving import PHASES, progress_text, watched_search
from pipeplan.cluster_data.cluster import Cluster, Device, Level
from pipeplan.errors import InfeasibleError, NotFoundInTimeError
from pipeplan.explanation.explain import RobustnessSettings, explain_plan
from pipeplan.planning import baselines, figure, run_solvers, solve
from pipeplan.planning.choose import choose
from pipeplan.planning.infeasibility import diagnose, why_infeasible
from pipeplan.planning.outcome import Outcome
from pipeplan.planning.question import Machines, Question
from pipeplan.planning.settings import Settings, SolveProgress
from pipeplan.problem.cuts import enumerate_cuts
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.replanning.replan import helpful_options
from pipeplan.solvers.dp import certificate, dynamic_program
from pipeplan.solvers.dp.budget import OutOfTime
from pipeplan.solvers.ilp import integer_program
from pipeplan.solvers.result import Result, Status
from pipeplan.util import deadline as deadlines
from pipeplan.util.deadline import NO_DEADLINE, Deadline

PASSED = Deadline(0.0)
"""The clock began before."""
SMALL = 13 * 2**18
"""Bytes of a device in which every layer of `_problem` fits, and no plan of all of them."""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock of deadlines that stands still at 100 s until a test sets it."""
    now = [100.0]
    monkeypatch.setattr(deadlines.time, "perf_counter", lambda: now[0])
    return now


def _problem(*, memory: int = 16 * 2**30, layers: int = 6, options: Options | None = None) -> Problem:
    levels = (Level("server", 2, 1e10), Level("cluster", 2, 1e9))
    cluster = Cluster("small", Device("chip", "cuda", memory), levels)
    return Problem(long_chain(layers), cluster, options or Options(recompute=False))


def test_the_phases_divide_the_limit_and_what_one_leaves_goes_to_the_next(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 60 s: the DP has 30 and takes 20, the ILP has 32 of the other 40 and takes 30, the rest has 10."""
    given: dict[str, float | None] = {}
    solve_by_dp, solve_by_ilp = dynamic_program.solve, integer_program.solve
    make, compute = certificate.make_certificate, baselines.uniform_grid

    def dp(problem: Problem, cuts: object, seconds: float | None = None, *rest: object, **more: object) -> Result:
        if "DP" not in given and not problem.options.grid and problem.options.stages is None:
            given["DP"], clock[0] = seconds, clock[0] + 20.0
        return solve_by_dp(problem, cuts)

    def ilp(problem: Problem, limits: integer_program.IlpLimits, *rest: object) -> Result:
        if "ILP" not in given:
            given["ILP"], clock[0] = limits.seconds, clock[0] + 30.0
        return solve_by_ilp(problem, replace(limits, seconds=None), *rest)

    def prove(*arguments: object, **kinds: bool) -> object:
        given["certificate"], clock[0] = arguments[-1].left_s, clock[0] + 4.0
        return make(*arguments[:-1], **kinds)

    def compare(*arguments: object) -> object:
        given["baselines"] = arguments[-1].left_s
        return compute(*arguments[:-1])

    monkeypatch.setattr(dynamic_program, "solve", dp)
    monkeypatch.setattr(integer_program, "solve", ilp)
    monkeypatch.setattr(run_solvers, "make_certificate", prove)
    monkeypatch.setattr(baselines, "uniform_grid", compare)
    outcome = solve.solve(_problem(), Settings(time_limit_s=60.0, confirm_s=None))
    assert given == pytest.approx({"DP": 30.0, "ILP": 32.0, "certificate": 5.0, "baselines": 2.4})
    assert outcome.verdict.proven


def test_every_phase_for_which_there_is_no_time_says_so() -> None:
    problem = _problem(layers=9)
    cuts = enumerate_cuts(problem, 1000, PASSED)
    assert cuts.ideals == tuple((1 << size) - 1 for size in range(10)), "those of one order"
    assert not cuts.complete
    problem = _problem()
    cuts = enumerate_cuts(problem, 1000)
    late, known = (baselines.uniform_grid(problem, cuts, ends) for ends in (PASSED, Deadline()))
    assert (late.name, late.step_time_s, late.remark) == (known.name, None, baselines.NO_TIME)
    assert known.step_time_s is not None
    step_time_s = dynamic_program.solve(problem, cuts).objective_s
    made = certificate.make_certificate(problem, cuts, step_time_s, PASSED)
    assert (made.document, made.note) == (None, certificate.NO_TIME)
    assert certificate.make_certificate(problem, cuts, step_time_s).document is not None
    problem = _problem(memory=2**24)
    unbuilt = integer_program.solve(problem, integer_program.IlpLimits(seconds=-1.0))
    best = integer_program.solve(problem, integer_program.IlpLimits())
    assert unbuilt.status in (Status.TIME_LIMIT, Status.FEASIBLE)
    assert 0 < unbuilt.bound_s <= best.objective_s
    assert not unbuilt.interrupted


def test_a_choice_for_which_there_is_no_time_says_so() -> None:
    problem = _problem()
    machines = Machines(problem.profile, problem.cluster)
    with pytest.raises(NotFoundInTimeError, match="no plan was found in time; give more with --time-limit"):
        choose(Question(machines, replace(problem.options, max_replicas=1)), PASSED)
    choice = choose(Question(machines, problem.options), PASSED)
    assert choice.taken.sharding.divides_weights, "which needs no search"
    assert not choice.finished
    assert helpful_options(replace(problem, options=Options(stages=4)), PASSED) == []
    too_many = replace(problem.options, pins=((problem.profile.layers[0].name, 2),))
    with pytest.raises(InfeasibleError, match="no plan"):
        choose(Question(machines, too_many), NO_DEADLINE)


def test_no_plan_in_time_is_not_called_a_problem_without_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by a solve nor by an explanation, which would say what to relax."""
    late = Result("DP", Status.TIME_LIMIT, None, float("inf"), 0.0, 0.0)
    monkeypatch.setattr(solve, "run_solvers", lambda *arguments: (late,))
    with pytest.raises(NotFoundInTimeError, match="no plan was found within the time limit; give more"):
        solve.solve(_problem(), Settings(compare=False))
    with pytest.raises(NotFoundInTimeError):
        explain_plan(_problem(), Settings(compare=False), RobustnessSettings())


def test_a_diagnosis_says_what_it_had_no_time_for(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, untold = _problem(memory=SMALL), "no time to find out what else would do"
    late, whole = diagnose(problem, 1000, PASSED), diagnose(problem, 1000)
    assert (late.enough, late.growth, late.relaxed, late.unfinished) == (None, None, (), True)
    assert untold in late.text
    assert "--time-limit" in late.text
    assert not whole.unfinished
    assert "no time" not in whole.text
    tiny = diagnose(_problem(memory=2**16), 1000, PASSED)
    assert tiny.oversized, "a layer that fits nowhere takes no search"
    tried: list[bool] = []
    feasible = dynamic_program.is_feasible

    def once(*arguments: object) -> bool:
        """Answers until the first memory that suffices is known."""
        if any(tried):
            raise OutOfTime
        tried.append(feasible(*arguments))
        return tried[-1]

    monkeypatch.setattr(dynamic_program, "is_feasible", once)
    found = diagnose(problem, 1000).enough
    assert whole.enough.memory_bytes <= found.memory_bytes <= 2 * whole.enough.memory_bytes
    monkeypatch.setattr(dynamic_program, "is_feasible", _interrupted)
    text = why_infeasible(problem, enumerate_cuts(problem, 1000))
    assert "no plan satisfies the constraints" in text
    assert untold in text


def _interrupted(*arguments: object) -> bool:
    raise KeyboardInterrupt


def _raise_ctrl_c(*arguments: object, **named: object) -> None:
    signal.raise_signal(signal.SIGINT)


@cache
def _uninterrupted() -> Outcome:
    return solve.solve(_problem(), Settings(solver="dp"))


@pytest.mark.parametrize(
    ("where", "name"),
    [
        (run_solvers, "evaluate"),
        (run_solvers, "deepened"),
        (run_solvers, "contradiction"),
        (run_solvers, "make_certificate"),
        (baselines, "uniform_grid"),
        (solve, "improve"),
        (figure, "steady_step_s"),
        (solve.contention, "least_step_time_of_shared_cores_s"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_ctrl_c_in_any_phase_after_the_dp_keeps_its_plan(
    where: object, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first call is interrupted. A second Ctrl-C would end the command."""
    problem, best = _problem(), _uninterrupted()
    real: Callable[..., object] = getattr(where, name)
    calls: list[str] = []

    def once(*arguments: object, **named: object) -> object:
        calls.append(name)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return real(*arguments, **named)

    monkeypatch.setattr(figure, "_REMEMBERED", OrderedDict())
    monkeypatch.setattr(where, name, once)
    if name == "least_step_time_of_shared_cores_s":
        # Called when the outcome is put together, too: nothing is left to wait for then.
        calls.append("")
    outcome = solve.solve(problem, Settings(solver="dp"))
    assert calls
    assert outcome.plan.config == best.plan.config
    assert outcome.objective_s == pytest.approx(best.objective_s)
    assert [one.name for one in outcome.baselines] == [one.name for one in best.baselines]
    assert outcome.bound_s <= outcome.objective_s * (1 + 1e-9)


@pytest.mark.parametrize(
    ("target", "line"),
    [
        ("pipeplan.planning.solve.enumerate_cuts", "interrupted: the model's cuts were still being listed"),
        ("pipeplan.solvers.dp.pipeline_searches.terms_of", "interrupted: no plan was found until then"),
        ("pipeplan.planning.run_solvers.make_certificate", ""),
        ("pipeplan.planning.run_solvers.deepened", ""),
    ],
)
def test_ctrl_c_ends_with_130_and_writes_the_plan_if_there_is_one(
    target: str, line: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target, _raise_ctrl_c)
    done = run("solve", "mnist-v100" if line else "vgg16-v100", "--cluster", "C", "--solver", "dp", "-o", "new")
    assert done.code == 130
    if line:
        assert done.out == ""
        (said,) = [one for one in done.err.splitlines() if not one.startswith("choosing what to solve")]
        assert said.startswith(f"error: {line}")
        assert not Path("new").exists()
    else:
        assert "RUN " in done.out
        document = json.loads(Path("new/plan.json").read_text())
        assert [one["remark"] for one in document["baselines"]] == ["", baselines.STOPPED]
        assert done.err.endswith("error: interrupted\n")


# Progress.


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
    with output.silenced(), watched_search() as (report, _):
        report(SolveProgress("ILP"))
    assert terminal.getvalue() == "", "nothing is drawn while silenced"
    with watched_search() as (report, _):
        report(SolveProgress("ILP", 0.3, 0.25, SolveProgress.started().began))
    drawn = terminal.getvalue()
    assert "confirming with the ILP" in drawn
    assert "gap 16.67%" in drawn
    assert drawn.rindex("\x1b[2K") > drawn.rindex("confirming"), "the line is cleared at the end"
    assert capsys.readouterr().out == ""
