"""The reference pages are what the code says: `python tests/docs/reference.py` writes them anew."""

from __future__ import annotations

import re

import click
import pytest
from click.testing import CliRunner
from reference import REFERENCE, _measured, api, command_line, commands

import pipeplan
from pipeplan.cli import cli
from pipeplan.cli.problem_options import GroupedCommand

CONTEXTS = {context.command_path: context for context in commands()}
STALE = "python tests/docs/reference.py writes it anew"


def _section(path: str) -> str:
    """What the page says of one command, without what it says of those inside it."""
    parts = re.split(r"^#{2,} (.*)$", (REFERENCE / "cli.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))[path]


def test_the_page_of_commands_is_as_written_now() -> None:
    assert (REFERENCE / "cli.md").read_text(encoding="utf-8").strip() == command_line().strip(), STALE


def test_the_page_of_the_api_is_as_written_now() -> None:
    assert (REFERENCE / "api.md").read_text(encoding="utf-8").strip() == api().strip(), STALE


@pytest.mark.parametrize("path", CONTEXTS)
def test_the_page_has_all_that_help_says(path: str) -> None:
    """Word by word, whoever put it together."""
    shown = CliRunner().invoke(cli, [*path.split()[1:], "--help"], terminal_width=1000, max_content_width=1000).output
    section = _words(_section(path))
    command = _measured(CONTEXTS[path].command)
    headings = command.groups if isinstance(command, GroupedCommand) else ()
    for line in shown.splitlines()[1:]:
        if line.strip() not in (
            "",
            "Options:",
            "Commands:",
            *(f"{heading}:" for heading in headings),
        ) and not line.strip().startswith(("--help", "-h, --help")):
            missing = [word for word in _words(line) if word not in section]
            commands_of_a_group = isinstance(CONTEXTS[path].command, click.Group) and line.split()[0] in _names(path)
            assert not missing or commands_of_a_group, (line, missing)


def _names(path: str) -> list[str]:
    return [other.removeprefix(f"{path} ") for other in CONTEXTS if other.startswith(f"{path} ")]


def _words(text: str) -> list[str]:
    """Without what sets Markdown's words apart."""
    return re.sub(r"[`|]", " ", text.replace("\\", "")).split()


def test_every_name_of_the_api_is_described() -> None:
    page = (REFERENCE / "api.md").read_text(encoding="utf-8")
    module = pipeplan.solve.__globals__
    for name in module["__all__"]:
        assert f"### {name}\n" in page or f"**`{name}`**" in page, name
