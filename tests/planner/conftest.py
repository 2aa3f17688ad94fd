"""What tests of the command line share, and those of reports."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from commandline import Ran, Run
from reported import Document, branching, report_of, small_cluster, source_of, vgg

from pipeplan.cli import main
from pipeplan.problem.options import Options
from pipeplan.report.source import ReportSource


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


@pytest.fixture(scope="session")
def source() -> ReportSource:
    """VGG-16 on two servers of eight: one wide stage, and one behind it."""
    return source_of(vgg(), "B")


@pytest.fixture(scope="session")
def document(source: ReportSource) -> Document:
    """Its report."""
    return report_of(source)


@pytest.fixture(scope="session")
def straight() -> ReportSource:
    """A pipeline of three stages and more, of a model that branches."""
    return source_of(branching(), small_cluster(), Options(max_replicas=1, allow_copies=False))
