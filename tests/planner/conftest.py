"""What tests of the command line share."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from commandline import Ran, Run

from pipeplan.cli import main


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Call the CLI in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    def call(*arguments: str) -> Ran:
        monkeypatch.setattr(sys, "argv", ["pipeplan", *arguments])
        with pytest.raises(SystemExit) as stopped:
            main()
        captured = capsys.readouterr()
        return Ran(int(stopped.value.code or 0), captured.out, captured.err)

    return call
