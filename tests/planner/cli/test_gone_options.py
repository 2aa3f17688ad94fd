"""Commands and options that earlier versions had: one line names what takes their place."""

from __future__ import annotations

import re

from commandline import Run, refused

from pipeplan.cli import _COMMANDS, cli
from pipeplan.cli.usage_errors import GONE, GONE_COMMANDS, GONE_ELSEWHERE

COMMANDS = ("solve", "explain", "sweep", "replan")
KEPT = {("sweep", "--jobs")}
"""Commands that still have an option of this name."""


def _options(command: str) -> set[str]:
    found = cli.get_command(None, command)  # type: ignore[arg-type]
    assert found is not None
    return {name for parameter in found.params for name in parameter.opts}


def test_a_gone_option_is_one_line_that_names_its_successor(run: Run) -> None:
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


def test_the_successors_are_options_and_commands() -> None:
    for command in ("solve", "sweep"):
        known = _options(command)
        for gone, advice in GONE.items():
            words = advice.replace(":", " ").replace(";", " ").split() if "launch.sh" not in advice else []
            assert [word for word in words if word.startswith("--") and word not in known] == [], gone
    for advice in GONE_COMMANDS.values():
        assert set(re.findall(r"pipeplan (\w+)", advice)) <= set(_COMMANDS)


def test_a_gone_command_is_one_line_that_names_its_successor(run: Run) -> None:
    for gone, advice in GONE_COMMANDS.items():
        for words in ([gone], [gone, "plan", "--json"], ["help", gone], [gone, "--help"]):
            assert refused(run, *words) == f"there is no command {gone!r}; {advice}"
