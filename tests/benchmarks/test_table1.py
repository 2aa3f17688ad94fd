"""The page of Table 1 shows what `reproduce_table1.py` prints, and VGG-16's published plan is the best of all."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
import reproduce_table1
from reproduce_table1 import Case, build_table, paper_plan
from table1_links import FITTED, ROWS, fit_efficiencies, folder_of, profile_of, row_named

from pipeplan.planning.settings import Settings


def test_the_published_rows_of_vgg16(reference: Path) -> None:
    """Fitted: so both gains come out, and 15-1 must be the best of all configurations to be believed."""
    folder = folder_of(reference)
    rows = {cluster: row for cluster, name in FITTED.items() if (row := row_named(name)) is not None}
    cases = {row.name: Case(row, profile_of(row, folder).profile) for row in rows.values()}
    known = fit_efficiencies(rows, lambda row, known: cases[row.name].gain(known))
    for name, wanted in (("vgg16-4x4", 5.28), ("vgg16-2x8", 2.98)):
        configurations = cases[name].configurations(known)
        plan, score = paper_plan(cases[name].row, configurations)
        assert cases[name].gain(known) == pytest.approx(wanted, rel=1e-9)
        assert (plan.config, configurations.rank(score.alone_s).place) == ("15-1", 1)


@pytest.mark.slow
def test_the_page_shows_the_table(reference: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for clock in ("perf_counter", "monotonic"):
        monkeypatch.setattr(time, clock, time.process_time)  # deadlines count CPU seconds
    table = build_table(ROWS, folder_of(reference), Settings(time_limit_s=20, simulate=False), lambda step: None)
    (shown,) = reproduce_table1.BLOCK.findall(reproduce_table1.PAGE.read_text(encoding="utf-8"))
    # A busy machine proves less within the time limit.
    found = (re.sub(r"proven \||≤\S+ \|", "|", text.strip()) for text in (shown, reproduce_table1.to_markdown(table)))
    assert next(found) == next(found)
