"""The script for a GPU, tried on the CPU: the form of its table, and that a failed check does not stop the others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import run
from repository import ROOT


def rows_of(folder: Path, *options: str) -> list[list[str]]:
    """The cells of the table that the script writes, header included; the same lines are on standard output."""
    command = [sys.executable, "tests/gpu/run.py", "--device", "cpu", "--out", str(folder), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    table = (folder / "table.md").read_text(encoding="utf-8")
    assert done.stdout.startswith(table), done.stderr
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()]


def test_the_table_has_a_row_for_every_check(tmp_path: Path) -> None:
    header, rule, hardware, doctor = rows_of(tmp_path, "--only", "hardware")
    assert header == ["check", "expected", "measured", "verdict"]
    assert rule == ["---"] * 4
    assert hardware[0] == "hardware"
    assert "torch 2." in hardware[2]
    assert doctor[0] == "pipeplan doctor"
    assert "pipeplan doctor" in (tmp_path / "log").read_text(encoding="utf-8")


def test_no_check_begins_when_the_time_is_over_and_each_says_so(tmp_path: Path) -> None:
    _, _, *rows = rows_of(tmp_path, "--only", "equal,shared,model", "--minutes", "0.1")
    assert [row[0] for row in rows[:2]] == ["equal", "shared"]
    assert {row[3] for row in rows} == {"not run, for lack of time"}


def test_an_error_in_a_part_of_a_check_is_a_row_and_goes_no_further(capsys: pytest.CaptureFixture[str]) -> None:
    with run.part("a profile"):
        raise run.CheckFailed("error: there is no CUDA device")
    assert capsys.readouterr().out == '@row ["a profile", "", "error: there is no CUDA device", "FAILED"]\n'
