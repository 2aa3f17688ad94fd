"""Commands and options that earlier versions had: one line names what takes their place."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from commandline import Run

from pipeplan.cli import _COMMANDS, cli
from pipeplan.cli.usage_errors import GONE, GONE_COMMANDS, GONE_ELSEWHERE

COMMANDS = ("solve", "explain", "sweep", "replan")
KEPT = {("sweep", "--jobs")}
"""Commands that still have an option of this name."""


def _options(command: str) -> set[str]:
    found = cli.get_command(None, command)  # type: ignore[arg-type]
    assert found is not None
    return {name for parameter in found.params for name in parameter.opts}


@pytest.mark.parametrize("gone", GONE)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_gone_option_is_one_line_that_names_its_successor(command: str, gone: str, run: Run) -> None:
    if (command, gone) in KEPT:
        assert gone in _options(command)
        return
    for value in ([], ["3"]):
        done = run(command, gone, *value)
        assert (done.code, done.out) == (2, "")
        assert done.err == f"error: pipeplan {command}: there is no option {gone}; {GONE[gone]}\n"
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize("command", ["solve", "sweep"])
def test_the_successors_are_options(command: str) -> None:
    """Each option that a message tells to use is an option of the command, or of the command that it names."""
    known = _options(command)
    for gone, advice in GONE.items():
        if "launch.sh" in advice:
            continue
        for word in advice.replace(":", " ").replace(";", " ").split():
            if word.startswith("--"):
                assert word in known, f"{gone}: {word}"


@pytest.mark.parametrize("gone", GONE_COMMANDS)
def test_a_gone_command_is_one_line_that_names_its_successor(gone: str, run: Run) -> None:
    for words in ([gone], [gone, "plan", "--json"], ["help", gone], [gone, "--help"]):
        done = run(*words)
        assert (done.code, done.out) == (2, "")
        assert done.err == f"error: there is no command {gone!r}; {GONE_COMMANDS[gone]}\n"
    for successor in re.findall(r"pipeplan (\w+)", GONE_COMMANDS[gone]):
        assert successor in _COMMANDS


@pytest.mark.parametrize(("command", "gone"), GONE_ELSEWHERE)
def test_a_gone_option_of_another_command_is_one_line(command: str, gone: str, run: Run) -> None:
    done = run(command, *([] if command in ("export", "simulate") else ["word"]), gone, "3")
    assert (done.code, done.out) == (2, "")
    assert done.err == f"error: pipeplan {command}: there is no option {gone}; {GONE_ELSEWHERE[command, gone]}\n"


def test_other_commands_keep_their_options(run: Run) -> None:
    done = run("simulate", "--straight")
    assert done.code == 2
    assert "--max-replicas" not in done.err
