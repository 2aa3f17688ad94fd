"""`solve` says of learning from old gradients what docs/learning-figures.md has, or that it has nothing."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from commandline import Run

from pipeplan.plan.learning_cost import CASES, LearningCase, known_learning
from pipeplan.plan.plan import Plan, Stage

DOCUMENT = Path(__file__).parents[3] / "docs" / "learning-figures.md"
ROWS = {
    ("uniform", 1): "2bw",
    ("uniform", 2): "vertical sync 1-1-1",
    ("uniform", 4): "every stage 4 updates late",
    ("uniform", 8): "every stage 8 updates late",
    ("falling", 2): "stashing 1-1-1",
    ("replicated", 2): "stashing 2-1",
}


def _plan(replicas: tuple[int, ...], depths: tuple[int, ...], schedule: str, accumulate: int | None = None) -> Plan:
    stages, first = [], 0
    for count, depth in zip(replicas, depths, strict=True):
        stages.append(Stage(("l",), tuple(range(first, first + count)), depth, 1))
        first += count
    return Plan(tuple(stages), schedule=schedule, accumulate=accumulate)


STRAIGHT = _plan((1, 1, 1), (3, 2, 1), "1f1b-stashing")
DOUBLE = _plan((2, 1), (2, 1), "2bw", 8)


@pytest.mark.parametrize("case", [case for case in CASES if case.epochs], ids=str)
def test_every_figure_is_in_the_document(case: LearningCase) -> None:
    """A row of a table of the task has the schedule, the correction, and the epochs with their deviation."""
    assert case.epochs is not None
    kind = {"falling to the last stage": "falling", "the same at every stage": "uniform"}.get(case.spread, "replicated")
    way = ROWS[kind, case.delay]
    sections = re.split(r"^### ", DOCUMENT.read_text(encoding="utf-8"), flags=re.MULTILINE)
    mine = [section for section in sections if section.lower().startswith(case.task.lower())]
    rows = [line for section in mine for line in section.splitlines()]
    rows = [row for row in rows if row.startswith(f"| {way} | {case.correction} |")]
    mean, deviation = case.epochs.mean, case.epochs.deviation
    stated = {
        f"{mean:.2f} ± {deviation:.2f}",
        f"{mean:.1f} ± {deviation:.1f}",
        *([] if deviation else [f"{mean:.2f} |"]),
    }
    assert any(words in row for words in stated for row in rows)


def test_the_nearest_case_is_not_below_the_delay() -> None:
    known = known_learning(STRAIGHT, "AdamW", 2.0, "ef")
    assert known is not None
    assert [(case.task, case.delay) for case in known.cases] == [("digits", 2), ("text", 2)]
    assert "digits: +35% ± 69%; text: +0% ± 15%" in known.text
    assert known.cost == pytest.approx((5.87 / 4.35 + 1.0) / 2)
    shorter = known_learning(_plan((1, 1), (2, 1), "1f1b-stashing"), "Adam", 2.0, "ef")
    assert shorter is not None
    assert "gradients 1 update old, measured at 2" in shorter.text
    deeper = known_learning(_plan((1,) * 12, tuple(range(12, 0, -1)), "1f1b-stashing"), "AdamW", 2.0, "ef")
    assert deeper is not None
    assert (deeper.cases, deeper.cost) == ((), None)
    assert deeper.text.startswith("Learning: not measured for AdamW")


def test_seeds_that_fail_leave_no_cost() -> None:
    known = known_learning(_plan((1, 1, 1), (3, 2, 1), "vertical-sync"), "AdamW", 2.0, "none")
    assert known is not None
    assert known.cost is None
    assert "digits: 4 of 5 seeds reach the goal" in known.text


def test_replicas_count_under_stashing_only() -> None:
    replicated = known_learning(_plan((2, 1), (2, 1), "1f1b-stashing"), "AdamW", 2.0, "none")
    double = known_learning(DOUBLE, "AdamW", 2.0, "none")
    assert replicated is not None
    assert double is not None
    assert "with replicated stages" in replicated.text
    assert "the same at every stage" in double.text


def test_nothing_is_said_of_fresh_gradients_and_no_optimiser_is_taken_for_another() -> None:
    assert known_learning(_plan((1, 1), (2, 1), "1f1b-flush", 8), "AdamW", 2.0, "none") is None
    assert known_learning(_plan((4,), (1,), "1f1b-stashing"), "AdamW", 2.0, "none") is None
    known = known_learning(STRAIGHT, "Lion", 2.0, "none")
    assert known is not None
    assert known.text == "Learning: not measured for this optimiser, Lion."
    assert known.cost is None


def test_sgd_with_state_has_momentum() -> None:
    momentum, plain = known_learning(DOUBLE, "SGD", 1.0, "none"), known_learning(DOUBLE, "SGD", 0.0, "none")
    assert momentum is not None
    assert plain is not None
    assert [case.optimizer for case in momentum.cases] == ["SGD with momentum"] * 2
    assert plain.text == "Learning: not measured for this optimiser, SGD without momentum."


def test_where_no_seed_reaches_the_goal_it_says_what_to_do() -> None:
    momentum = known_learning(DOUBLE, "SGD", 1.0, "none")
    assert momentum is not None
    none = replace(momentum, cases=tuple(replace(case, reached=0) for case in momentum.cases))
    some = replace(none, cases=(*none.cases[:-1], replace(none.cases[-1], reached=1)))
    assert none.text.endswith("lower the rate, or take --staleness 0.")
    assert (some.advice, replace(none, cases=()).advice) == ("", "")


def test_solve_says_it_and_plan_json_has_the_source(run: Run) -> None:
    words = ("solve", "mnist-v100", "--cluster", "C", "--solver", "dp", "--no-write")
    named = (*words, "--schedule", "2bw", "--batch", "128")
    said = "RISKY: AdamW missed the goal in"
    assert said in " ".join(run(*named).out.split())
    learning = json.loads(run(*named, "--json").out)["updates"]["learning"]
    assert learning["source"].startswith("docs/learning-figures.md")
    assert said not in " ".join(run(*words, "--schedule", "1f1b-flush", "--batch", "128").out.split())
