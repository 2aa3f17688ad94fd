"""Where a baseline is faster than the plan, every answer says why it was not taken."""

from __future__ import annotations

import json
from pathlib import Path

from commandline import Run
from long_chains import chain

import pipeplan
from pipeplan.plan.plan import Plan, Stage
from pipeplan.planning.baselines import PARALLEL, UNIFORM_GRID, Baseline, not_taken_because
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.layers import Layer

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
