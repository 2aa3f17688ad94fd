"""docs/evidence/table1.md shows what the benchmark prints. `table1/update_page.py` writes the table anew."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import reproduce_table1

from table1.published import ROWS
from table1.update_page import BLOCK, PAGE, printed_table


@pytest.fixture
def shown() -> str:
    (block,) = BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    return str(block)


@pytest.mark.slow
def test_the_page_shows_what_the_benchmark_writes(reference: Path, shown: str) -> None:
    assert shown.strip() == printed_table(reference).strip()


def test_the_page_has_every_row(shown: str) -> None:
    for row in ROWS:
        assert f"| {row.name} | {row.cluster} |" in shown, row.name
        assert f"| {row.speedup:.2f} |" in shown


def test_the_options_on_the_page_exist() -> None:
    known = {name for parameter in reproduce_table1.command.params for name in parameter.opts}
    text = PAGE.read_text(encoding="utf-8")
    lines = re.findall(r"^ {4}\S*python tests/benchmarks/reproduce_table1\.py(.*)$", text, re.MULTILINE)
    assert len(lines) >= 2
    for line in lines:
        assert {option for option in line.split() if option.startswith("-")} <= known, line
