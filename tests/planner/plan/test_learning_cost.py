"""`solve` says of learning from old gradients what docs/evidence/learning.md has, or that it has nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from small_plans import shaped

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
    KnownLearning,
    known_learning,
)
from pipeplan.plan.plan import Plan

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


STRAIGHT = shaped((1, 1, 1), (3, 2, 1), "1f1b-stashing")
DOUBLE = shaped((2, 1), (2, 1), "2bw", 8)


def _known(plan: Plan, optimizer: str = "AdamW", correction: str = "none", state: float = 2.0) -> KnownLearning:
    known = known_learning(plan, optimizer, state, correction)
    assert known is not None
    return known


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
    known = _known(STRAIGHT, correction="ef")
    assert [(case.task, case.delay) for case in known.cases] == [("digits", 2), ("text", 2)]
    assert "digits: +35% ± 69%; text: +0% ± 15%" in known.text
    assert known.cost == pytest.approx((5.87 / 4.35 + 1.0) / 2)
    shorter = _known(shaped((1, 1), (2, 1), "1f1b-stashing"), "Adam", "ef")
    assert "gradients 1 update old, measured at 2" in shorter.text
    deeper = _known(shaped((1,) * 12, tuple(range(12, 0, -1)), "1f1b-stashing"), correction="ef")
    assert (deeper.cases, deeper.cost) == ((), None)
    assert deeper.text.startswith("Learning: not measured for AdamW")
    failing = _known(shaped((1, 1, 1), (3, 2, 1), "vertical-sync"))
    assert failing.cost is None
    assert "digits: 4 of 5 seeds reach the goal" in failing.text


def test_what_is_measured_depends_on_replicas_and_on_the_optimiser() -> None:
    assert "with replicated stages" in _known(shaped((2, 1), (2, 1), "1f1b-stashing")).text
    assert "the same at every stage" in _known(DOUBLE).text
    for fresh in (shaped((1, 1), (2, 1), "1f1b-flush", 8), shaped((4,), (1,), "1f1b-stashing")):
        assert known_learning(fresh, "AdamW", 2.0, "none") is None
    other = _known(STRAIGHT, "Lion")
    assert (other.text, other.cost) == ("Learning: not measured for this optimiser, Lion.", None)
    momentum, plain = _known(DOUBLE, "SGD", state=1.0), _known(DOUBLE, "SGD", state=0.0)
    assert [case.optimizer for case in momentum.cases] == ["SGD with momentum"] * 2
    assert plain.text == "Learning: not measured for this optimiser, SGD without momentum."
    # Where no seed reaches the goal it says what to do.
    none = replace(momentum, cases=tuple(replace(case, reached=0) for case in momentum.cases))
    some = replace(none, cases=(*none.cases[:-1], replace(none.cases[-1], reached=1)))
    assert none.text.endswith("lower the rate, or take --staleness 0.")
    assert (some.advice, replace(none, cases=()).advice) == ("", "")
