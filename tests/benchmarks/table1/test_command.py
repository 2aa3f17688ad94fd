"""The command line of tests/benchmarks/reproduce_table1.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import reproduce_table1
from click.testing import CliRunner, Result

from pipeplan.planning.settings import Settings
from table1 import profiles
from table1.published import ROWS
from table1.table import Table, build_table

BENCHMARKS = Path(__file__).resolve().parents[1]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(reproduce_table1.command, arguments, env={"PIPEPLAN_REFERENCE": ""})


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--rows", "vgg"), "--rows: there is no row 'vgg'"),
        (("--reference", "nowhere"), "nowhere has no pipedream/vgg16.txt"),
    ],
    ids=["row", "reference"],
)
def test_wrong_options_are_refused(arguments: tuple[str, ...], complaint: str) -> None:
    result = run(*arguments)
    assert result.exit_code != 0
    assert complaint in result.output


def test_planning_the_table_needs_no_torch() -> None:
    code = "import sys, reproduce_table1; print([name for name in sys.modules if name.split('.')[0] == 'torch'])"
    done = subprocess.run([sys.executable, "-c", code], cwd=BENCHMARKS, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_a_row_is_written_as_markdown(tmp_path: Path) -> None:
    file = tmp_path / "table.md"
    result = run("--rows", "gnmt8-2x8", "--solver", "dp", "-o", str(file))
    assert result.exit_code == 0, result.output
    text = file.read_text(encoding="utf-8")
    assert "| gnmt8-2x8 | B | 16 | 1.00 | 1.00 | +0% |" in text
    assert f"{2**16 - 1 + 2**8 - 1:,} on 2x8" in text


def whole_table(reference: Path | None) -> Table:
    folder = profiles.folder_of(reference)
    return build_table(ROWS, folder, Settings(time_limit_s=20), lambda step: None)


@pytest.mark.slow
def test_the_whole_table_without_published_profiles() -> None:
    table = whole_table(None)
    assert [row.published for row in table.rows] == list(ROWS)
    assert not any(row.source.published for row in table.rows)


@pytest.mark.slow
def test_the_whole_table_on_published_profiles(reference: Path) -> None:
    """docs/evidence/table1.md states which rows are within the limit."""
    table = whole_table(reference)
    off = {row.published.name for row in table.rows if row.off}
    unexplained = {"awd-lm-1x4", "s2vt-4x1"}
    assert off - unexplained == {"alexnet-2x8", "gnmt16-1x4", "gnmt8-1x4", "gnmt16-4x4", "gnmt8-3x4"}
    for row in table.rows:
        assert row.ours.pace_s <= row.paper.pace_s * (1 + 1e-9)
        assert row.rank.place <= row.rank.among
