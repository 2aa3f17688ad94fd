"""Whatever is in a file or on the command line: an answer, or one clear line and exit code 2. Never a traceback, never
a search without end, never half a plan."""

from __future__ import annotations

import os
from pathlib import Path

import bases
import pytest
from extents import slow_but_for
from kinds import ALL_KINDS, run_case

STEP = 25
"""Cases of one test; a case is named by its kind and its seed."""
QUICK, LONG = 50, 1600
"""Cases of every kind: half those that the quick tests choose from, and those at length (twelve kinds make 20,400)."""
SOLVING = ("costs", "checkpoints")
"""Kinds whose every case solves a problem: the default suite has only a few of them."""
pytestmark = pytest.mark.fuzz


@pytest.fixture(scope="session")
def planned(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Sound plan folders."""
    folder = tmp_path_factory.mktemp("planned")
    before = Path.cwd()
    os.chdir(folder)
    try:
        return [folder / made for made in bases.plan_folders()]
    finally:
        os.chdir(before)


def _all(kind: str, seeds: range, planned: list[Path], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "80")
    found = [wrong for seed in seeds if (wrong := run_case(kind, seed, planned, folder / "case"))]
    assert not found, f"{len(found)} of {len(seeds)} cases:\n" + "\n\n".join(found[:5])


@pytest.mark.parametrize("start", slow_but_for([2000], range(2000, 2000 + 2 * QUICK, STEP)))
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_any_input_ends_well(
    kind: str, start: int, planned: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 4 if kind in SOLVING and start == 2000 else STEP
    _all(kind, range(start, start + count), planned, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(100_000, 100_000 + LONG, STEP))
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_any_input_ends_well_at_length(
    kind: str, start: int, planned: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _all(kind, range(start, start + STEP), planned, tmp_path, monkeypatch)
