"""The help of the planning commands: options under headings, each with one sentence that begins with a verb."""

from __future__ import annotations

import re

import click
import pytest
from commandline import Run

from pipeplan.cli import cli
from pipeplan.cli.problem_options import GROUPS

COMMANDS = ("solve", "explain", "sweep", "replan")
VERBS = {
    *("Allow", "Assume", "Cut", "Divide", "Draw", "Drop", "Give", "Keep", "Leave", "Limit", "Never", "Plan", "Print"),
    *("Put", "Read", "Replace", "Resume", "Run", "Search", "Seed", "Show", "Train", "Use", "Write"),
}


def _options(command: str) -> list[click.Option]:
    found = cli.get_command(click.Context(cli), command)
    assert found is not None
    return [parameter for parameter in found.params if isinstance(parameter, click.Option)]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_stands_once_under_its_heading(command: str, run: Run) -> None:
    text = run(command, "--help").out
    sections = dict(re.findall(r"^(\w[\w ]*):\n((?:  .*\n?|\n)+)", text.split("\nUsage")[-1], re.MULTILINE))
    shown = {heading: re.findall(r"^  (?:-\w, )?(--[\w-]+)", body, re.MULTILINE) for heading, body in sections.items()}
    own = {max(option.opts, key=len) for option in _options(command)} | {"--help"}
    for heading, names in GROUPS.items():
        assert shown[heading] == [name for name in names if name in own]
    further = shown.get("Options", [])
    assert sorted([*further, *(name for names in GROUPS.values() for name in names if name in own)]) == sorted(own)
    assert (command == "solve") is (further == [])


@pytest.mark.parametrize("command", COMMANDS)
def test_every_help_is_one_sentence_that_begins_with_a_verb(command: str) -> None:
    for option in _options(command):
        sentence = (option.help or "").partition("  [default")[0]
        assert sentence.split()[0] in VERBS, f"{option.opts}: {sentence}"
        assert not re.search(r"\. [A-Z]", sentence), f"{option.opts}: {sentence}"
