"""Exit codes are those of docs/errors.md."""

from __future__ import annotations

import re
from unittest import mock

import click
from commandline import Run
from repository import ROOT

from pipeplan import cli as commands
from pipeplan.cli.commands.doctor import LACKING
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
