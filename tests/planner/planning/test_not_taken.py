"""Where a baseline is faster than the plan, every answer says why it was not taken."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commandline import Run

import pipeplan
from pipeplan.plan.plan import Plan, Stage
from pipeplan.planning.baselines import PARALLEL, UNIFORM_GRID, Baseline, not_taken_because
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.layers import Layer, Tensor
from pipeplan.profile_data.profile import Profile

NAMES = ("a", "b", "c", "d")
REASON = "your constraints rule it out"


def profile() -> Profile:
    """Four equal layers, of which two stages are half as fast as four."""
    layers = tuple(Layer(name, 1.0, 2.0, 4, 4) for name in NAMES)
    tensors = tuple(Tensor(f"t{index}", NAMES[index], (NAMES[index + 1],), 4, 4) for index in range(3))
    return Profile(layers, tensors, 4, model_name="even")


def plan(stages: int, schedule: str = "1f1b-stashing") -> Plan:
    """Equal stages, one worker each."""
    each = len(NAMES) // stages
    flush = schedule == "1f1b-flush"
    made = [
        Stage(
            NAMES[number * each : (number + 1) * each],
            (number,),
            depth=stages - number,
            versions=1 if flush else stages - number,
        )
        for number in range(stages)
    ]
    return Plan(tuple(made), schedule=schedule, accumulate=4 if flush else None)


@pytest.mark.parametrize(
    ("own", "other_s", "fits", "options", "why"),
    [
        (plan(2), 3.0, True, Options(stages=2), REASON),
        (plan(2), 3.0, True, Options(max_workers=2), REASON),
        (plan(2), 3.0, True, Options(), ""),
        (plan(2), 6.0, True, Options(stages=2), ""),
        (plan(2), 3.0, False, Options(stages=2), ""),
        (
            plan(2, "1f1b-flush"),
            3.0,
            True,
            Options(schedule="1f1b-flush", accumulate=4),
            "asynchronous, unlike this plan",
        ),
    ],
)
def test_the_reason(own: Plan, other_s: float, fits: bool, options: Options, why: str) -> None:
    other = Baseline(UNIFORM_GRID, other_s, "1-1-1-1", plan=plan(4), fits=fits)
    problem = Problem(profile(), pipeplan.cluster("A", servers=1), options)
    assert not_taken_because(other, own, 6.0, problem) == why


def test_every_answer_says_it(run: Run) -> None:
    profile().save("profile.json")
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
