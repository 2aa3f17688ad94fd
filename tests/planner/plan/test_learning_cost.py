"""`solve` says of learning from old gradients what docs/evidence/learning.md has, or that it has nothing."""

from __future__ import annotations

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
    ratios = [pytest.approx((1.35, 0.69), abs=0.005), pytest.approx((1.0, 0.154), abs=0.005)]
    assert [case.ratio for case in known.cases] == ratios
    assert known.cost == pytest.approx((5.87 / 4.35 + 1.0) / 2)
    shorter = _known(shaped((1, 1), (2, 1), "1f1b-stashing"), "Adam", "ef")
    assert (shorter.delay, [case.delay for case in shorter.cases]) == (1, [2, 2])
    deeper = _known(shaped((1,) * 12, tuple(range(12, 0, -1)), "1f1b-stashing"), correction="ef")
    assert (deeper.measured, deeper.cases, deeper.cost) == (True, (), None)
    failing = _known(shaped((1, 1, 1), (3, 2, 1), "vertical-sync"))
    assert failing.cost is None
    assert ("digits", 4, 5) in [(case.task, case.reached, case.seeds) for case in failing.cases]


def test_what_is_measured_depends_on_replicas_and_on_the_optimiser() -> None:
    assert _known(shaped((2, 1), (2, 1), "1f1b-stashing")).spread == REPLICATED
    assert _known(DOUBLE).spread == UNIFORM
    for fresh in (shaped((1, 1), (2, 1), "1f1b-flush", 8), shaped((4,), (1,), "1f1b-stashing")):
        assert known_learning(fresh, "AdamW", 2.0, "none") is None
    other = _known(STRAIGHT, "Lion")
    assert (other.measured, other.optimizer, other.cost) == (False, "Lion", None)
    momentum, plain = _known(DOUBLE, "SGD", state=1.0), _known(DOUBLE, "SGD", state=0.0)
    assert [case.optimizer for case in momentum.cases] == ["SGD with momentum"] * 2
    assert (plain.measured, plain.optimizer) == (False, "SGD without momentum")
