"""Whatever is in a file or on the command line: an answer, or one clear line and exit code 2. Never a traceback, never
a search without end, never half a plan."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bases
import pytest
from kinds import ALL_KINDS, run_case

STEP = 25
"""Cases of one test; a case is named by its kind and its seed."""
SEEDS, LONG = range(2000, 2100), range(100_000, 101_600)
"""Cases of every kind: those that the quick tests take the first of, and those at length (twelve kinds make 20,400)."""
FEW, FEWEST = 4, 1
"""Quick cases of a kind, and of one whose every case solves a problem."""
SOLVING = ("costs", "checkpoints")
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


def _quick_and_slow() -> Iterator[Any]:
    """Every kind with its first few cases, and slow ones with all others."""
    for kind in ALL_KINDS:
        few = FEWEST if kind in SOLVING else FEW
        yield pytest.param(kind, SEEDS[:few], id=f"{kind}-first")
        for start in range(few, len(SEEDS), STEP):
            yield pytest.param(kind, SEEDS[start : start + STEP], id=f"{kind}-{SEEDS[start]}", marks=pytest.mark.slow)


@pytest.mark.parametrize(("kind", "seeds"), list(_quick_and_slow()))
def test_any_input_ends_well(
    kind: str, seeds: range, planned: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _all(kind, seeds, planned, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("start", LONG[::STEP])
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_any_input_ends_well_at_length(
    kind: str, start: int, planned: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _all(kind, range(start, start + STEP), planned, tmp_path, monkeypatch)
