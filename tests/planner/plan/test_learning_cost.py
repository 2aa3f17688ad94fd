"""`solve` says of learning from old gradients what docs/evidence/learning.md has, or that it has nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from commandline import Run

from pipeplan.plan.learning_cost import (
    ADAMW,
    CASES,
    FALLING,
    MOMENTUM,
    MUON,
    NADAM,
    REPLICATED,
    UNIFORM,
    Epochs,
    known_learning,
)
from pipeplan.plan.plan import Plan, Stage

DOCUMENT = Path(__file__).parents[3] / "docs" / "evidence" / "learning.md"
WAYS = {
    (UNIFORM, 1): "2bw",
    (UNIFORM, 2): "vertical-sync 1-1-1",
    (UNIFORM, 4): "every stage 4 late",
    (UNIFORM, 8): "every stage 8 late",
    (FALLING, 2): "1f1b-stashing 1-1-1",
    (REPLICATED, 2): "1f1b-stashing 2-1",
}
OPTIMIZERS = {"AdamW": ADAMW, "SGD": MOMENTUM, "NAdam": NADAM, "Muon": MUON}


def _plan(replicas: tuple[int, ...], depths: tuple[int, ...], schedule: str, accumulate: int | None = None) -> Plan:
    stages, first = [], 0
    for count, depth in zip(replicas, depths, strict=True):
        stages.append(Stage(("l",), tuple(range(first, first + count)), depth, 1))
        first += count
    return Plan(tuple(stages), schedule=schedule, accumulate=accumulate)


STRAIGHT = _plan((1, 1, 1), (3, 2, 1), "1f1b-stashing")
DOUBLE = _plan((2, 1), (2, 1), "2bw", 8)


def _cell(epochs: Epochs | None, seeds: str) -> str:
    return (
        seeds if epochs is None else f"{epochs.mean:g} ± {epochs.deviation:g} {f'({seeds})' if seeds else ''}".strip()
    )


def test_the_document_has_every_figure_and_no_other() -> None:
    """Its table has a column for each task and optimiser, and a row for each way and correction."""
    section = DOCUMENT.read_text(encoding="utf-8").partition("### Epochs to the goal")[2].partition("###")[0]
    head, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line.startswith("|")
    ]
    columns = [(words[0].rstrip(","), OPTIMIZERS[words[1]]) for words in map(str.split, head[2:])]
    shown = {(*row[:2], *column): cell for row in rows for column, cell in zip(columns, row[2:], strict=True) if cell}
    known = {
        (WAYS[case.spread, case.delay], case.correction, case.task, case.optimizer): _cell(
            case.epochs, f"{case.reached}/{case.seeds}"
        )
        for case in CASES
    }
    alone = {("one process", "", case.task, case.optimizer): _cell(case.alone, "") for case in CASES if case.alone}
    assert shown == known | alone


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
    assert learning["source"].startswith("docs/evidence/learning.md")
    assert said not in " ".join(run(*words, "--schedule", "1f1b-flush", "--batch", "128").out.split())
