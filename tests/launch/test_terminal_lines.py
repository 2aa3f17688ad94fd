"""What reaches a terminal, and the file of hosts that is none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pipeplan_launch.errors import LaunchError, print_status, terminal_line
from pipeplan_launch.launchers.hosts_file import read_hosts

EVIL = "a\x1b[2J\x9b31m\u202eb\u2066\nc\x07\u2028d"


def test_no_line_changes_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert terminal_line(EVIL) == "a\ufffd[2J\ufffd31m\ufffdb\ufffd c\ufffd d"
    assert terminal_line("größer → 多") == "größer → 多"
    print_status(EVIL)
    assert capsys.readouterr().err == f"{terminal_line(EVIL)}\n"


@pytest.mark.parametrize("kind", ["folder", "device", "pipe", "endless", "missing"])
def test_hosts_that_are_no_file_are_one_line(tmp_path: Path, kind: str) -> None:
    path = {"folder": tmp_path, "device": Path("/dev/zero")}.get(kind, tmp_path / kind)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "endless":
        with path.open("wb") as file:
            file.truncate(2**40)
    with pytest.raises(LaunchError, match=f"^cannot read {path}: ") as caught:
        read_hosts(str(path))
    assert "\n" not in str(caught.value)
