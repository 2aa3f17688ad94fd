"""Exit codes, output, pages of the documentation, and options that earlier versions had."""

from __future__ import annotations

import re
import subprocess
import sys
from unittest import mock

import click
import pytest
from commandline import Run, refused
from repository import ROOT
from rich.table import Table

from pipeplan import cli as commands
from pipeplan.cli import _COMMANDS, cli, output
from pipeplan.cli.commands.doctor import LACKING
from pipeplan.cli.usage_errors import GONE, GONE_COMMANDS, GONE_ELSEWHERE
from pipeplan.errors import DisagreementError, InputError
from pipeplan_launch import supervisor
from pipeplan_launch.elastic import restart_state

PAGE = ROOT / "docs" / "errors.md"


def stated(section: str) -> dict[int, str]:
    """The codes of a table of docs/errors.md."""
    text = PAGE.read_text(encoding="utf-8").partition(f"### {section}")[2].partition("\n#")[0]
    return {int(code): meaning for code, meaning in re.findall(r"^\| (\d+) \| (.*) \|$", text, re.MULTILINE)}


ENDS: tuple[tuple[BaseException | None, int], ...] = (
    (None, 0),
    (InputError("x"), 2),
    (click.UsageError("x"), 2),
    (DisagreementError("x"), 3),
    (KeyboardInterrupt(), 130),
    (OSError(28, "No space left on device"), 2),
)


def test_an_end_has_the_code_that_the_page_says(run: Run) -> None:
    for raised, code in ENDS:
        with mock.patch("pipeplan.cli.commands.list_.print_json", side_effect=raised):
            done = run("list", "--json")
        assert done.code == code
        assert code in stated("`pipeplan`")
        assert bool(done.err) == (raised is not None)


def test_the_page_has_all_codes_and_help_ends_with_them(run: Run) -> None:
    mine = [commands.DONE, commands.FIXABLE, commands.DISAGREED, commands.INTERRUPTED]
    assert list(stated("`pipeplan`")) == mine == [0, LACKING, 3, 130]
    assert list(stated("`launch.sh`")) == [0, 1, supervisor.STATUS_REPORTED, supervisor.STATUS_STOPPED]
    assert list(stated("A worker")) == [0, 1, 2, restart_state.STATUS_PEER_LOST, restart_state.STATUS_INTERRUPTED]
    last = " ".join(run("--help").out.split()).partition("Exit codes: ")[2]
    assert [int(code) for code in re.findall(r"(\d+) ", last)] == mine


def test_a_closed_standard_output_is_no_error() -> None:
    command = f"{sys.executable} -m pipeplan list >&-"
    assert subprocess.run(["bash", "-c", command], capture_output=True).returncode == 0


def test_answers_are_folded_only_where_asked_and_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    line, table = "word " * 40, Table("heading", box=None)
    table.add_row("x" * 200)
    output.print_answer([line, "[bold]a[/bold] :x: 12"])
    output.note("[red]b[/red] :x:")
    assert capsys.readouterr() == (f"{line}\n[bold]a[/bold] :x: 12\n", "[red]b[/red] :x:\n")
    output.print_answer([line], fold=True, narrow=True)
    assert max(map(len, capsys.readouterr().out.splitlines())) <= output.PIPED_WIDTH
    output.print_answer([table], wide=True)
    assert "x" * 200 in capsys.readouterr().out


def test_notes_are_dropped_while_standard_error_is_silenced_and_progress_is_for_terminals(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with output.silenced():
        output.note("unseen")
        print("unseen", file=sys.stderr)
    output.note("seen")
    with output.status("working") as show, output.progress_bar("working") as update:
        show("still working")
        update(1, 2, "half done")
    assert capsys.readouterr() == ("", "seen\n")


COMMANDS = ("solve", "explain", "sweep", "replan")


KEPT = {("sweep", "--jobs")}
"""Commands that still have an option of this name."""


def _options(command: str) -> set[str]:
    found = cli.get_command(None, command)  # type: ignore[arg-type]
    assert found is not None
    return {name for parameter in found.params for name in parameter.opts}


def test_a_gone_option_or_command_is_one_line_that_names_its_successor(run: Run) -> None:
    planning = {(command, gone): advice for command in COMMANDS for gone, advice in GONE.items()}
    for (command, gone), advice in (planning | GONE_ELSEWHERE).items():
        if (command, gone) in KEPT:
            assert gone in _options(command)
            continue
        words = ["word"] if command in ("profile", "profile show", "import") else []
        for value in ([], ["3"]):
            line = refused(run, *command.split(), *words, gone, *value)
            assert line == f"pipeplan {command}: there is no option {gone}; {advice}"
    assert "--max-replicas" not in refused(run, "simulate", "--straight"), "of a command that never had it"
    for command in ("solve", "sweep"):
        for advice in GONE.values():
            named = set() if "launch.sh" in advice else set(re.findall(r"--[\w-]+", advice))
            assert named <= _options(command), advice
    for gone, advice in GONE_COMMANDS.items():
        assert set(re.findall(r"pipeplan (\w+)", advice)) <= set(_COMMANDS)
        for words in ([gone], [gone, "plan", "--json"], ["help", gone], [gone, "--help"]):
            assert refused(run, *words) == f"there is no command {gone!r}; {advice}"


def test_pages_are_listed_with_their_titles_and_printed_as_they_are(run: Run) -> None:
    done = run("docs")
    assert (done.code, str(ROOT / "docs") in done.err) == (0, True)
    listed = {line.split()[0]: line.split(maxsplit=1)[1] for line in done.out.splitlines()}
    pages = ROOT.glob("docs/**/*.md")
    assert set(listed) == {path.relative_to(ROOT / "docs").with_suffix("").as_posix() for path in pages}
    assert (listed["proof"], listed["reference/cli"]) == ("The proof and the bound", "Command line")
    text = (ROOT / "docs" / "servers.md").read_text(encoding="utf-8")
    for name in ("servers", "docs/servers.md"):
        assert run("docs", name).out == text
    assert refused(run, "docs", "comparson").startswith("there is no page 'comparson'; did you mean 'comparison'")
    refused(run, "docs", "../README")
