"""What shells complete: asked of click as a shell asks it, and of real shells."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.shell_completion import CompletionItem, ShellComplete

from pipeplan.cli import _COMMANDS, cli
from pipeplan.cli.commands.export import TARGETS
from pipeplan.first_steps import init
from pipeplan.plan.schedules import SCHEDULES

PROGRAM, VARIABLE = "pipeplan", "_PIPEPLAN_COMPLETE"


def completed(line: str) -> list[CompletionItem]:
    """What a line could go on with, as a shell asks for it; the last word is the one that is begun."""
    *words, begun = line.split(" ")
    return ShellComplete(cli, {}, PROGRAM, VARIABLE).get_completions(words[1:], begun)


def words(line: str) -> set[str]:
    return {str(item.value) for item in completed(line) if item.type == "plain"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What `pipeplan init` writes, and a profile."""
    monkeypatch.chdir(tmp_path)
    init.write_starter_files(tmp_path, init.starter_files())
    (tmp_path / "mine.json").write_text("{}")
    return tmp_path


VALUES: dict[str, set[str]] = {
    "pipeplan solve --clu": {"--cluster"},
    "pipeplan solve --cluster ": {"A", "B", "C", "local", "cluster.toml"},
    "pipeplan solve --cluster cl": {"cluster.toml"},
    "pipeplan solve --schedule ": {*SCHEDULES},
    "pipeplan profile --device ": {"cpu", "cuda", "v100", "a100"},
    "pipeplan solve --staleness a": {"any"},
    "pipeplan solve --solver ": {"dp", "ilp", "both"},
    "pipeplan solve ": {"vgg16-v100", "mine.json"},
    "pipeplan explain resnet": {"resnet50-v100"},
    "pipeplan profile ": {"mnist", "vgg16", "show", "diff", "job.py"},
    "pipeplan profile mnist --gran": {"--granularity"},
    "pipeplan profile mnist --granularity ": {"module", "layer", "op"},
    "pipeplan profile --links --dev": {"--device"},
    "pipeplan profile show gnmt": {"gnmt8-v100", "gnmt16-v100"},
    "pipeplan profile diff mine.json vgg": {"vgg16-v100"},
    "pipeplan list ": {"models", "clusters"},
    "pipeplan list clusters c": {"cluster.toml"},
    "pipeplan export ": set(TARGETS),
    "pipeplan docs ser": {"servers"},
}


def test_commands_and_values(folder: Path) -> None:
    found = {item.value: item.help for item in completed("pipeplan ")}
    assert {name: help for name, help in found.items() if name in _COMMANDS} == {
        name: text for name, (_, text) in _COMMANDS.items()
    }
    assert words("pipeplan so") == {"solve"}
    assert words("pipeplan --vers") == {"--version"}
    assert words("pipeplan sovle --") <= {"--help", "--version"}
    for line, some in VALUES.items():
        assert words(line) >= some
        assert all(word.startswith(line.rpartition(" ")[2]) for word in words(line))
    for line in ("solve -o ", "simulate ", "report ", "profile job", "solve --cluster x"):
        assert {item.type for item in completed(f"pipeplan {line}")} & {"file", "dir"}, line


def test_in_bash(folder: Path) -> None:
    """The function that the script defines is called as bash calls it."""
    script = """
    eval "$(_PIPEPLAN_COMPLETE=bash_source pipeplan)"
    registered=$(complete -p pipeplan) || exit 1
    function=$(sed 's/.*-F \\([^ ]*\\).*/\\1/' <<< "$registered")
    COMP_WORDS=(pipeplan solve --cluster cl) COMP_CWORD=3
    "$function" pipeplan cl --cluster 2> /dev/null
    printf '%s\\n' "${COMPREPLY[@]}"
    """
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", script], cwd=folder, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout.split()) == (0, ["cluster.toml"]), done.stderr
