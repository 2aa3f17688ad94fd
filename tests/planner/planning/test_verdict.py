"""The verdict: how much faster another plan could be, who shows that, and why a faster baseline was not taken."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from commandline import Run
from instances import random_instance, to_problem
from long_chains import chain
from solver_contract import solve_by_dp, solve_by_ilp

import pipeplan
from pipeplan.cluster_data import cluster_toml
from pipeplan.cost.evaluate import evaluate
from pipeplan.errors import DisagreementError
from pipeplan.plan.plan import Plan, Stage
from pipeplan.planning import solve
from pipeplan.planning.baselines import PARALLEL, UNIFORM_GRID, Baseline, not_taken_because
from pipeplan.planning.outcome import contradiction, gap_of, verdict_of
from pipeplan.planning.run_solvers import Disagreement
from pipeplan.planning.settings import Settings
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.layers import Layer
from pipeplan.profile_data.profile import load_profile
from pipeplan.solvers.dp import dynamic_program
from pipeplan.solvers.result import Result, Status

DP = Result("DP", Status.OPTIMAL, None, 2.0, 2.0, 0.0)
ILP = replace(DP, solver="ILP (HiGHS)")
LATE = replace(ILP, status=Status.FEASIBLE, objective_s=2.5, bound_s=1.5)
NONE = replace(ILP, status=Status.TIME_LIMIT, objective_s=math.inf, bound_s=0.0)
FASTER = "no plan of the searched space is"


def test_the_verdict_gives_gap_and_ground() -> None:
    """By step time, bound, and the answers of the solvers."""
    refuses = "DP shows the bound, and ILP (HiGHS) does not confirm it:"
    early = replace(LATE, note="it ended early")
    for step_s, bound_s, results, text in (
        (2.0, 2.0, (DP, ILP), f"proven: {FASTER} faster; DP and ILP (HiGHS) agree on the bound"),
        (2.5, 2.0, (DP, ILP), f"proven: {FASTER} more than 25.0% faster; DP and ILP (HiGHS) agree on the bound"),
        (2.0, 2.0, (DP,), f"not confirmed: {FASTER} faster; DP shows the bound, and no second solver was asked"),
        (2.0, 2.0, (DP, LATE), f"not confirmed: {FASTER} faster; {refuses} its bound is 1500 ms"),
        (
            *(2.5, 2.0, (DP, early)),
            f"not confirmed: {FASTER} more than 25.0% faster; {refuses} its bound is 1500 ms, and it ended early",
        ),
        (2.0, 2.0, (DP, NONE), f"not confirmed: {FASTER} faster; {refuses} it found no plan within the time limit"),
        (2.5, 0.0, (NONE,), "not proven: how much faster another plan could be is not known"),
        (1 + 2e-6, 1.0, (), f"not confirmed: {FASTER} more than 0.0002% faster; the bound is weaker than a solver's, "),
        # Two solvers confirm the lower of their bounds.
        (2.5, 1.5, (DP, LATE), "proven: "),
        (2.5, 1.5 * (1 + 1e-5), (DP, LATE), "not confirmed: "),
    ):
        verdict = verdict_of(step_s, bound_s, results)
        assert verdict.text.startswith(text), text
        assert verdict.proven is text.startswith("proven")
    cores = f"proven: {FASTER} faster; the cores that the workers share are never idle at the bound"
    for cores_s, proven in ((0.0, False), (1.9, False), (2.5, True)):
        verdict = verdict_of(2.5, 2.5, (), cores_s=cores_s)
        assert (verdict.proven, verdict.text == cores) == (proven, proven)
    assert gap_of(1.2, 1.0) == pytest.approx(0.2)
    assert (gap_of(1.0, 1.0 + 1e-9), gap_of(1.0, 0.0)) == (0, math.inf)


@pytest.fixture
def problem() -> Problem:
    return to_problem(random_instance(1, layers=5))


def test_solvers_that_agree_prove_and_one_alone_does_not(problem: Problem) -> None:
    verdict = solve.solve(problem).verdict
    assert verdict.proven
    assert verdict.provers == ("DP", "ILP (HiGHS)")
    assert not solve.solve(problem, Settings(solver="dp")).verdict.proven


def test_a_contradiction_is_caught(problem: Problem) -> None:
    first = solve_by_dp(problem)
    second = solve_by_ilp(problem, first.objective_s)
    less_s = second.objective_s * 0.99
    for other, words in (
        (second, ""),
        (replace(NONE, seconds=60.0), ""),
        (replace(second, objective_s=less_s, bound_s=less_s), "claims"),
        (replace(second, bound_s=second.bound_s * 1.01), "faster than the bound"),
        (replace(NONE, status=Status.INFEASIBLE, bound_s=math.inf), "claims that there is no plan"),
    ):
        found = contradiction(problem, [first, other])
        assert words in found
        assert bool(found) is bool(words)


def test_a_bound_with_everything_charged_is_compared_with_a_plan_charged_alike() -> None:
    """A plan whose cards are shared is slower than its objective without sharing, which no charged bound speaks of."""
    problem = Problem(load_profile("gnmt8-v100"), cluster_toml.load_cluster("A"))
    plain = solve_by_dp(replace(problem, options=replace(problem.options, contention=False)))
    score = evaluate(plain.plan, problem)
    assert score.step_time_s > score.alone_s * 1.1
    charged = replace(plain, solver="DP", objective_s=score.step_time_s, bound_s=score.step_time_s, charged=True)
    assert not contradiction(problem, [charged, replace(plain, solver="ILP (HiGHS)")])
    assert "faster than the bound" in contradiction(problem, [replace(charged, charged=False, plan=None), plain])


def test_a_disagreement_is_raised(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = dynamic_program.solve

    def pessimist(*arguments: object, **named: object) -> Result:
        """A program that claims as its bound more than it found."""
        result = honest(*arguments, **named)
        return replace(result, bound_s=result.bound_s * 2)

    monkeypatch.setattr(dynamic_program, "solve", pessimist)
    with pytest.raises(DisagreementError, match="the solvers disagree") as caught:
        solve.solve(problem)
    assert isinstance(caught.value, Disagreement)


# Baselines that were not taken.

REASON = "your constraints rule it out"
PROFILE = chain([Layer(name, 1.0, 2.0, 4, 4) for name in "abcd"], 4, 4, model_name="even")
"""Four equal layers, of which two stages are half as fast as four."""


def plan(stages: int, schedule: str = "1f1b-stashing") -> Plan:
    """Equal stages, one worker each."""
    each, flush = 4 // stages, schedule == "1f1b-flush"
    made = (
        Stage(tuple("abcd"[n * each : (n + 1) * each]), (n,), stages - n, 1 if flush else stages - n)
        for n in range(stages)
    )
    return Plan(tuple(made), schedule=schedule, accumulate=4 if flush else None)


def test_the_reason() -> None:
    """By the schedule of the plan, the step time of the faster baseline, whether it fits, and the options."""
    flush = Options(schedule="1f1b-flush", accumulate=4)
    for schedule, other_s, fits, options, why in (
        ("1f1b-stashing", 3.0, True, Options(stages=2), REASON),
        ("1f1b-stashing", 3.0, True, Options(max_workers=2), REASON),
        ("1f1b-stashing", 3.0, True, Options(), ""),
        ("1f1b-stashing", 6.0, True, Options(stages=2), ""),
        ("1f1b-stashing", 3.0, False, Options(stages=2), ""),
        ("1f1b-flush", 3.0, True, flush, "asynchronous, unlike this plan"),
    ):
        other = Baseline(UNIFORM_GRID, other_s, "1-1-1-1", plan=plan(4), fits=fits)
        problem = Problem(PROFILE, pipeplan.cluster("A", servers=1), options)
        assert not_taken_because(other, plan(2, schedule), 6.0, problem) == why


def test_every_answer_says_it(run: Run) -> None:
    PROFILE.save("profile.json")
    asked = ("--cluster", "A", "--servers", "1", "--stages", "2", "--max-replicas", "1", "--schedule", "1f1b-stashing")
    done = run("solve", *asked, "--solver", "dp")
    assert done.code == 0, done.err
    stated = {one["name"]: one for one in json.loads(Path("plan/plan.json").read_text())["baselines"]}
    assert stated[PARALLEL]["gain"] < 1
    assert stated[PARALLEL]["not_taken"] == REASON
    assert [name for name, one in stated.items() if one["gain"] >= 1 and "not_taken" in one] == []
    assert run("check", "plan").code == 0
    (row,) = (one for one in json.loads(run("report", "--json").out)["comparisons"] if one["name"] == PARALLEL)
    assert row["remark"].startswith(REASON)
    explained = " ".join(run("explain", "plan", "--samples", "0").out.split())
    assert f"Data parallelism is faster ({REASON}):" in explained
