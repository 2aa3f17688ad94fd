"""docs/table1.md shows what the command prints; `python tests/docs/test_table1_page.py FOLDER` writes that anew.

FOLDER has PipeDream's published profiles (PIPEPLAN_REFERENCE).
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from pipeplan.cli import cli
from pipeplan.cli.reproduce import command
from pipeplan.reproduce.published import ROWS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "table1.md"
BLOCK = re.compile(r"<!-- table1 -->\n(.*?)<!-- /table1 -->", re.DOTALL)


def printed(reference: Path) -> str:
    """The table as Markdown, its titles one level down."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "table1.md"
        arguments = ["reproduce", "table1", "--reference", str(reference), "-o", str(file)]
        result = CliRunner().invoke(cli, arguments)
        assert result.exit_code == 0, result.output
        return re.sub(r"^## ", "### ", file.read_text(encoding="utf-8"), flags=re.MULTILINE)


@pytest.mark.slow
def test_the_page_shows_what_the_command_writes(reference: Path) -> None:
    (shown,) = BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    assert shown.strip() == printed(reference).strip()


def test_the_page_has_every_row() -> None:
    (shown,) = BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    for row in ROWS:
        assert f"| {row.name} | {row.cluster} |" in shown, row.name
        assert f"| {row.speedup:.2f} |" in shown


def test_the_commands_of_the_page_are_those_that_there_are() -> None:
    known = {name for parameter in command.params for name in parameter.opts}
    lines = re.findall(r"^ {4}pipeplan reproduce (.*)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(lines) >= 4
    for line in lines:
        what, *options = line.split()
        assert what == "table1"
        assert {option for option in options if option.startswith("-")} <= known, line


def main() -> None:
    """Write the table anew."""
    reference = Path(sys.argv[1] if len(sys.argv) > 1 else os.environ["PIPEPLAN_REFERENCE"])
    text = PAGE.read_text(encoding="utf-8")
    block = f"<!-- table1 -->\n\n{printed(reference).strip()}\n\n<!-- /table1 -->"
    PAGE.write_text(BLOCK.sub(lambda _: block, text), encoding="utf-8")


if __name__ == "__main__":
    main()
