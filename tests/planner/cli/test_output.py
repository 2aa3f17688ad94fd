"""Output of the command line: one module prints it, and it looks the same in files and pipes of any terminal."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from rich.table import Table

from pipeplan import cli
from pipeplan.cli import output

COMMANDS = Path(cli.__file__).parent
PRINTERS = {"output.py", "__init__.py"}
"""`__init__.py` prints errors."""


def called(path: Path) -> set[str]:
    calls = (node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
    return {ast.unparse(call) for call in calls}


def test_only_one_module_prints() -> None:
    printing = {"Console", "click.echo", "print", "json.dumps", "sys.stdout.write"}
    for path in COMMANDS.rglob("*.py"):
        if path.name not in PRINTERS:
            # A trace is written into a file.
            assert called(path) & printing <= ({"json.dumps"} if path.name == "simulate.py" else set()), path


def test_lines_are_folded_only_where_asked(capsys: pytest.CaptureFixture[str]) -> None:
    line = "word " * 40
    output.print_answer([line])
    assert capsys.readouterr().out.splitlines() == [line]
    output.print_answer([line], fold=True, narrow=True)
    assert max(map(len, capsys.readouterr().out.splitlines())) <= output.PIPED_WIDTH


def test_a_wide_table_is_not_cut_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("heading", box=None)
    table.add_row("x" * 200)
    output.print_answer([table], wide=True)
    assert "x" * 200 in capsys.readouterr().out


def test_text_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_answer(["[bold]a[/bold] :x: 12"])
    output.note("[red]b[/red] :x:")
    assert capsys.readouterr() == ("[bold]a[/bold] :x: 12\n", "[red]b[/red] :x:\n")


def test_a_note_is_dropped_while_standard_error_is_silenced(capsys: pytest.CaptureFixture[str]) -> None:
    with output.silenced():
        output.note("unseen")
        print("unseen", file=sys.stderr)
    output.note("seen")
    assert capsys.readouterr().err == "seen\n"


def test_progress_is_drawn_in_terminals_only(capsys: pytest.CaptureFixture[str]) -> None:
    with output.status("working") as show, output.progress_bar("working") as update:
        show("still working")
        update(1, 2, "half done")
    assert capsys.readouterr() == ("", "")


def test_a_closed_standard_output_is_no_error() -> None:
    command = f"{sys.executable} -m pipeplan list >&-"
    assert subprocess.run(["bash", "-c", command], capture_output=True).returncode == 0
